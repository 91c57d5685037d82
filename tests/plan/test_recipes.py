"""The table of memory recipes: its bytes against those that a traced step sends to the host."""

import collections
import dataclasses

import jax
import pytest

from mesh import abstract_mesh
from moex.config import MemoryConfig, ParallelConfig, PrecisionConfig
from moex.memory.residuals import RESIDUALS
from moex.plan import __main__ as command
from moex.plan.memory import by_formula
from moex.plan.module import host_reads
from moex.plan.recipes import recipes_text
from moex.plan.residuals import costs, kept_bytes
from moex.plan.sizes import sizes
from moex.plan.target import parse_target
from moex.train.program import build
from moex.validate import ConfigError, resolve_fold
from tests.train.tiny import MODELS, tiny_config

EIGHT = parse_target("h100:8")
GATED = dataclasses.replace(MODELS["mla"], num_layers=4, shared_gate=True, latent_width=24)
ROWS = dict(transport="alltoall", cell_factor=1.0, spill_factor=0.5, row_factor=1.5)
CASES = {
    "gqa": ("gqa", ParallelConfig(tp=2, cp=2, ep=4, zero=3, **ROWS)),
    "gqa, one head of keys on two": ("gqa", ParallelConfig(tp=4, ep=2, context="ring", etp=2, **ROWS)),
    "ring": ("gqa", ParallelConfig(cp=4, ep=4, context="ring", transport="allgather")),
    "ulysses": ("gqa", ParallelConfig(cp=2, ep=4, context="ulysses", **ROWS)),
    "mla": (GATED, ParallelConfig(tp=2, cp=2, ep=4, **ROWS)),
    "mla, ulysses": (GATED, ParallelConfig(cp=2, ep=4, context="ulysses", **ROWS)),
}


