"""Quantisation to FP8 (tiles of 128, one scale, MX) and NVFP4, with kernels for Hopper's 128-blocks.

R rows, K columns (the dim that a product sums over), r x c the tile that shares a scale.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import hopper, tuned
from pallas_kernels.choose import choose
from pallas_kernels.quantize import mosaic_sm90, reference, rounding, xla
from pallas_kernels.quantize.config import Tiles
from pallas_kernels.quantize.formats import FORMATS, Format, Quantised, as_format
from pallas_kernels.vma import align, axes_of, cast_to

__all__ = [
    "FORMATS",
    "Format",
    "Quantised",
    "Tiles",
    "dequantize",
    "hadamard",
    "implementations",
    "quantize",
    "quantize_both",
    "tile_scales",
    "transposed",
]

_SIDES = dict(rows=mosaic_sm90.Wanted(True, False), columns=mosaic_sm90.Wanted(False, True))


def quantize(
    x,
    format: Format | str,
    *,
    transpose: bool = False,
    key=None,
    random_bytes=None,
    outer_amax=None,
    amax=None,
    implementation: str | None = None,
    tiles: Tiles | None = None,
) -> Quantised:
    """Writes an array as codes times scales. Not differentiable: it belongs inside a product's own VJP.

    A tile's scale follows from the largest magnitude in it. A tile of zeros has scale 1; so has a float32-scaled one with
    an infinity, whose codes saturate, or a NaN, which stays NaN. MX: an infinity becomes NaN, a NaN the scale. NVFP4: an
    infinity becomes 6 x 448, a NaN the tile's scale. No tile is touched by what stands in another; "tensor" and the second
    level of NVFP4 have one scale for all by definition. Whoever looks for infinities must look before, or ask for a `loud`
    format, whose tiles with an infinity become NaN. Magnitudes below
    2^-126 may count as zero (XLA's CPU back end does). All implementations give the same bits; scales that are no powers of
    two may differ in the last bit on GPUs, which divide approximately, and codes with them.

    Args:
      x: [..., R, K], bfloat16 or float32. A float32 master weight is quantised from itself, not from its bfloat16 image.
      format: a `Format` or a name of `FORMATS`; they name the sources.
      transpose: codes of x's transpose, [..., K, R], tiles along R: what the sum over rows of a weight gradient takes.
      key, random_bytes: for a stochastic format one of them: a PRNG key (folded from rank, step and layer; one key on all
        ranks wouldn't average out), or uint8 of the codes' shape.
      outer_amax: float32, broadcasting against the scales: the magnitude that the scale of kind "tensor", or the second level
        of NVFP4, is made from, such as the largest of an expert's rows or over ranks. None takes each [R, K] array's own.
        With `hadamard` it is that of the turned array.
      amax: float32, broadcasting against the scales: the largest magnitude of each tile, where more lies in it than is here,
        such as the other shards of a weight. By xla only.
      implementation: None takes the first of mosaic, xla, reference that can; a named one that can't raises.
      tiles: of the kernel; without effect on the others.

    Returns: `Quantised`; in a shard_map it varies over the union of the arguments' axes.

    Raises ValueError where tiles don't fill the array or arguments don't fit the format; NotImplementedError with the
    reason for a named implementation that can't do it.
    """
    format = as_format(format)
    shape = (*x.shape[:-2], *x.shape[-2:][::-1]) if transpose else x.shape
    format.tile(shape)
    random_bytes = _checked_bytes(format, shape, key, random_bytes)
    if outer_amax is not None and format.kind not in ("nvfp4", "tensor"):
        raise ValueError(
            f"outer_amax is of kinds 'tensor' and the second level of 'nvfp4', the format's is {format.kind!r}"
        )
    reasons = _reasons(format, x)
    if amax is not None:
        reasons |= dict.fromkeys(("mosaic", "reference"), "it finds tiles' magnitudes itself")
    taken = choose("quantize", implementation, reasons)
    given = [x] + [a for a in (random_bytes, outer_amax, amax) if a is not None]
    given = align(*map(jnp.asarray, given))

    def call(x, *rest):
        rest = list(rest)
        bytes_ = rest.pop(0) if random_bytes is not None else None
        outer = rest.pop(0) if outer_amax is not None else None
        largest = rest.pop(0) if amax is not None else None
        if taken == "mosaic":
            return _by_kernel(x, format, _SIDES["columns" if transpose else "rows"], tiles)[0]
        if taken == "xla":
            return xla.quantize(x, bytes_, outer, format, transpose=transpose, amax=largest)
        return reference.quantize(x.swapaxes(-1, -2) if transpose else x, bytes_, outer, format)

    return rounding.no_gradient(call, "quantize")(*given)


def quantize_both(
    x, format: Format | str, *, implementation: str | None = None, tiles: Tiles | None = None
) -> tuple[Quantised, Quantised]:
    """The array and its transpose, as `quantize` gives them with and without `transpose`, from one read of it.

    For activations and gradients each direction has its own 1 x 128 tiles: x for the product that sums over columns, its
    transpose for the weight gradient, which sums over rows. With square tiles the second is the first, transposed.

    Args: as in `quantize`; both R and K must be filled by tiles. The format takes no random bytes.
    Returns: codes [..., R, K] and [..., K, R] with their scales.
    """
    format = as_format(format)
    if format.stochastic:
        raise ValueError(
            "quantize_both: each direction of a stochastic format needs its own random bytes: quantize twice"
        )
    format.tile(x.shape)
    format.tile((*x.shape[:-2], x.shape[-1], x.shape[-2]))
    reasons = _reasons(format, x)
    if choose("quantize_both", implementation, reasons) == "mosaic":
        call = lambda x: _by_kernel(x, format, mosaic_sm90.Wanted(True, True), tiles)
        return rounding.no_gradient(call, "quantize_both")(x)
    first = quantize(x, format, implementation=implementation)
    if format.square and not format.hadamard:
        return first, transposed(first)
    return first, quantize(x, format, transpose=True, implementation=implementation)


def tile_scales(amax, format: Format | str, *, outer_amax=None):
    """The scales that `quantize` stores for tiles with these largest magnitudes, and the second level of NVFP4 or None.

    Args: amax: float32 [..., rows of tiles, columns of tiles].  outer_amax: as in `quantize`.
    """
    return xla.tile_scales(amax, outer_amax, as_format(format))


def dequantize(quantised: Quantised, dtype=jnp.float32):
    """Values of codes, [..., R, K] of `dtype`: the product of code, scale and outer in float32, then rounded."""
    return xla.dequantize(quantised).astype(dtype)


def transposed(quantised: Quantised) -> Quantised:
    """The transpose of an array with square tiles, without quantising again.

    Raises ValueError where tiles aren't square: their transpose has tiles in the wrong direction.
    """
    codes, stored, outer = quantised
    tile = tuple(a // b for a, b in zip(codes.shape[-2:], stored.shape[-2:], strict=True))
    if tile[0] != tile[1] and stored.shape[-2:] != (1, 1):
        raise ValueError(f"tiles of {tile[0]}x{tile[1]} aren't square: quantise the transpose instead")
    flip = lambda a: a.swapaxes(-1, -2) if a is not None and a.ndim > 1 else a
    return Quantised(flip(codes), flip(stored), flip(outer))


hadamard = rounding.hadamard


def implementations() -> dict[str, str]:
    """Every implementation, with the reason why it doesn't run on this back end ("" where it does)."""
    return {"mosaic": hopper.unavailable(), "xla": "", "reference": ""}


def _reasons(format: Format, x) -> dict[str, str]:
    reasons = implementations()
    return reasons | {"mosaic": reasons["mosaic"] or mosaic_sm90.why_not(format, x.shape, x.dtype)}


def _checked_bytes(format: Format, shape, key, random_bytes):
    if (key is not None) + (random_bytes is not None) != format.stochastic:
        raise ValueError(
            f"a stochastic format takes a key or random_bytes, another one neither: stochastic={format.stochastic}, "
            f"key {'given' if key is not None else 'missing'}, bytes {'given' if random_bytes is not None else 'missing'}"
        )
    if random_bytes is not None and (random_bytes.shape != shape or random_bytes.dtype != jnp.uint8):
        raise ValueError(f"random_bytes must be uint8 {shape}, got {random_bytes.dtype} {random_bytes.shape}")
    return rounding.random_bytes(key, shape) if key is not None else random_bytes


def _by_kernel(x, format: Format, wanted: mosaic_sm90.Wanted, tiles: Tiles | None) -> tuple[Quantised, ...]:
    """The kernel's results, typed as varying like x; one for each direction wanted."""
    directions = " and ".join(name for name, asked in wanted._asdict().items() if asked)
    tiles = tiles or Tiles(**tuned.settings("quantize", f"{x.shape[-1]} columns, {directions}"))
    found = mosaic_sm90.cast(x, format, wanted, tiles)
    return jax.tree.map(lambda a: cast_to(axes_of(x), a), found)
