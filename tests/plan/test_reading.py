"""What is read off compiled texts: against sizes that can be counted by hand from `small_step`, and hand-made modules."""

import pytest

from moex.config import ParallelConfig
from moex.plan.collectives import Groups, collectives, phase_of, read_groups, scope_of, traffic, view_of
from moex.plan.costs import cost
from moex.plan.hlo import Instruction, bits, parse
from moex.validate import resolve_fold
from tests.plan.small_step import NUM_LAYERS, ROWS, D, load

SENT = ROWS * D * 2
PRODUCT = 2 * ROWS * D * D


@pytest.fixture(scope="module")
def module():
    return parse(load("clean").text)


def test_every_all_to_all_is_counted_with_its_loop(module):
    found = [c for c in collectives(module, 8, 16) if c.kind == "all-to-all"]
    assert sum(c.times for c in found) == NUM_LAYERS * 4
    assert {c.num_bytes for c in found} == {SENT}
    assert {c.groups.size for c in found} == {8} and {c.groups.axes for c in found} == {("ep",)}
    assert sorted({(c.phase, c.module) for c in found}) == [
        ("backward", "moe/combine"), ("backward", "moe/dispatch"), ("forward", "moe/combine"), ("forward", "moe/dispatch"),
    ]  # fmt: skip
    assert all("small_step.py" in c.source for c in found)


@pytest.mark.parametrize(
    "domain, domains, nvlink, network",
    [(8, 1, SENT * 7 / 8, 0), (4, 2, SENT * 3 / 8, SENT * 4 / 8), (1, 8, 0, SENT * 7 / 8)],
)
def test_bytes_go_by_the_link_that_the_domain_leaves(module, domain, domains, nvlink, network):
    for c in collectives(module, domain, 16):
        if c.kind == "all-to-all":
            assert (c.groups.domains, c.nvlink_bytes, c.network_bytes) == (domains, nvlink, network)


def test_the_gradients_reduction(module):
    """XLA has joined the loss to it, one number more."""
    (found,) = [c for c in collectives(module, 8, 16) if c.kind == "all-reduce" and c.num_bytes > 4]
    assert found.num_bytes == NUM_LAYERS * D * D * 4 + 4 and found.dtypes == ("f32",)
    assert found.groups == Groups(size=16, domains=2, inside=8, axes=("dp", "ep"))


def test_products_are_counted_in_fusions_and_loops(module):
    flops = [times * cost(module, where, i).flops for i, where, times in module.executed()]
    assert sum(flops) == NUM_LAYERS * 3 * PRODUCT


def test_slices_and_updates_in_place_move_what_they_touch(module):
    """The forward loop reads one layer's weights of three and stores one layer's rows into a stack."""
    fusions = {i.name: cost(module, where, i) for i, where, _ in module.executed() if i.opcode.startswith("fusion")}
    assert fusions["loop_convert_fusion"].num_bytes == pytest.approx(D * D * (4 + 2), rel=0.01)
    assert fusions["fusion-start"].num_bytes == pytest.approx(2 * SENT, rel=0.01)


def test_not_a_module():
    with pytest.raises(ValueError, match="no scheduled HLO module"):
        parse("HloModule m\nENTRY e {\n}\n")
    with pytest.raises(ValueError, match="no entry computation"):
        parse("HloModule m, is_scheduled=true\n%f (x: f32[]) -> f32[] {\n}\n")


def test_bits_of_numbers():
    assert [bits(t) for t in ("pred", "bf16", "f8e4m3fn", "f4e2m1fn", "s4")] == [8, 16, 8, 4, 4]
    with pytest.raises(ValueError, match="f13"):
        bits("f13")


def instruction(opcode: str, rest: str) -> Instruction:
    return Instruction("i", opcode, (), (), "", rest, (), 0, False)


@pytest.mark.parametrize(
    "text, size, domains, inside",
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4, 1, 4),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", 2, 2, 1),
        ("replica_groups=[2,4]<=[8]", 4, 1, 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2, 2, 1),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", 2, 2, 1),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", 4, 1, 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", 2, 1, 2),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}", 4, 2, 2),
        ("replica_groups={}", 8, 2, 4),
    ],
)
def test_every_form_of_groups(text, size, domains, inside):
    found = read_groups(instruction("all-reduce", text), "all-reduce", 4, 8)
    assert (found.size, found.domains, found.inside) == (size, domains, inside)


def test_groups_of_an_unknown_form_are_refused():
    with pytest.raises(ValueError, match="form that isn't known"):
        read_groups(instruction("all-reduce", "replica_groups=tree(3)"), "all-reduce", 4, 8)


