"""Formats of quantised arrays: which codes, which tile shares a scale, how the scale is made.

R rows, K columns; K is the dim that a product sums over, so tiles are longer along it.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

E4M3, E5M2, E2M1 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2), jnp.dtype(jnp.float4_e2m1fn)

LARGEST = {E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0}
"""The largest finite number of each code."""


class Quantised(NamedTuple):
    """codes times scales (times outer) is the value.

    codes: [..., R, K].  scales: [..., R / tile rows, K / tile columns]; float32 where tiles are of 128 or the whole array,
    float8_e8m0fnu for MX, float8_e4m3fn for NVFP4.  outer: float32 second level of NVFP4, which broadcasts against
    scales; None elsewhere.
    """

    codes: jax.Array
    scales: jax.Array
    outer: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """One way to write an array in 8 or 4 bits.

      kind: "block" and "tensor" have float32 scales (DeepSeek-V3, arXiv 2412.19437 section 3.3; "tensor" has one), "mx" E8M0
        scales (OCP Microscaling 1.0), "nvfp4" E4M3 scales beneath a float32 one (arXiv 2509.25149).
      dtype: of the codes.  rows, columns: of a tile; without effect on "tensor".
      power_of_two: scales of "block" and "tensor" are rounded to powers of two, codes with them. Then a second quantisation
        in another direction, or a detour over bfloat16, loses nothing more.
      hadamard: values are first turned by `hadamard`, 16 columns at a time.  stochastic: codes are rounded up or down at
        random so that their mean is the value.  Both for "nvfp4" only.
    loud: a tile with an infinity or NaN gets the scale NaN, so that training sees what saturating codes would hide.
    """

    kind: Literal["block", "tensor", "mx", "nvfp4"]
    dtype: jnp.dtype
    rows: int = 1
    columns: int = 128
    power_of_two: bool = True
    hadamard: bool = False
    stochastic: bool = False
    loud: bool = False

    def __post_init__(self):
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        codes = (E2M1,) if self.kind == "nvfp4" else (E4M3, E5M2)
        if self.dtype not in codes:
            raise ValueError(f"Format: kind {self.kind!r} takes codes {[c.name for c in codes]}, got {self.dtype.name}")
        if (self.hadamard or self.stochastic) and self.kind != "nvfp4":
            raise ValueError(f"Format: hadamard and stochastic are for kind 'nvfp4', got {self.kind!r}")
        if self.rows < 1 or self.columns < 1 or self.rows not in (1, self.columns):
            raise ValueError(f"Format: a tile has one row or is square, got {self.rows}x{self.columns}")

    @property
    def square(self) -> bool:
        """A transposed array then needs no second quantisation."""
        return self.kind == "tensor" or self.rows == self.columns

    def tile(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns that share a scale in an array of this shape; ValueError where tiles don't fill it."""
        if len(shape) < 2:
            raise ValueError(f"an array to quantise is [..., R, K], got shape {shape}")
        if self.kind == "tensor":
            return shape[-2], shape[-1]
        if shape[-2] % self.rows or shape[-1] % self.columns:
            raise ValueError(
                f"{self.kind} tiles of {self.rows}x{self.columns} don't fill [R, K] = {list(shape[-2:])}: pad with zeros"
            )
        return self.rows, self.columns


def _formats() -> dict[str, Format]:
    found = {}
    for name, dtype in (("e4m3", E4M3), ("e5m2", E5M2)):
        found[f"{name}_1x128"] = Format(kind="block", dtype=dtype)
        found[f"{name}_128x128"] = Format(kind="block", dtype=dtype, rows=128)
        found[f"{name}_tensor"] = Format(kind="tensor", dtype=dtype, power_of_two=False)
        found[f"mx_{name}"] = Format(kind="mx", dtype=dtype, columns=32)
    found["nvfp4"] = Format(kind="nvfp4", dtype=E2M1, columns=16)
    found["nvfp4_16x16"] = Format(kind="nvfp4", dtype=E2M1, rows=16, columns=16)
    return found


FORMATS = _formats()
"""The usual formats by name; `dataclasses.replace` makes variants."""


def as_format(given: Format | str) -> Format:
    """The format itself, or the one of that name; ValueError with the names for another."""
    if isinstance(given, Format):
        return given
    if given not in FORMATS:
        raise ValueError(f"no format {given!r}: choose one of {', '.join(FORMATS)}")
    return FORMATS[given]
