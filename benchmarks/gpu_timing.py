"""How long a call takes on a GPU: medians, with the L2 cache emptied before each call and inputs that take turns."""

import statistics
import time

import jax
import jax.numpy as jnp


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


def ceilings(clock: Clock, *, tiny: bool) -> dict[str, float]:
    """What this device reaches at all: a large bfloat16 product in FLOP/s, and copying in bytes/s (read and written)."""
    side, numbers = (128, 1 << 12) if tiny else (8192, 1 << 30)
    a = jnp.ones((side, side), jnp.bfloat16)
    product_s = clock.seconds(jax.jit(lambda a, b: a @ b), [(a, a), (a, a + 1)])
    x = jnp.zeros((numbers,), jnp.bfloat16)
    copy_s = clock.seconds(jax.jit(lambda x: -x), [(x,)])
    return dict(bf16_flops=2 * side**3 / product_s, copy_bytes_per_s=2 * x.nbytes / copy_s)
