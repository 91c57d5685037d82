"""A dense model made into one of experts computes the same logits, with MLPs whole or cut, on any expert parallelism."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh import build_mesh, fold, sharded
from moex.config import AttentionConfig, ModelConfig, ParallelConfig, RouterConfig
from moex.layers import param
from moex.layers.tokens import unpacked
from moex.models.decoder import Decoder
from moex.models.upcycle import granularity, upcycled
from moex.precision.recipes import Precision
from moex.train.loss import logits
from tests.quick import quick_jit

DENSE = ModelConfig(
    vocab_size=64, vocab_multiple=64, d_model=16, num_layers=3, num_dense_layers=3, dense_width=24, init_std=0.3,
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),
)  # fmt: skip
B, S = 8, 12
IDS = np.random.default_rng(0).integers(0, 64, (B, S)).astype(np.int32)
MODELS = {
    "whole": dict(expert_width=24, router=RouterConfig(num_experts=4, top_k=2)),
    "halves": dict(expert_width=12, router=RouterConfig(num_experts=8, top_k=4)),
    "halves, one copy, sigmoid": dict(
        expert_width=12, router=RouterConfig(num_experts=8, top_k=2, score_function="sigmoid", scaling_factor=2.5)
    ),
    "thirds, first layer dense": dict(expert_width=8, num_dense_layers=1, router=RouterConfig(num_experts=12, top_k=3)),
}


def model_of(name):
    return dataclasses.replace(DENSE, **dict(num_dense_layers=0) | MODELS[name])


def initial(config):
    return param.initial_values(Decoder(config).declarations, 0, config.init_std, config.num_layers)


def scores(config, params, ranks):
    """Logits [B, S, V] on `ranks` devices that split rows and experts."""
    folded = fold(dict(dp=ranks), dict(ep=ranks))
    decoder = Decoder(config, ParallelConfig(transport="alltoall" if ranks > 1 else "local"))
    places = param.placements(decoder.declarations, folded)
    specs = jax.tree.map(lambda p: p.spec, places)

    def local(shards, ids_BS):
        weights = param.enter(decoder.declarations, places, shards, jnp.float32, Precision())
        x_BSD, _ = decoder.hidden(weights, None, ids_BS, unpacked(*ids_BS.shape), folded, jnp.float32)
        return logits(x_BSD.reshape(-1, 16), decoder.head(weights), folded, vocab_size=64).reshape(*ids_BS.shape, -1)

    rows = P(folded.dense.dp)
    run = quick_jit(sharded(local, build_mesh(folded, jax.devices()[:ranks]), (specs, rows), rows))
    return np.asarray(run(params, IDS))


@functools.cache
def dense_scores():
    return scores(DENSE, initial(DENSE), 1)


CASES = [(name, ranks) for name in ("whole", "halves") for ranks in (1, 2, 4)]
CASES += [("halves, one copy, sigmoid", 1), ("thirds, first layer dense", 1)]


@pytest.mark.parametrize("name, ranks", CASES)
def test_logits_are_the_dense_models(name, ranks):
    model = model_of(name)
    drawn = initial(model)["moe_layers"]["moe"]["router"]["weight"]
    params = upcycled(DENSE, model, initial(DENSE), drawn)
    declared = param.abstract(Decoder(model).declarations)
    assert jax.tree.map(lambda x: x.shape, params) == jax.tree.map(lambda x: x.shape, declared)
    np.testing.assert_allclose(scores(model, params, ranks), dense_scores(), atol=1e-5)


def test_shares_of_a_copy_differ_and_copies_are_equal():
    model = model_of("halves")
    assert granularity(DENSE, model) == 2
    moe = upcycled(DENSE, model, initial(DENSE), initial(model)["moe_layers"]["moe"]["router"]["weight"])["moe_layers"][
        "moe"
    ]
    down, columns = np.asarray(moe["experts"]["down"]), np.asarray(moe["router"]["weight"])
    assert np.abs(down[:, 0] - down[:, 1]).max() > 0
    np.testing.assert_array_equal(down[:, 0], down[:, 6])
    np.testing.assert_array_equal(columns[:, :, 0], columns[:, :, 1])
    assert np.abs(columns[:, :, 1] - columns[:, :, 2]).max() > 0


@pytest.mark.parametrize(
    "change, tells",
    [
        (dict(expert_width=9), "dense_width=24 doesn't divide into expert_width=9"),
        (dict(expert_width=12, router=RouterConfig(num_experts=8, top_k=3)), "top_k=3 must be multiples of the 2"),
        (dict(expert_width=24, router=RouterConfig(num_experts=8, renormalize=False)), "renormalize must be on"),
        (dict(expert_width=24, shared_width=8), "shared_width would add"),
        (dict(expert_width=24, d_model=32), "d_model must be those of the dense model"),
    ],
)
def test_what_does_not_fit_is_told(change, tells):
    with pytest.raises(ValueError, match=tells):
        granularity(DENSE, dataclasses.replace(DENSE, num_dense_layers=0, **change))
    with pytest.raises(ValueError, match="it must be dense"):
        granularity(model_of("whole"), model_of("whole"))