@pytest.mark.parametrize("pairs, domains", [("{{0,1},{1,2},{2,3},{3,0}}", 1), ("{{0,4},{4,0}}", 2)])
def test_permutes(pairs, domains):
    found = read_groups(instruction("collective-permute", f"source_target_pairs={pairs}"), "collective-permute", 4, 8)
    assert found.domains == domains


@pytest.mark.parametrize(
    "kind, nvlink, network",
    [
        ("all-gather", 1600 * 15 / 16 - 100, 1600 / 2 / 8),
        ("reduce-scatter", 1600 * 15 / 16 - 100, 1600 / 2 / 8),
        ("all-reduce", 2 * (1600 * 15 / 16 - 100), 1600 / 8),
        ("all-to-all", 1600 * 7 / 16, 1600 * 8 / 16),
    ],
)
def test_traffic_of_sixteen_gpus_in_two_domains(kind, nvlink, network):
    assert traffic(kind, 1600, Groups(16, 2, 8, ())) == (pytest.approx(nvlink), pytest.approx(network))


def test_one_gpu_sends_nothing():
    assert traffic("all-reduce", 1600, Groups(1, 1, 1, ())) == (0.0, 0.0)


@pytest.mark.parametrize(
    "op_name, phase, scope",
    [
        ("jit(step)/shard_map/jvp()/while/body/moe/dispatch/all_to_all", "forward", "moe/dispatch"),
        ("jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/attention/dot", "recompute", "attention"),
        ("jit(step)/shard_map/transpose(jvp(loss))/while/body/mul", "backward", "loss"),
        ("jit(step)/shard_map/transpose(jvp())/while/body/checkpoint/reduce_scatter", "backward", "parameters"),
        ("jit(step)/optimizer/mul", "update", "optimizer"),
    ],
)  # fmt: skip
def test_names_of_operations(op_name, phase, scope):
    assert (phase_of(op_name), scope_of(op_name)) == (phase, scope)


def test_views_are_named_by_what_they_serve():
    """ep lies over all of dp and tp here: the same axes are `ep` to experts and `dp x tp` to what is dense."""
    fold = resolve_fold(ParallelConfig(tp=2, ep=8), 8)
    groups = Groups(8, 1, 8, fold.expert.ep)
    assert view_of(groups, "jit(step)/jvp()/moe/dispatch/all_to_all", fold) == "ep"
    assert view_of(groups, "jit(step)/jvp()/attention/psum", fold) == "dp x tp"
    assert view_of(groups, "jit(step)/jvp()/moe/router/psum", fold) == "dp x tp"
    assert view_of(groups, "anything", None) == "8 GPUs"


KERNEL = """HloModule m, is_scheduled=true, entry_computation_layout={{()->bf16[1]}}

%inside (a: bf16[4096,1024], b: bf16[2,8,1024,512], s: s32[8]) -> bf16[4096,512] {{
  %a = bf16[4096,1024]{{1,0}} parameter(0)
  %b = bf16[2,8,1024,512]{{3,2,1,0}} parameter(1)
  %s = s32[8]{{0}} parameter(2)
  %one = bf16[1,8,1024,512]{{3,2,1,0}} slice(%b), slice={{[0:1], [0:8], [0:1024], [0:512]}}
  %flat = bf16[8,1024,512]{{2,1,0}} bitcast(%one)
  ROOT %k = bf16[4096,512]{{1,0}} custom-call(%a, %flat, %s), metadata={{op_name="moe/{name}/mpmd_map"}}
}}
ENTRY %main (a.1: bf16[4096,1024], b.1: bf16[2,8,1024,512], s.1: s32[8]) -> bf16[4096,512] {{
  %a.1 = bf16[4096,1024]{{1,0}} parameter(0)
  %b.1 = bf16[2,8,1024,512]{{3,2,1,0}} parameter(1)
  %s.1 = s32[8]{{0}} parameter(2)
  ROOT %f = bf16[4096,512]{{1,0}} fusion(%a.1, %b.1, %s.1), kind=kCustom, calls=%inside
}}
"""  # fmt: skip


def test_kernels_declare_their_flops():
    """Here inside a fusion, where XLA gives it a slice of a stack: it reads that layer's weights only."""
    module = parse(KERNEL.format(name="grouped_matmul"))
    (found,) = [cost(module, where, i, row_share=0.5) for i, where, _ in module.executed() if i.opcode == "fusion"]
    assert found.flops == 0.5 * 2 * 4096 * 1024 * 512
    assert (found.kernel, found.format) == ("grouped_matmul", "bf16")
    assert found.num_bytes == 2 * (4096 * 1024 + 8 * 1024 * 512 + 4096 * 512) + 4 * 8


def test_an_unknown_kernel_is_told():
    module = parse(KERNEL.format(name="mystery"))
    (found,) = [cost(module, where, i) for i, where, _ in module.executed() if i.opcode == "fusion"]
    assert (found.undeclared, found.flops) == ("mystery", 0.0)
