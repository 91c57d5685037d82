"""The step as XLA compiles it for 64 H100s, everything on: what is run never waits for the host.

Compiled in a child process with the compile-only CUDA packages; the readers are tested on texts everywhere.
"""

import dataclasses
import re

import pytest

from moex.config import (
    AttentionConfig,
    CompilerConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)  # fmt: skip
from moex.plan.compiled import CompileError, compile_step
from moex.plan.hlo import parse
from moex.plan.launches import launches
from moex.plan.memory import moments_bytes, sizes
from moex.plan.module import copies, exposed, host_reads, number_of, thunks, unpaired, waits_for_host
from moex.plan.plan import read_plan
from moex.plan.residuals import kept_bytes
from moex.plan.target import parse_target
from moex.validate import ConfigError, resolve_fold

H100S = parse_target("h100:64")
TARGET = H100S.description
EVERYTHING = RunConfig(
    model=ModelConfig(
        vocab_size=2048, d_model=512, num_layers=4, expert_width=256,
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=64),
        router=RouterConfig(num_experts=128, top_k=4, bias_rate=1e-3, z_coefficient=1e-3, score_function="sigmoid"),
    ),
    parallel=ParallelConfig(
        ep=64, zero=3, transport="alltoall", cell_factor=1.0, spill_factor=0.35, row_factor=1.25, echo_slots=1
    ),
    memory=MemoryConfig(recompute=("layer",), stash=("experts",)),
    compiler=CompilerConfig(command_buffers="step"),
    train=TrainConfig(batch_size=512, seq_len=128),
)  # fmt: skip


@pytest.fixture(scope="module")
def compiled(aot_python):
    return compile_step(EVERYTHING, 64, TARGET, python=aot_python)


@pytest.mark.needs_aot
@pytest.mark.slow
def test_nothing_waits_for_the_host(compiled):
    assert waits_for_host(compiled.thunks, compiled.text) == []
    assert compiled.host_bytes == 0
    assert number_of(compiled.thunks, "kWhile") >= 2, "the layers, forward and backward"


@pytest.mark.needs_aot
@pytest.mark.slow
def test_the_whole_step_is_one_launch(compiled):
    """Routing, spill, clones, stash, optimizer: all stand in one CUDA graph, which a host's word in between would end."""
    found = launches(compiled.thunks, parse(compiled.text))
    assert (found.alone, found.graphs) == (0, 1) and found.inside > 1000


@pytest.mark.needs_aot
@pytest.mark.slow
def test_all_to_alls_are_started_and_awaited_apart(compiled):
    """Of a layer: ids, rows and weights by three ways each, results by three, two hops for two clone weights; and back."""
    alone = unpaired(compiled.text, "all-to-all")
    lines = [line for line in compiled.text.splitlines() if any(f"{name} = " in line for name in alone)]
    rows = [line for line in lines if "moe/clones" not in line and not re.search(r" = s32\[", line)]
    assert rows == [] and len(lines) <= 2, (
        "at most index maps and a clone's weights, which have nothing to run beside them"
    )
    assert number_of(compiled.thunks, "kAllToAll") >= 16 + 9 + 4 + 4
    assert exposed(compiled.thunks)["kAllToAll"] <= 2, "with nothing to run beside it, a pair is run as one"


@pytest.mark.needs_aot
@pytest.mark.slow
def test_rows_are_not_dispatched_again_in_the_backward_pass(compiled):
    again = [line for line in compiled.text.splitlines() if "rematted_computation/moe/dispatch/all_to_all" in line]
    assert again == []
    assert "rematted_computation/moe/clones/all_to_all" in compiled.text, "weights are"


@pytest.mark.needs_aot
@pytest.mark.slow
def test_the_pool_is_never_copied(compiled):
    rows = 1.1 * 4 * 1024 * 4  # of a device: 4 layers, 1024 tokens, k 4
    assert copies(compiled.text, int(rows) * 512 * 2) == []


@pytest.mark.needs_aot
@pytest.mark.slow
def test_the_plan_finds_no_fault_and_adds_up(compiled):
    """The reader's sums against the compiler's: what is alive at the peak, and what is sent by the buffers' sizes."""
    plan = read_plan(EVERYTHING, H100S, compiled)
    assert [f for f in plan.findings if f.level == "fault"] == []
    live = sum(part.num_bytes for part in plan.live)
    # XLA lists arrays that share a buffer, as those updated in place do, each by itself.
    assert live == pytest.approx(compiled.peak_bytes, rel=0.25)
    slots, d_model = sizes(EVERYTHING, plan.fold).slots, EVERYTHING.model.d_model
    rows = [
        c
        for _, c in plan.timeline.sent()
        if c.kind == "all-to-all" and c.module.startswith("moe/") and "bf16" in c.dtypes
    ]
    forward = sum(c.times * c.num_bytes for c in rows if c.phase == "forward" and c.module != "moe/clones")
    spill = slots - 1024 * 4  # beyond the cells of 1024 tokens, k 4; such rows travel twice
    assert forward == pytest.approx(2 * 4 * (slots + spill) * d_model * 2, rel=0.01), "there and back, in four layers"
    assert {c.view for c in rows} == {"ep"}
    assert set(plan.estimate.executed_flops) <= {"bf16", "f32"}


