"""What moex quantises inside rules of its own: experts in FP8, clones' weights that travel as codes.

E experts, R rows of a device, W the width of most, S slots for clones.
"""

import jax.numpy as jnp
import numpy as np

from mesh import place
from moex import dispatch
from moex.balance import echo
from moex.layers import param, wire
from moex.layers.experts import quantised_expert_mlp
from moex.precision.linear import linear
from moex.precision.recipes import RECIPES
from moex.precision.weight import enter, quantise_here
from pallas_kernels.quantize import FORMATS
from tests.replicated.check import Case, part
from tests.replicated.draw import normal, on_each_device, whole

E, R, W = 4, 260, 128
SIZES = np.array([[128, 0, 0, 128], [0, 128, 0, 0]], np.int32)  # rows of each expert on each device; some past the last
SLOTS = np.array([[2], [1]], np.int32)  # of the two devices, each a clone of one of the other's experts


def cases():
    yield from products()
    yield from wires()
    yield from clones()


def products():
    """Experts and dense products, weights quantised where they are or gathered from both devices as codes.

    Tiles of tokens are a device's own here, so gradients agree up to sums of float32.
    """
    matrices = dict(gate_up=normal(0, E, W, 2 * W) / 11, down=normal(1, E, W, W) / 11)
    inputs = dict(x=normal(2, 2, R, W), weights=np.abs(normal(3, 2, R)), sizes=SIZES)
    for name in ("fp8_block", "mxfp8"):

        def experts(fold, w, inputs, name=name):
            quantised = [quantise_here(w[k], RECIPES[name], slices=1) for k in ("gate_up", "down")]
            one = lambda i: quantised_expert_mlp(i["x"], i["weights"], i["sizes"], *quantised)
            return on_each_device(one, inputs)

        yield f"experts in {name}", Case(experts, matrices, inputs)

    def gathered(fold, w, inputs):
        if not fold.names:
            weight = quantise_here(w, RECIPES["fp8_block"])
        else:
            where = place(w.shape, (None, None), fold)
            options = dict(slices=0, contracted=1, gather="codes", dtype=jnp.float32)
            weight = enter(part(w, where.zero, where.zero_dim), where, RECIPES["fp8_block"], **options)
        return on_each_device(lambda i: linear(i["x"], weight), inputs)

    for name, shape in {"": (2 * W, W), ", tiles on both devices": (W, 3 * W // 2)}.items():
        inputs = dict(x=normal(2, 2, 5, shape[0]), sizes=SIZES)
        yield f"linear, gathered in codes{name}", Case(gathered, normal(0, *shape) / 16, inputs, communicates=True)


def wires():
    """Rows to their experts in codes, which whole numbers up to three are exactly, and gradients of results likewise."""
    chosen = np.stack([np.random.default_rng(t).permutation(E + 1)[:2] for t in range(8)]).astype(np.int32)
    inputs = dict(x=whole(0, 8, W), experts=chosen)
    format = FORMATS["e4m3_1x128"]

    def moved(fold, weights, inputs):
        transport = "alltoall" if fold.names else "local"
        plan = dispatch.plan(transport, inputs["experts"], E, fold, align=2)
        rows = wire.send(transport, inputs["x"] * weights, plan, fold, format).values()
        return wire.combine(transport, rows, plan, fold, format)

    signs_or_zero = np.sign(whole(2, 1, W))
    yield (
        "rows on the wire in FP8",
        Case(moved, signs_or_zero, inputs, expert=dict(ep=2), exact=True, communicates=True),
    )


def clones():
    """Weights of clones, fetched as codes."""

    def fetched(fold, w, inputs):
        if fold.names:
            clones = echo.fetch_in_float8(w["w"], jnp.asarray(SLOTS), 1, fold.expert.ep)
        else:
            clones = w["w"][SLOTS[:, 0]]
        return clones * inputs["x"]

    declared = dict(w=param.Declaration(shape=(E, W, W), axes=("ep", None, None)))
    given = dict(declared=declared, expert=dict(ep=2), exact=True, communicates=True)
    yield "clones' weights in FP8", Case(fetched, dict(w=whole(4, E, W, W)), dict(x=whole(5, 2, W, W)), **given)