def sent_to_the_host(config, num_gpus):
    """Bytes of each name that a device's layers send to the host when all names go there."""
    config = dataclasses.replace(config, memory=MemoryConfig(offload=RESIDUALS))
    fold = resolve_fold(config.parallel, num_gpus)
    program = build(config, fold, mesh=abstract_mesh(fold))
    found: collections.Counter[str] = collections.Counter()

    def walk(jaxpr, layers):
        names = {}
        for e in jaxpr.eqns:
            if e.primitive.name == "name":
                names[e.outvars[0]] = e.params["name"]
            elif e.primitive.name == "device_put" and e.outvars[0].aval.memory_space == jax.memory.Space.Host:
                aval = e.outvars[0].aval
                found[names[e.invars[0]]] += aval.size * aval.dtype.itemsize * layers
            inside = jax.tree.leaves(
                list(e.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            )
            for x in inside:
                if hasattr(x, "eqns") or hasattr(x, "jaxpr"):
                    walk(getattr(x, "jaxpr", x), e.params["length"] if e.primitive.name == "scan" else layers)

    walk(program.train.trace(program.state, program.batch).jaxpr.jaxpr, 1)
    return dict(found)


@pytest.mark.parametrize("name", CASES)
def test_bytes_by_formula_are_those_of_the_step(name):
    model, parallel = CASES[name]
    config = tiny_config(model, parallel=parallel)
    fold = resolve_fold(parallel, 8)
    table = {c.name: c.layers * c.num_bytes for c in costs(config, fold, EIGHT)}
    sent = sent_to_the_host(config, 8)
    assert {name: size for name, size in table.items() if size} == sent
    everything = dataclasses.replace(config, memory=MemoryConfig(offload=tuple(sent)))
    assert kept_bytes(everything, fold, on_host=True) == sum(sent.values())
    assert kept_bytes(everything, fold) == 0


def test_codes_go_to_the_host_in_place_of_what_they_stand_for():
    """Rows of experts: a byte a number and a scale of four bytes for 128, of four bytes a number; gate and up in BF16."""
    fp8 = PrecisionConfig(compute_dtype="float32", recipe="fp8_block", emulate=True)
    wide = dataclasses.replace(MODELS["gqa"], d_model=128, expert_width=128)
    plain = tiny_config(wide, parallel=ParallelConfig(ep=4, **ROWS))
    fp8 = dataclasses.replace(plain, precision=fp8)
    want, got = sent_to_the_host(plain, 8), sent_to_the_host(fp8, 8)
    rows = [sizes(c, resolve_fold(c.parallel, 8)).rows for c in (plain, fp8)]  # the second aligned to 128
    for name, share in dict(expert_rows=132 / 512, expert_fc1=2 / 4).items():
        assert got.pop(name) == want.pop(name) * rows[1] / rows[0] * share
    assert got == want


# A backward loop as XLA schedules it, without what isn't read: a copy of a layer's rows is started and awaited.
LOOP = """\
%body (p: (s32[], bf16[8,64], bf16[4,8,64])) -> (s32[], bf16[8,64], bf16[4,8,64]) {{
  %p = (s32[], bf16[8,64]{{1,0}}, bf16[4,8,64]{{2,1,0:S(5)}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %held = bf16[8,64]{{1,0}} get-tuple-element(%p), index=1
  %stack = bf16[4,8,64]{{2,1,0:S(5)}} get-tuple-element(%p), index=2
  %start = ((bf16[4,8,64]{{2,1,0:S(5)}}, s32[]), bf16[1,8,64]{{2,1,0}}, u32[]) fusion-start(%stack, %i), kind=kLoop, calls=%f
  %first = bf16[8,64]{{1,0}} fusion({first}), kind=kLoop, calls=%g
  %done = bf16[1,8,64]{{2,1,0}} fusion-done(%start), metadata={{op_name="dynamic_slice"}}
  %rows = bf16[8,64]{{1,0}} bitcast(%done)
  %kept = bf16[8,64]{{1,0}} copy(%rows), control-predecessors={{%first}}
  %second = bf16[8,64]{{1,0}} fusion(%first, {second}), kind=kLoop, calls=%g
  ROOT %out = (s32[], bf16[8,64]{{1,0}}, bf16[4,8,64]{{2,1,0:S(5)}}) tuple(%i, %kept, %stack)
}}

ENTRY %main (a: s32[]) -> s32[] {{
  %loop = (s32[], bf16[8,64]{{1,0}}, bf16[4,8,64]{{2,1,0:S(5)}}) while(%init), condition=%cond, body=%body
}}
"""


@pytest.mark.parametrize("first, second, ahead", [("%held", "%held", True), ("%held", "%rows", False)])
def test_what_is_read_for_the_next_layer_is_told_from_what_is_awaited(first, second, ahead):
    assert host_reads(LOOP.format(first=first, second=second)) == {"%done": ahead}


def test_the_formula_of_a_plan_knows_recipes():
    config = tiny_config("gqa", parallel=ParallelConfig(ep=4, zero=3, **ROWS))

    def bytes_of(part, **memory):
        one = dataclasses.replace(config, memory=MemoryConfig(**memory))
        parts = {p.name: p.num_bytes for p in by_formula(one, resolve_fold(one.parallel, 8))}
        return parts.get(part, 0.0)

    kept = "kept for the backward pass"
    inputs = bytes_of(kept, recompute=("layer",))
    assert 0 < inputs < bytes_of(kept, recompute=("expert_rows",)) < bytes_of(kept)
    assert bytes_of(kept, recompute=("layer",), offload=("layer_input",)) == 0
    assert bytes_of("on its way to and from the host", recompute=("layer",), offload=("layer_input",)) == inputs
    assert bytes_of("moments", optimizer="host") == 0


def test_the_command_prints_the_table_and_compiles_nothing(monkeypatch, capsys):
    monkeypatch.setenv("MOEX_AOT_PYTHON", "/nowhere")
    arguments = [
        "tiny",
        "--gpus",
        "h100:8",
        "--memory",
        "--memory.offload",
        "expert_rows",
        "--memory.recompute",
        "attention",
    ]
    assert command.main(arguments) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["expert_rows"][1] == "host" and rows["core_attn"][1] == "recomputed" and rows["router"][1] == "kept"
    assert "mla_up_proj" not in rows and "mlp_fc1" not in rows
    with pytest.raises(ConfigError, match="doesn't divide"):
        recipes_text(tiny_config("gqa", parallel=ParallelConfig(tp=3)), EIGHT)
