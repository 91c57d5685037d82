"""How long a call takes on a GPU: medians, with the L2 cache emptied before each call and inputs that take turns."""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


class Clock:
    """Times calls. Before each one an array larger than the L2 cache is rewritten.

    That also hides what the host needs to enqueue the call: the pair is timed, and the rewriting alone is taken off.
    """

    def __init__(self, flush_bytes: int, rounds: int):
        self._flush = jax.jit(lambda x: x + 1, donate_argnums=0)
        self._buffer = jnp.zeros((flush_bytes // 4,), jnp.int32)
        self._rounds = rounds
        self._alone_s = self._median([lambda: None])

    def _once(self, call) -> float:
        jax.block_until_ready(self._buffer)
        began = time.perf_counter()
        self._buffer = self._flush(self._buffer)
        jax.block_until_ready((self._buffer, call()))
        return time.perf_counter() - began

    def _median(self, calls) -> float:
        for call in calls:
            self._once(call)  # compiles
        return statistics.median(self._once(calls[i % len(calls)]) for i in range(self._rounds))

    def seconds(self, function, inputs: list[tuple]) -> float:
        """Median over the rounds; `inputs` take turns. Never below a nanosecond, so that rates stay numbers."""
        calls = [lambda arguments=arguments: function(*arguments) for arguments in inputs]
        return max(self._median(calls) - self._alone_s, 1e-9)


def ceilings(clock: Clock, *, tiny: bool) -> dict[str, Any]:
    """What this device reaches at all: large products in bfloat16 and e4m3, and copying in bytes/s (read and written).

    e4m3_by_cublaslt: whether XLA handed the FP8 product to cuBLASLt or made a kernel of its own, which may not be in FP8.
    """
    side, numbers = (128, 1 << 12) if tiny else (8192, 1 << 30)
    flops, bf16 = 2 * side**3, jnp.bfloat16
    a = jnp.ones((side, side), bf16)
    product = jax.jit(lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=bf16))
    codes = a.astype(jnp.float8_e4m3fn)
    x = jnp.zeros((numbers,), bf16)
    return dict(
        bf16_flops=flops / clock.seconds(product, [(a, a), (a, -a)]),
        e4m3_flops=flops / clock.seconds(product, [(codes, codes), (codes, -codes)]),
        e4m3_by_cublaslt="$f8" in product.lower(codes, codes).compile().as_text(),
        copy_bytes_per_s=2 * x.nbytes / clock.seconds(jax.jit(lambda x: -x), [(x,)]),
    )
