"""Faults that were planted into compiled steps are found, and a clean step has none."""

import dataclasses
from pathlib import Path

import pytest

from moex.config import AttentionConfig, ModelConfig, ParallelConfig, RouterConfig, RunConfig, TrainConfig
from moex.plan import audit
from moex.plan.compiled import compile_step
from moex.plan.hlo import parse
from moex.plan.plan import read_plan
from moex.plan.rates import DEFAULT
from moex.plan.target import Target
from moex.plan.timeline import replay
from tests.plan.small_step import NUM_LAYERS, ROWS, D, load

TARGET = Target(name="h100", num_gpus=16, domain=8)
STATE_BYTES = NUM_LAYERS * D * D * 4
PRODUCT = 2 * ROWS * D * D * NUM_LAYERS


def findings(step, target=TARGET, forward_flops=PRODUCT):
    module = parse(step.text)
    timeline = replay(module, target, DEFAULT)
    return [
        *audit.host(step, module), *audit.low_reductions(timeline), *audit.wide_numbers(module),
        *audit.dense_experts(forward_flops, timeline), *audit.crossing(target, timeline),
        *audit.not_donated(STATE_BYTES, step, module), *audit.again(step, timeline),
    ]  # fmt: skip


def faults(*args, **options):
    return {f.kind: f for f in findings(*args, **options) if f.level == "fault"}


def test_a_clean_step_has_no_fault():
    assert faults(load("clean")) == {}


def test_a_reduction_of_gradients_in_bfloat16_and_a_forgotten_donation():
    found = faults(load("faulty"))
    assert set(found) == {"gradients reduced in low precision", "state not donated"}
    low = found["gradients reduced in low precision"]
    assert "all-reduce" in low.text and "bf16" in low.text and "small_step.py" in low.where
    assert "0.00 of 0.00 GiB" in found["state not donated"].text


def test_a_loop_of_unknown_length():
    found = faults(load("endless"))
    assert set(found) == {"waits for the host"}
    assert "unknown length" in found["waits for the host"].text
    assert "small_step.py" in found["waits for the host"].where


CALLBACK = (
    "  %told = () custom-call(), custom_call_target=\"xla_ffi_python_gpu_callback\", "
    'metadata={op_name="jit(update)/shard_map/debug_callback" stack_frame_id=27}\n'
)  # fmt: skip


def test_a_host_callback():
    clean = load("clean")
    at = clean.text.rindex("  ROOT ")
    found = faults(dataclasses.replace(clean, text=clean.text[:at] + CALLBACK + clean.text[at:]))
    assert set(found) == {"waits for the host"}
    assert "xla_ffi_python_gpu_callback" in found["waits for the host"].text
    assert "small_step.py" in found["waits for the host"].where


def test_a_product_that_is_dense_over_experts():
    """Four times the rows that experts get, as with all of four experts for every row."""
    found = faults(load("clean"), forward_flops=PRODUCT / 4)
    assert set(found) == {"dense over experts"}
    assert "4.0 times" in found["dense over experts"].text


def test_groups_that_would_fit_into_a_domain_but_cross_it():
    """By the device numbers of a mesh whose inner axis was put outside: groups of 8 in steps of 2."""
    clean = load("clean")
    text = clean.text.replace("mesh['dp'=2,'ep'=8] {'ep'}", "mesh['ep'=8,'dp'=2] {'ep'}")
    timeline = replay(parse(text), TARGET, DEFAULT)
    events = {
        name: [e._replace(collective=e.collective._replace(view="ep")) if e.collective else e for e in inside]
        for name, inside in timeline.events.items()
    }
    (found,) = [f for f in audit.crossing(TARGET, timeline._replace(events=events)) if f.level == "fault"]
    assert "groups of 8 over ep cross domains of 8" in found.text and "would fit" in found.text


def test_overlap_that_xla_has_given_up():
    """The same all-to-alls, started apart and awaited later or run at once; without the flag nobody asked for more."""
    step = load("clean")
    timeline = replay(parse(step.text), TARGET, DEFAULT)

    def seen(synchronous, overlap=True):
        events = {
            name: [
                e if e.collective is None else e._replace(collective=e.collective._replace(synchronous=synchronous))
                for e in inside
            ]
            for name, inside in timeline.events.items()
        }
        config = RunConfig(parallel=ParallelConfig(overlap=overlap))
        return list(audit.overlap_given_up(config, step, timeline._replace(events=events)))

    (found,) = seen(True)
    assert found.level == "fault" and "memory.recompute" in found.text and "small_step.py" in found.where
    assert seen(False) == seen(True, overlap=False) == []


def test_work_that_xla_does_again():
    clean = load("clean")
    again = dataclasses.replace(
        clean, text=clean.text.replace("%gemm_fusion_dot_general.2", "%gemm_fusion_dot_general.2.remat")
    )
    (found,) = [f for f in findings(again) if f.kind == "involuntary rematerialisation"]
    assert "1 kernels" in found.text


def test_float64_is_found_in_any_computation():
    clean = load("clean")
    wide = dataclasses.replace(clean, text=clean.text.replace("= pred[] compare(", "= f64[] compare("))
    assert "float64" in faults(wide)


STEP = RunConfig(
    model=ModelConfig(
        vocab_size=256, d_model=128, num_layers=1, expert_width=512,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=64),
        router=RouterConfig(num_experts=16, top_k=1, renormalize=False),
    ),
    parallel=ParallelConfig(ep=4, etp=4, transport="alltoall", cell_factor=1.0, row_factor=1.0, zero=3),
    train=TrainConfig(batch_size=64, seq_len=1024),
)  # fmt: skip


@pytest.mark.needs_aot
@pytest.mark.slow
def test_faults_planted_into_the_real_step(aot_python, tmp_path):
    """In one program: no donation, gradients reduced in bfloat16, experts dense, ep outside etp across the domain."""
    wrapper = tmp_path / "python"
    child = Path(__file__).with_name("faulty_child.py")
    wrapper.write_text(f'#!/bin/sh\nshift 2\nexec {aot_python} {child} "$@"\n')
    wrapper.chmod(0o755)
    step = compile_step(STEP, 16, TARGET.description, python=wrapper)
    plan = read_plan(STEP, TARGET, step)
    found = {f.kind: f for f in plan.findings if f.level == "fault"}
    assert set(found) >= {
        "state not donated", "gradients reduced in low precision", "dense over experts", "crosses NVLink domains",
    }  # fmt: skip
    assert "over ep" in found["crosses NVLink domains"].text
    assert "partition.py" in found["gradients reduced in low precision"].where
    assert "waits for the host" not in found
