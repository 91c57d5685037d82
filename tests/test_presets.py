"""Presets are the models they are named after, and their steps trace at the scale they are meant for."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from configs import GPUS, PRESETS
from mesh import abstract_mesh
from moex.config import ParallelConfig
from moex.models.decoder import Decoder
from moex.models.flops import num_parameters
from moex.plan.target import parse_target
from moex.train import program as program_module
from moex.validate import check, check_on, resolve_fold

# Parameters in all and of one token, from the model cards (in billions, to their precision).
SIZES = {
    "mixtral_8x7b": (46.7, 12.9), "mixtral_8x22b": (141, 39), "qwen3_30b": (30.5, 3.3), "qwen3_235b": (235, 22),
    "olmoe_1b_7b": (6.92, 1.28),
    "gpt_oss_20b": (20.9, 3.61 + 0.58), "gpt_oss_120b": (116.8, 5.13 + 0.58),  # cards without the embedding
    "glm_4_5_air": (106.8, 12.8 + 0.62),  # 106 and 12 on its card, in whole billions
    "deepseek_v3": (671, 37), "kimi_k2": (1026, 32),
}  # fmt: skip
SYSTEMS = {name: parse_target(gpus).num_gpus for name, gpus in GPUS.items()}
SCALES = {
    "mixtral_8x7b": (256, ParallelConfig(tp=4, ep=8, transport="alltoall", cell_factor=1.5, row_factor=1.5, zero=3)),
    "qwen3_30b_a3b": (512, ParallelConfig(tp=2, cp=2, context="ring", ep=32, transport="alltoall", zero=3)),
    "qwen3_235b_a22b": (1024, ParallelConfig(tp=4, ep=64, etp=2, transport="allgather", zero=3)),
    "olmoe_1b_7b": (64, ParallelConfig(ep=8, transport="alltoall", zero=3)),
    "gpt_oss_20b": (64, ParallelConfig(tp=2, cp=2, context="ring", ep=16, transport="alltoall", zero=3)),
    "glm_4_5_air": (256, ParallelConfig(tp=8, ep=32, transport="alltoall", zero=3)),
    "deepseek_v3": (1024, ParallelConfig(tp=4, ep=64, transport="alltoall", zero=3)),
    "tiny": (8, ParallelConfig(tp=2, cp=2, ep=8, transport="alltoall")),
    "tiny_deepseek": (8, ParallelConfig(tp=4, ep=4, etp=2, transport="alltoall")),
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_passes_its_checks_on_one_device_or_its_own_gpus(name):
    config = PRESETS[name]()
    assert config.name == name
    assert PRESETS[name].__doc__
    check(config)
    check_on(config, resolve_fold(config.parallel, SYSTEMS.get(name, 1)))


@pytest.mark.parametrize("name", SYSTEMS)
def test_systems_have_the_published_parameters_and_say_that_they_never_ran(name):
    config = PRESETS[name]()
    total, active = num_parameters(Decoder(config.model).declarations, config.model)
    of, spent = next(sizes for model, sizes in SIZES.items() if name.startswith(model))
    assert total / 1e9 == pytest.approx(of, rel=0.005)
    assert active / 1e9 == pytest.approx(spent, rel=0.03)
    assert "never run" in PRESETS[name].__doc__
    assert name.endswith(f"{SYSTEMS[name]}x{GPUS[name].partition(':')[0]}")


@pytest.mark.parametrize("name", SCALES)
def test_step_traces_at_scale(monkeypatch, name):
    monkeypatch.setattr(program_module, "build_mesh", lambda *_: pytest.fail("asked for devices"))
    num_devices, parallel = SCALES[name]
    config = dataclasses.replace(PRESETS[name](), parallel=parallel)
    check(config)
    fold = resolve_fold(parallel, num_devices)
    check_on(config, fold)
    program = program_module.build(config, fold, mesh=abstract_mesh(fold))
    state, metrics = program.train.trace(program.state, program.batch).out_info
    described = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
    assert described(state) == described(program.state)
    model = config.model
    assert metrics["loss"].shape == () and metrics["loss"].dtype == jnp.float32
    assert metrics["expert_counts"].shape == (model.num_moe_layers, model.router.num_experts)
    assert metrics["expert_counts"].dtype == jnp.int32

    total, active = num_parameters(program.decoder.declarations, model)
    sizes = [x.size for x in jax.tree.leaves(program.state.params)]
    added = (model.padded_vocab_size - model.vocab_size) * model.d_model * (1 if model.tie_embeddings else 2)
    assert sum(sizes) == total + added
    if known := [sizes for model, sizes in SIZES.items() if name.startswith(model)]:
        assert total / 1e9 == pytest.approx(known[0][0], rel=0.005)
        assert active / 1e9 == pytest.approx(known[0][1], rel=0.03)
        held = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(program.state.params))
        assert held < 1.05 * total / num_devices


def test_every_preset_is_tried_at_scale():
    assert SCALES.keys() | SYSTEMS.keys() == PRESETS.keys()
