"""Which product computes in which format: six operands a product, a product of each kind of the model.

A product is y = x w with the gradients dx = dy w^T and dw = x^T dy; each of its three multiplications has two operands, each
quantised along the dim that multiplication sums over. T rows, K and N the dims of w [K, N].
"""

import dataclasses
from collections.abc import Iterator

from moex.config import PrecisionConfig
from pallas_kernels.quantize import FORMATS, Format

KINDS = ("attention", "mlp", "shared", "experts")
"""Products that a recipe can be given to. Router, embedding, head, norms, loss, sums over experts and devices have none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmRecipe:
    """Formats of the operands of x w (x, w), of dy w^T (dy, w_dgrad) and of x^T dy (x_wgrad, dy_wgrad).

    Results are summed in float32; dw stays float32.  Raises ValueError where two factors don't go together.
    """

    name: str
    x: Format
    w: Format
    dy: Format
    w_dgrad: Format
    x_wgrad: Format
    dy_wgrad: Format

    def __post_init__(self):
        for a, b in (("x", "w"), ("dy", "w_dgrad"), ("x_wgrad", "dy_wgrad")):
            first, second = getattr(self, a), getattr(self, b)
            if (first.kind, first.hadamard) != (second.kind, second.hadamard):
                raise ValueError(
                    f"recipe {self.name}: {a} and {b} are multiplied, so both must be of one kind and turned alike, got "
                    f"{first.kind!r} (hadamard={first.hadamard}) and {second.kind!r} (hadamard={second.hadamard})"
                )
        if self.w.square and (self.w.kind, self.w.rows) != (self.w_dgrad.kind, self.w_dgrad.rows):
            raise ValueError(f"recipe {self.name}: square tiles of w serve both products, so w_dgrad must be the same")

    @property
    def one_copy(self) -> bool:
        """Whether one set of a weight's codes serves forward and backward."""
        return self.w.square and self.w == self.w_dgrad

    @property
    def tile(self) -> int:
        """What K, N and the rows of an expert must be multiples of; 1 where one scale is for all."""
        formats = (self.x, self.w, self.dy, self.w_dgrad, self.x_wgrad, self.dy_wgrad)
        return max(1 if f.kind == "tensor" else f.columns for f in formats)

    def rows_of_table(self) -> Iterator[tuple[str, str, Format, bool]]:
        """(multiplication, operand, format, whether its codes are kept for the backward pass)."""
        yield from (("forward", "x", self.x, False), ("forward", "w", self.w, False))
        yield from (("dgrad", "dy", self.dy, False), ("dgrad", "w", self.w_dgrad, False))
        yield from (("wgrad", "x", self.x_wgrad, True), ("wgrad", "dy", self.dy_wgrad, False))


def _recipes() -> dict[str, GemmRecipe]:
    loud = {name: dataclasses.replace(f, loud=True) for name, f in FORMATS.items()}
    block, square, tensor, mx = (loud[n] for n in ("e4m3_1x128", "e4m3_128x128", "e4m3_tensor", "mx_e4m3"))
    wide, small, small_square = loud["e5m2_tensor"], loud["nvfp4"], loud["nvfp4_16x16"]
    turned = dataclasses.replace(small, hadamard=True)
    noisy = lambda f: dataclasses.replace(f, stochastic=True)
    every = lambda name, f: GemmRecipe(name=name, x=f, w=f, dy=f, w_dgrad=f, x_wgrad=f, dy_wgrad=f)
    found = [
        GemmRecipe(name="fp8_block", x=block, w=square, dy=block, w_dgrad=square, x_wgrad=block, dy_wgrad=block),
        GemmRecipe(name="fp8_tensor", x=tensor, w=tensor, dy=wide, w_dgrad=tensor, x_wgrad=tensor, dy_wgrad=wide),
        every("mxfp8", mx),
        GemmRecipe(
            name="nvfp4",
            x=small,
            w=small_square,
            dy=noisy(small),
            w_dgrad=small_square,
            x_wgrad=turned,
            dy_wgrad=noisy(turned),
        ),
    ]
    return {recipe.name: recipe for recipe in found}


RECIPES = _recipes()
"""By name. fp8_block: DeepSeek-V3 (arXiv 2412.19437 section 3.3) with power-of-two scales. fp8_tensor: a scale an array, E4M3
forward and E5M2 gradients (arXiv 2209.05433). mxfp8: OCP Microscaling 1.0, all E4M3. nvfp4: arXiv 2509.25149, square tiles of
weights, a Hadamard turn in weight gradients, gradients rounded stochastically."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """What a configuration means: a recipe or None (the compute dtype) for each of `KINDS`.

    wire, wire_gradients: format in which tokens, and gradients of combined results, travel to experts, or None.
    gather: "codes" where quantised weights are gathered as codes of the float32 master, "compute" where the gathered image
    in the compute dtype is quantised.
    """

    attention: GemmRecipe | None = None
    mlp: GemmRecipe | None = None
    shared: GemmRecipe | None = None
    experts: GemmRecipe | None = None
    wire: Format | None = None
    wire_gradients: Format | None = None
    gather: str = "compute"

    def recipe(self, kind: str | None) -> GemmRecipe | None:
        """Of a kind of product; None for arrays that are in no such product."""
        return getattr(self, kind) if kind else None

    @property
    def align(self) -> int:
        """What an expert's first row must be a multiple of, so that no tile along tokens is of two experts."""
        return 128 if self.experts else 1


def resolve(config: PrecisionConfig) -> Precision:
    """The recipes that a configuration's names stand for."""
    named = {kind: getattr(config, kind) for kind in KINDS}
    chosen = {kind: config.recipe if name == "recipe" else name for kind, name in named.items()}
    wire = dataclasses.replace(FORMATS["e4m3_1x128"], loud=True)
    return Precision(
        **{kind: RECIPES.get(name) for kind, name in chosen.items()},
        wire=wire if config.wire in ("forward", "both") else None,
        wire_gradients=wire if config.wire == "both" else None,
        gather=config.gather,
    )
