"""Jits for tests that compile much and compute little: LLVM's optimisation is left out, which halves the time."""

import functools

import jax

OPTIONS = {"xla_backend_optimization_level": 0}
quick_jit = functools.partial(jax.jit, compiler_options=OPTIONS)


def quickly(jitted):
    """A jitted function so compiled at its first call; later calls bring the same shapes."""
    compiled = []

    def call(*arguments):
        if not compiled:
            compiled.append(jitted.lower(*arguments).compile(compiler_options=OPTIONS))
        return compiled[0](*arguments)

    return call
