"""A jit for tests that compile much and compute little: LLVM's optimisation is left out, which halves the time."""

import functools

import jax

quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
