"""The two-stream replay against schedules whose times can be worked out on paper."""

import dataclasses

import pytest

from mesh.topology import ACCELERATORS
from moex.plan.hlo import parse
from moex.plan.rates import DEFAULT, Shares
from moex.plan.schedule import layer_computations, layer_schedule
from moex.plan.target import KINDS, Target
from moex.plan.timeline import replay
from tests.plan.small_step import NUM_LAYERS, load

GPU = ACCELERATORS[KINDS["h100"]]
IDEAL = Shares(matmul=1.0, kernel=1.0, memory=1.0, nvlink=1.0, network=1.0, launch_s=0.0, message_s=0.0)
TARGET = Target(name="h100", num_gpus=8, domain=8)

SCHEDULE = """HloModule m, is_scheduled=true, num_partitions=8

%body (p: (s32[], bf16[4096,4096])) -> (s32[], bf16[4096,4096]) {
  %p = (s32[], bf16[4096,4096]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[4096,4096]{1,0} get-tuple-element(%p), index=1
  %send = ((bf16[4096,4096]{1,0}), bf16[4096,4096]{1,0}) all-to-all-start(%x), replica_groups={{0,1,2,3,4,5,6,7}}
  %y = bf16[4096,4096]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %got = bf16[4096,4096]{1,0} all-to-all-done(%send)
  %sum = bf16[4096,4096]{1,0} all-reduce(%got), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %t = (s32[], bf16[4096,4096]{1,0}) tuple(%i, %sum)
}
ENTRY %main (x.1: bf16[4096,4096]) -> bf16[4096,4096] {
  %x.1 = bf16[4096,4096]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[4096,4096]{1,0}) tuple(%zero, %x.1)
  %loop = (s32[], bf16[4096,4096]{1,0}) while(%start), condition=%none, body=%body, LOOP
  ROOT %out = bf16[4096,4096]{1,0} get-tuple-element(%loop), index=1
}
"""
CONDITION = """%none (c: (s32[], bf16[4096,4096])) -> pred[] {
  %c = (s32[], bf16[4096,4096]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}
"""
SIZE = 4096 * 4096 * 2
DOT_S = 2 * 4096**3 / GPU.bf16_flops
SEND_S = SIZE * 7 / 8 / GPU.nvlink_bytes_per_s
SUM_S = 2 * SIZE * 7 / 8 / GPU.nvlink_bytes_per_s


def schedule():
    head, body = SCHEDULE.split("\n", 1)
    return parse(f"{head}\n{CONDITION}{body}".replace("LOOP", 'backend_config={"known_trip_count":{"n":"5"}}'))


@pytest.mark.parametrize("nvlink", [1.0, 0.1], ids=["hidden", "too slow to hide"])
def test_a_started_collective_is_hidden_by_what_runs_beside_it(nvlink):
    found = replay(schedule(), TARGET, dataclasses.replace(IDEAL, nvlink=nvlink))
    send, total = SEND_S / nvlink, SUM_S / nvlink
    waits = max(0.0, send - DOT_S)
    assert found.step_s == pytest.approx(5 * (DOT_S + waits + total), rel=1e-6)
    events = {e.collective.kind: e for e, _ in found.sent()}
    assert events["all-to-all"].exposed_s == pytest.approx(waits)
    assert events["all-reduce"].exposed_s == pytest.approx(total), "it isn't started apart: kernels stop"
    assert {e.times for e, _ in found.sent()} == {5}


def test_over_the_network_the_slower_link_counts():
    wide = dataclasses.replace(TARGET, domain=4)
    found = {c.kind: e for e, c in replay(schedule(), wide, IDEAL).sent()}
    assert found["all-to-all"].lasts_s == pytest.approx(SIZE * 4 / 8 / GPU.network_bytes_per_s)
    assert found["all-reduce"].lasts_s == pytest.approx(2 * SIZE / 2 / 4 / GPU.network_bytes_per_s)


def test_a_compiled_step_adds_up():
    """Kernels and waits are all that there is: their sum is the step's time."""
    found = replay(parse(load("clean").text), Target(name="h100", num_gpus=16, domain=8), DEFAULT)
    kernels = sum(e.times * e.lasts_s for e in found.all_events() if e.collective is None)
    waits = sum(e.times * e.exposed_s for e, _ in found.sent())
    assert found.step_s == pytest.approx(kernels + waits, rel=1e-6)
    assert waits > 0 and kernels > 0


def test_one_layer_forward_and_backward_as_text():
    found = replay(parse(load("clean").text), Target(name="h100", num_gpus=16, domain=8), DEFAULT)
    layers = layer_computations(found)
    assert list(layers) == ["forward", "backward"]
    assert {found.times[name] for name in layers.values()} == {NUM_LAYERS}
    lines = layer_schedule(found)
    assert lines[0].startswith("forward pass of a layer: ") and lines[0].endswith(f"{NUM_LAYERS} times a step")
    assert sum("> all-to-all" in line or "= all-to-all" in line for line in lines) == 4
    assert any("dispatch" in line and "2.1 MB" in line for line in lines)
