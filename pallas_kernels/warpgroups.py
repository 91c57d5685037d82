"""The block that the Hopper matmuls share: one warpgroup copies operands in, two multiply, 64 rows of a tile each.

Persistent: as many blocks as multiprocessors, each walks its share of the output tiles.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.tiles import store_rows

ROWS = 128
HALF = 64
"""Rows of one multiplying warpgroup: the least that a tensor-core instruction takes."""
COPYING = 2
"""The warpgroup that copies; 0 and 1 multiply."""
SHARED_BYTES = 232_448
"""Shared memory that one block of a Hopper GPU can have."""
STAGED_BYTES = 256
"""Of a row in the staging area: an output tile leaves in parts of so many bytes a row."""
_COPY_REGISTERS, _MULTIPLY_REGISTERS = 40, 232  # of a thread; 128 (40 + 2 * 232) of a multiprocessor's 65,536 are used


def check(config, *cuts: str) -> None:
    """Raises ValueError where a kernel's settings aren't positive or need more shared memory than a block has.

    cuts: the settings that `config.shared_bytes` follows from.
    """
    kind = type(config).__name__
    for name in ("stages", "width", "num_sms"):
        if getattr(config, name) < 1:
            raise ValueError(f"{kind}.{name}={getattr(config, name)} must be at least 1")
    if config.shared_bytes > SHARED_BYTES:
        given = ", ".join(f"{name}={getattr(config, name)}" for name in cuts)
        raise ValueError(
            f"{kind}({given}) needs {config.shared_bytes} bytes of shared memory, a Hopper block has {SHARED_BYTES}: take "
            "fewer stages"
        )


def me():
    """This warpgroup's number."""
    return lax.axis_index("wg")


def own_rows():
    """The multiplying warpgroup's rows of a tile in shared memory."""
    return pl.ds(pl.multiple_of(me() * HALF, HALF), HALF)


def copy_or_multiply(copy_in: Callable[[], None], multiply: Callable[[], None]) -> None:
    """Runs the warpgroup's part, with registers moved to those that multiply."""

    def copying():
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
        copy_in()

    def multiplying():
        plgpu.set_max_registers(_MULTIPLY_REGISTERS, action="increase")
        multiply()
        plgpu.wait_smem_to_gmem(0)

    lax.cond(me() == COPYING, copying, multiplying)


def launch(kernel, *, name: str, out_type, scratch_types, num_sms: int, in_place: int | None = None):
    """A function of the kernel's operands.  in_place: the operand whose memory the result takes, if any."""
    options = dict(
        out_type=out_type,
        scratch_types=scratch_types,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(num_sms,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        kernel_name=name,
    )
    if in_place is None:
        return plgpu.kernel(kernel, **options)
    return compat.kernel_in_place(kernel, aliases={in_place: 0}, **options)


def tiled(dtype):
    """Transforms of an operand in shared memory: rows of 128 bytes, eight to a swizzled tile."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def staging(dtype):
    """Scratch type of both warpgroups' staging areas. Each row is a tile, so that any number of rows can be copied out."""
    size = jnp.dtype(dtype).itemsize
    line = plgpu.TilingTransform((1, 128 // size)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM((2, HALF, STAGED_BYTES // size), dtype, transforms=line)


def store_tile(parts, staged, out, row, column, first=0, count=ROWS) -> None:
    """Writes a tile's rows [first, first + count), which are the array's rows `row + first ...`, from `column` on.

    parts: this warpgroup's 64 rows as float32 arrays in registers, side by side.
    """
    mine = me()
    low = jnp.clip(first - mine * HALF, 0, HALF)
    high = jnp.clip(first + count - mine * HALF, 0, HALF)
    width = staged.shape[2]
    for part in parts:
        for at in range(0, part.shape[1], width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[mine] = part[:, at : at + width].astype(staged.dtype)
            plgpu.commit_smem()
            store_rows(staged.at[mine], out, row + mine * HALF, column + at, low, high - low)
        column += part.shape[1]


def zeros(*shape: int):
    """float32 zeros in registers, laid out as a tensor-core accumulator."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
