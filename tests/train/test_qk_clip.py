"""QK-clip: the largest logits against attention by hand, every head at most at the threshold after it, the same on meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moex.config import OptimizerConfig, RouterConfig
from moex.layers.norm import rms_norm
from moex.layers.rope import rotate, softmax_scale
from moex.train.qk_clip import factors
from tests.quick import quick_jit
from tests.train.folded import Case
from tests.train.tiny import MODELS, Harness, one_step, packed_rows, tiny_config

LIMIT = dict(gqa=1.15, mla=0.7)
GQA = dataclasses.replace(
    MODELS["gqa"], num_dense_layers=2, dense_width=32, router=RouterConfig(aux_coefficient=0.0),
    attention=dataclasses.replace(
        MODELS["gqa"].attention, qk_norm=False, bias=True, sliding_window=3, window_pattern=(1, 0)
    ),
)  # fmt: skip
MLA = dataclasses.replace(MODELS["mla"], num_layers=1, num_dense_layers=0, mtp_depth=1)
CASES = dict(
    gqa=(GQA, Case((4, 2, 1), (8, 1, 1), "local", "gqa", zero=3, accumulation=2, context="ulysses")),
    mla=(MLA, Case((2, 2, 2), (2, 4, 1), "alltoall", "mla", zero=1, accumulation=1, context="ring")),
)


def config_of(name: str):
    """AdamW or Muon at a rate so small that their update changes nothing: what is left is the clip."""
    model, case = CASES[name]
    optimizer = OptimizerConfig(
        name=dict(gqa="adamw", mla="muon")[name],
        peak_lr=1e-30,
        warmup_steps=0,
        schedule="constant",
        qk_clip=LIMIT[name],
    )
    return tiny_config(
        model, parallel=case.parallel, accumulation=case.accumulation,
        optimizer=optimizer,
    )  # fmt: skip


def queries_and_keys(name: str, params, ids, positions):
    """Of the first layer, [T, N, H] each, every head with a key of its own."""
    a = CASES[name][0].attention
    stack = jax.tree.map(lambda x: x[0], params["dense_layers" if name == "gqa" else "moe_layers"])
    w, norm = stack["attention"], lambda x, weight: rms_norm(x, weight, 1e-6)
    x = norm(jnp.asarray(params["ends"]["embedding"])[ids], stack["attention_norm"]["weight"])
    turned = lambda x: rotate(x[None], positions[None], a.rope)[0]
    if name == "gqa":
        q, k = (jnp.einsum("td,dnh->tnh", x, w[n]) + w[f"{n}_bias"][None] for n in ("query", "key"))
        return turned(q), jnp.repeat(turned(k), a.num_heads // a.num_kv_heads, axis=1)
    q = jnp.einsum("tr,rnh->tnh", norm(x @ w["query_down"], w["query_norm"]["weight"]), w["query_up"])
    narrow = x @ w["kv_down"]
    latent = norm(narrow[:, : a.kv_latent_dim], w["kv_norm"]["weight"])
    k = jnp.einsum("tr,rnh->tnh", latent, w["kv_up"])[..., : a.head_dim]
    shared = jnp.broadcast_to(turned(narrow[:, None, a.kv_latent_dim :]), (*k.shape[:2], a.rope_dim))
    q = jnp.concatenate([q[..., : a.head_dim], turned(q[..., a.head_dim :])], axis=-1)
    return q, jnp.concatenate([k, shared], axis=-1)


def largest_logits(name: str, config, params) -> np.ndarray:
    """Of each head of the first layer over all rows, by products of all pairs."""
    a = config.model.attention
    width = a.head_dim + (a.rope_dim if a.kind == "mla" else 0)

    def of_row(row):
        q, k = queries_and_keys(name, params, row["tokens"], row["positions"])
        logits = jnp.einsum("snh,tnh->nst", q, k) * softmax_scale(width, a.rope)
        at, segments = jnp.arange(16), row["segments"]
        distance = at[:, None] - at[None]
        seen = (distance >= 0) & (segments[:, None] == segments[None]) & (segments[:, None] > 0)
        seen &= distance < (config.model.window(0) or 16)
        return jnp.where(seen[None], logits, 0).max(axis=(1, 2))

    rows = {n: x.reshape(-1, 16) for n, x in packed_rows(config).items()}
    return np.asarray(quick_jit(jax.vmap(of_row))(rows).max(axis=0))


@pytest.mark.parametrize("name", CASES)
def test_heads_are_brought_to_the_threshold(name):
    config, limit = Harness.on_one_device(config_of(name)), LIMIT[name]
    step = one_step(config, 1)
    before, after = (largest_logits(name, config, params) for params in (step.before.params, step.after.params))
    np.testing.assert_allclose(step.metrics["max_logits"][0], before.max(), rtol=1e-5)
    assert len(step.metrics["max_logits"]) == config.model.num_layers + config.model.mtp_depth
    assert (before > limit).any() and (before < limit).any(), before
    np.testing.assert_allclose(after, np.minimum(before, limit), rtol=1e-4)
    scaled = {
        jax.tree_util.keystr(path) for path, x in jax.tree.leaves_with_path(step.change) if np.abs(x).max() > 1e-20
    }
    assert all("query" in path or "key" in path or "kv_up" in path for path in scaled)
    assert sum("mtp" in path for path in scaled) == (2 if name == "mla" else 0)
    if name == "mla":
        assert not step.change["moe_layers"]["attention"]["kv_up"][..., config.model.attention.head_dim :].any()


@pytest.mark.parametrize("name", CASES)
def test_the_same_on_a_mesh(name):
    config = config_of(name)
    here, there = one_step(config, 8), one_step(Harness.on_one_device(config), 1)
    np.testing.assert_allclose(here.metrics["max_logits"], there.metrics["max_logits"], rtol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max() + 1e-20)
    jax.tree.map(close, here.after.params, there.after.params)


def test_a_key_of_several_queries_is_scaled_by_the_smallest():
    """Two keys, two queries each: one pair below the threshold, one with a head at twice and a head at four times it."""
    queries, keys = factors(jnp.array([[5.0, 10.0, 20.0, 40.0]]), 10.0, 0.5, 2)
    np.testing.assert_allclose(keys, [[1, 0.5]])
    np.testing.assert_allclose(queries, [[1, 1, 1, 0.5]])
    queries, keys = factors(jnp.array([[40.0, -1.0]]), 10.0, 0.25, 2)
    np.testing.assert_allclose(queries * keys, [[0.25, 1]], rtol=1e-6)
    np.testing.assert_allclose(queries, [[0.25**0.25, 1]], rtol=1e-6)
