"""The cast from float32 to 8- or 4-bit floats: the device's own on GPUs, integer arithmetic on CPUs, the same bits.

XLA for CPUs casts number by number; on bits a third of the time is enough (docs/LOG.md).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat
from pallas_kernels.quantize.formats import E2M1, E5M2
from pallas_kernels.quantize.scales import INFINITY, as_float, magnitude_bits

_UNSIGNED = {8: jnp.uint8, 4: jnp.uint4}


def to_codes(x, dtype) -> jax.Array:
    """float32 -> `dtype`, to nearest, ties to even.  x: within the range of `dtype`, or NaN where it has one."""
    if _native():
        return x.astype(dtype)
    info, size = jnp.finfo(dtype), magnitude_bits(x)
    shift, least = 23 - info.nmant, float(info.smallest_normal)
    # A mantissa that rounds up past its last bit carries into the exponent, as it should.
    normal = ((size + ((1 << (shift - 1)) - 1) + ((size >> shift) & 1)) >> shift) - (_rebias(dtype) << info.nmant)
    # Adding what has the step of a subnormal as its last bit rounds to it.
    anchor = jnp.float32(2**23 * float(info.smallest_subnormal))
    subnormal = magnitude_bits(as_float(size) + anchor) - magnitude_bits(anchor)
    code = jnp.where(as_float(size) < least, subnormal, normal)
    if dtype != E2M1:
        code = jnp.where(size > INFINITY, 0x7E if dtype == E5M2 else 0x7F, code)
    sign = (lax.bitcast_convert_type(x, jnp.int32) >> (32 - info.bits)) & (1 << (info.bits - 1))
    return lax.bitcast_convert_type((code | sign).astype(_UNSIGNED[info.bits]), dtype)


def _native() -> bool:
    return compat.device_kind().startswith("NVIDIA") and not compat.interpreting()


def _rebias(dtype) -> int:
    """What a float32's biased exponent has more than the code's, for the same number."""
    return 126 + jnp.finfo(dtype).minexp