@pytest.mark.needs_aot
@pytest.mark.slow
def test_what_goes_to_the_host_is_there_and_comes_back_a_layer_ahead(aot_python):
    """Bytes on the host as the table of recipes has them, and moments that are no argument of the device any more."""
    moved = MemoryConfig(offload=("core_attn", "expert_rows", "expert_fc1"), optimizer="host")
    here, there = (
        dataclasses.replace(EVERYTHING, memory=memory) for memory in (MemoryConfig(recompute=("attn_norm",)), moved)
    )
    stays, goes = (compile_step(config, 64, TARGET, python=aot_python) for config in (here, there))
    fold = resolve_fold(there.parallel, 64)
    assert goes.host_argument_bytes == pytest.approx(moments_bytes(there, fold), rel=0.01)
    assert stays.argument_bytes - goes.argument_bytes == goes.host_argument_bytes
    sent = goes.host_bytes - goes.host_argument_bytes
    assert sent == pytest.approx(kept_bytes(there, fold, on_host=True), rel=0.01)
    assert stays.temporary_bytes - goes.temporary_bytes > 0.4 * sent, "of four layers two are on their way"
    reads = host_reads(goes.text)
    assert len(reads) >= 3 and all(reads.values())
    assert waits_for_host(goes.thunks, goes.text) == []


@pytest.mark.needs_aot
def test_what_the_compiler_refuses_is_said(aot_python):
    with pytest.raises(CompileError, match=r"exit 1(.|\n)*target"):
        compile_step(EVERYTHING, 64, "gpu_device_info { threads_per_warp: }", python=aot_python)


def test_what_does_not_fit_the_gpus_is_no_compilation():
    with pytest.raises(ConfigError, match="doesn't divide the 48 devices"):
        compile_step(EVERYTHING, 48, TARGET, python="nowhere")


SEQUENCE = """\
001: kCustomKernel [source         | next=002 (1)  ] fusion
002: kAsyncStart   [prev=001 (1)   | next=005 (3) ] stream=communication_stream[0], async_id=2
    003: kAllToAll [source | sink] kAllToAll
004: kCustomKernel [prev=001 (1)   | next=005 (1)  ] fusion.1
005: kAsyncDone    [prev=002 (1)   | sink ] async_id=2
006: kAllReduce    [prev=005 (1)   | sink ] kAllReduce
007: kWhile        [prev=006 (1)   | sink ]
    008: kAsyncStart   [source   | next=010 (2) ] stream=communication_stream[0], async_id=8
        009: kAllGather [source | sink] kAllGather
    010: kAsyncDone    [prev=008 (1) | sink ] async_id=8
    011: kAllToAll     [prev=010 (1) | sink ] kAllToAll
"""
MODULE = """\
  %w = (s32[], bf16[8,4]{1,0}) while(%t), condition=%c, body=%b, backend_config={"known_trip_count":{"n":"3"}}
  %a = bf16[64,8]{1,0} all-to-all-start(%x), replica_groups={}
  %c.1 = f32[100,20]{1,0} copy(%y)
  %d = (bf16[1000,3]{1,0}, s32[]) copy-start(%z)
"""


def test_reading_thunks():
    found = list(thunks(SEQUENCE))
    assert [t.kind for t in found if t.asynchronous] == ["kAllToAll", "kAllGather"]
    assert exposed(SEQUENCE) == {"kAllReduce": 1, "kAllToAll": 1}
    assert number_of(SEQUENCE, "kAllToAll") == 2
    with pytest.raises(ValueError, match="no thunk in this text"):
        list(thunks("ENTRY main"))


@pytest.mark.parametrize(
    "sequence, module, told",
    [
        (SEQUENCE, MODULE, []),
        (SEQUENCE.replace("kAllReduce ", "kConditional "), MODULE, ["1 x kConditional"]),
        (SEQUENCE + "012: kInfeed  [source] kInfeed\n", MODULE, ["1 x kInfeed"]),
        (SEQUENCE, MODULE.replace("known_trip_count", "unknown"), ["loop of unknown length: %w"]),
        (SEQUENCE, MODULE.replace(" while(", " call("), ["1 loops run, but the module shows 0"]),
        (SEQUENCE, MODULE + 'custom_call_target="xla_python_gpu_callback"', ["call of xla_python_gpu_callback"]),
    ],
)
def test_what_waits_for_the_host_is_found(sequence, module, told):
    assert waits_for_host(sequence, module) == told


def test_copies_and_unpaired_collectives_are_found():
    assert [line.split()[0] for line in copies(MODULE, 6000)] == ["%c.1", "%d"]
    assert [line.split()[0] for line in copies(MODULE, 6001)] == ["%c.1"]
    assert unpaired(MODULE, "all-to-all") == []
    assert unpaired(MODULE.replace("all-to-all-start(", "all-to-all("), "all-to-all") == ["%a"]
