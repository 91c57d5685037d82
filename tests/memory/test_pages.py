"""Pages of a stash: against a list of free pages in plain Python, and in a schedule of forward and backward ticks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moex.memory.pages import all_free, alloc, free, pop, push

POOL, PAGE, MOST, WIDTH = 12, 4, 5, 3


@functools.partial(jax.jit, static_argnums=2)
def written(pages, pool, which, rows, count):
    pages, ids = alloc(pages, count, PAGE, MOST)
    return pages, push(pool, ids, rows), ids


@jax.jit
def read(pages, pool, ids):
    return free(pages, ids), pop(pool, ids)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, MOST * PAGE)), max_size=30))
def test_any_order_of_writing_and_reading(events):
    """Buffers are read in any order; each gives back what it was written, none shares a page with another."""
    pages, pool = all_free(POOL), jnp.zeros((POOL, PAGE, WIDTH))
    live, wanted_too_much, free_pages = [], 0, POOL
    for turn, (reading, number) in enumerate(events):
        if reading and live:
            ids, count, rows = live.pop(number % len(live))
            pages, got = read(pages, pool, ids)
            np.testing.assert_array_equal(got[:count], rows[:count])
            free_pages += -(-count // PAGE)
        else:
            rows = np.random.default_rng(turn).normal(size=(MOST * PAGE, WIDTH)).astype(np.float32)
            pages, pool, ids = written(pages, pool, None, rows, number)
            needed = -(-number // PAGE)
            if needed > free_pages:
                wanted_too_much += needed
                assert (np.asarray(ids) == -1).all()
            else:
                assert (np.asarray(ids) >= 0).sum() == needed
                free_pages -= needed
                live.append((ids, number, rows))
        held = np.concatenate([np.asarray(ids)[np.asarray(ids) >= 0] for ids, *_ in live] or [np.zeros(0, int)])
        assert len(set(held)) == len(held)
        assert pages.num_free == free_pages == POOL - len(held)
        assert pages.overflow == wanted_too_much


LAYERS, ROWS = 3, 32
COUNTS = np.random.default_rng(0).integers(0, ROWS + 1, (LAYERS, 4)).astype(np.int32)  # of each layer and micro-batch


def apply(w, x, count):
    return jnp.where((jnp.arange(ROWS) < count)[:, None], jnp.tanh(x @ w), 0)


def by_ticks(weights, x, order, num_pages):
    """Gradients of sum(last layer's output) by explicit ticks that stash each layer's input. order: ("f" | "b", micro)."""
    pages, pool = all_free(num_pages), jnp.zeros((num_pages, PAGE, WIDTH))
    held, out, grads = {}, {}, jnp.zeros_like(weights)
    for kind, micro in order:
        if kind == "f":
            h = x[micro]
            for layer in range(LAYERS):
                pages, ids = alloc(pages, jnp.int32(COUNTS[layer, micro]), PAGE, ROWS // PAGE)
                pool = push(pool, ids, jnp.where((jnp.arange(ROWS) < COUNTS[layer, micro])[:, None], h, jnp.nan))
                held[layer, micro] = ids
                h = apply(weights[layer], h, COUNTS[layer, micro])
            out[micro] = h
        else:
            g = jnp.ones((ROWS, WIDTH))
            for layer in reversed(range(LAYERS)):
                ids, count = held.pop((layer, micro)), COUNTS[layer, micro]
                h = jnp.where((jnp.arange(ROWS) < count)[:, None], pop(pool, ids), 0)
                pages = free(pages, ids)
                _, pull = jax.vjp(lambda w, h, count=count: apply(w, h, count), weights[layer], h)
                dw, g = pull(g)
                grads = grads.at[layer].add(dw)
    return grads, pages.overflow


# One forward, one backward after a warm-up of two: what is read is neither the newest nor the oldest that was written.
ORDER = (("f", 0), ("f", 1), ("b", 0), ("f", 2), ("b", 1), ("f", 3), ("b", 3), ("b", 2))
LIVE = max(
    sum(-(-int(COUNTS[layer, m]) // PAGE) for layer in range(LAYERS) for m in micros)
    for micros in ([0, 1], [1, 2], [2, 3])
)


def by_autodiff(weights, x):
    def loss(weights):
        total = 0.0
        for micro in (0, 1, 3, 2):  # the order of the backward ticks
            h = x[micro]
            for layer in range(LAYERS):
                h = apply(weights[layer], h, COUNTS[layer, micro])
            total += h.sum()
        return total

    return jax.grad(loss)(weights)


@pytest.mark.parametrize("num_pages, enough", [(LIVE, True), (LIVE - 1, False)])
def test_a_schedule_of_ticks_needs_the_pages_that_live_at_once(num_pages, enough):
    weights, x = (
        jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)),
        jax.random.normal(jax.random.key(1), (4, ROWS, WIDTH)),
    )
    grads, overflow = jax.jit(by_ticks, static_argnums=(2, 3))(weights, x, ORDER, num_pages)
    assert (overflow == 0) == enough
    if enough:
        np.testing.assert_allclose(grads, by_autodiff(weights, x), rtol=1e-5, atol=1e-5)
