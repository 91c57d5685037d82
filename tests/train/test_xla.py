"""XLA's options: which a configuration asks for, on which devices, and who has the last word."""

import pytest

from moex.config import CompilerConfig, ParallelConfig, RunConfig
from moex.train.xla import compiler_options, options

STAGED = RunConfig(parallel=ParallelConfig(pp=2))


def graphs(kind: str) -> RunConfig:
    return RunConfig(compiler=CompilerConfig(command_buffers=kind))


def test_a_plain_run_leaves_xla_as_it_is():
    assert options(RunConfig()) == []


@pytest.mark.parametrize(
    "config, wanted",
    [
        (STAGED, {"xla_gpu_experimental_enable_tiling_propagation": False}),
        (graphs("off"), {"xla_gpu_enable_command_buffer": ""}),
        (graphs("step"), {"xla_gpu_enable_command_buffer": "WHILE", "xla_gpu_command_buffer_unroll_loops": True}),
    ],
)
def test_each_has_a_reason_and_goes_to_gpus_alone(config, wanted):
    found = compiler_options(config, "gpu")
    assert found is not None and found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == value or (value and str(value) in str(found[name]).split(","))
    assert all(len(option.why) > 10 for option in options(config))
    assert compiler_options(config, "cuda") == found and compiler_options(config, "cpu") is None


def test_flags_of_the_environment_have_the_last_word(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=1")
    assert [option.name for option in options(graphs("step"))] == ["xla_gpu_command_buffer_unroll_loops"]
