"""`python -m moex.plan` from end to end on a step that was compiled before, and what it refuses."""

import dataclasses
import json
import re

import pytest

from moex.cli import PRESETS, load
from moex.config import ParallelConfig
from moex.plan import __main__ as command
from moex.plan import cache, calibrate, report, search
from moex.plan.cache import _write, aot_python, cache_folder, key
from moex.plan.compiled import CompileError
from moex.plan.memory import at_peak, by_formula, sizes
from moex.plan.plan import read_plan
from moex.plan.published import ROWS
from moex.plan.rates import DEFAULT
from moex.plan.remedies import Remedy, applicable, measured, replaced
from moex.plan.target import parse_target
from moex.validate import check, check_on, resolve_fold
from tests.plan.small_step import load as compiled_before

TARGET = parse_target("h100:16")


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A cache that has `small_step` in the place of a preset's step; nothing here can compile."""
    monkeypatch.setenv("MOEX_PLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MOEX_AOT_PYTHON", str(tmp_path / "nowhere"))
    _write(cache_folder() / key(config(), TARGET), compiled_before("clean"))
    return tmp_path


def config():
    return replaced(PRESETS["tiny"](), train=dict(batch_size=64, seq_len=512))


FLAGS = ("tiny", "--train.batch_size", "64", "--train.seq_len", "512", "--gpus", "h100:16")


def test_report_page_and_json(planned, capsys):
    assert command.main([*FLAGS, "--folder-out", str(planned / "out"), "--schedule"]) == 0
    told = capsys.readouterr().out
    for part in ("tiny on 16 x H100", "fits: ", "by formula", "all-to-all bf16", "Estimate", "forward pass of a layer"):
        assert part in told
    values = json.loads((planned / "out/plan.json").read_text())
    assert values["fits"] and values["gpus"]["number"] == 16
    sent = [row for row in values["communication"] if row["kind"] == "all-to-all"]
    assert sum(row["runs"] for row in sent) == 12
    assert values["estimate"]["step_s"] > 0
    page = (planned / "out/plan.html").read_text()
    assert page.count("<svg") == 4 and "<script" not in page
    assert not re.search(r'(src|href)="(?!#)', page), "nothing from outside"
    assert (planned / "out/schedule.txt").read_text().startswith("forward pass")


def test_audit_exits_with_1(planned, capsys):
    _write(cache_folder() / key(config(), TARGET), dataclasses.replace(compiled_before("clean"), alias_bytes=0))
    assert command.main(FLAGS) == 0, "it is only told"
    assert command.main([*FLAGS, "--audit"]) == 1
    assert "state not donated" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("tiny",), "--gpus is missing"),
        (("tiny", "--gpus", "h100"), "must read KIND:COUNT"),
        (("tiny", "--gpus", "h100:16", "--parallel.ep", "3"), "num_experts=8 doesn't divide by parallel.ep=3"),
        (("tiny", "--gpus", "h100:16", "--parallell.ep", "2"), "unknown option"),
        (("nothing_like_it", "--gpus", "h100:16"), "no preset"),
    ],
)
def test_wrong_configurations_exit_with_2(arguments, told, capsys):
    assert command.main(arguments) == 2
    assert told in capsys.readouterr().err


def test_without_the_packages_the_command_that_installs_them_is_named(planned, capsys):
    assert command.main(["tiny", "--gpus", "h100:8"]) == 1
    assert "python -m moex.plan --install" in capsys.readouterr().err
    with pytest.raises(CompileError, match="nowhere is missing"):
        aot_python()


def test_the_key_is_of_what_is_compiled(planned):
    same = replaced(config(), train=dict(steps=7), optimizer=dict(peak_lr=0.5, warmup_steps=1))
    assert key(dataclasses.replace(same, name="other", folder="x"), TARGET) == key(config(), TARGET)
    assert key(config(), dataclasses.replace(TARGET, domain=4)) == key(config(), TARGET), "XLA doesn't know domains"
    others = [
        key(replaced(config(), memory=dict(recompute=("layer",))), TARGET),
        key(replaced(config(), train=dict(accumulation=2)), TARGET),
        key(config(), parse_target("h100:32")),
        key(config(), parse_target("h200:16")),
    ]
    assert len({key(config(), TARGET), *others}) == 5


def test_an_interrupted_entry_of_the_cache_does_not_count(planned):
    (cache_folder() / key(config(), TARGET) / "numbers.json").unlink()
    assert cache.cached(config(), TARGET) is None


def test_memory_by_formula_and_by_the_compiler():
    """AdamW has two moments the size of the weights; ZeRO-1 gathers what ZeRO-3 leaves split."""
    base = replaced(config(), parallel=dict(ep=8, transport="alltoall"))
    parts = {}
    for zero in (1, 3):
        one = replaced(base, parallel=dict(zero=zero))
        parts[zero] = {p.name: p.num_bytes for p in by_formula(one, resolve_fold(one.parallel, 16))}
        assert parts[zero]["moments"] == pytest.approx(2 * parts[zero]["master weights"], rel=1e-3)
    assert parts[1]["gradients"] > 1.9 * parts[3]["gradients"]
    assert parts[1]["master weights"] == parts[3]["master weights"]
    step = compiled_before("clean")
    listed = at_peak(step)
    assert sum(p.num_bytes for p in listed) >= step.peak_bytes * 0.99
    with pytest.raises(ValueError, match="format changed"):
        at_peak(dataclasses.replace(step, live="nothing"))


@pytest.mark.parametrize(
    "changes, tokens, rows, slots, share",
    [
        (dict(ep=8, transport="alltoall", cell_factor=1.0, row_factor=1.25), 2048, 5120, 4096, 0.8),
        (dict(ep=8, transport="alltoall", cell_factor=1.0, spill_factor=0.5, row_factor=1.0), 2048, 4096, 6144, 1.0),
        (dict(ep=8, transport="alltoall"), 2048, 16384, 16384, 0.25),
        (dict(tp=2), 2048, 4096, 0, 1.0),
    ],
)
def test_rows_of_a_device(changes, tokens, rows, slots, share):
    one = replaced(config(), parallel=changes)
    found = sizes(one, resolve_fold(one.parallel, 16))
    assert (found.tokens, found.rows, found.slots) == (tokens, rows, slots)
    assert found.row_share == pytest.approx(share)


def test_remedies_are_configurations_that_pass_their_checks(planned, monkeypatch):
    base = replaced(config(), parallel=dict(ep=4, transport="alltoall"))
    offered = applicable(base, TARGET)
    assert [r.flags.split()[0] for r in offered[:3]] == [
        "--parallel.cell_factor",
        "--memory.recompute",
        "--memory.optimizer",
    ]
    for remedy in offered:
        check(remedy.config)
        check_on(remedy.config, resolve_fold(remedy.config.parallel, 16))
    found = measured(base, TARGET, number=1)
    assert found[0].peak_bytes is None and "is missing" in found[0].error, "nothing can compile here, and that is said"


def test_the_first_remedy_that_fits_is_proposed():
    small = dataclasses.replace(compiled_before("clean"), peak_bytes=90 * 10**9)
    plan = read_plan(config(), TARGET, small)
    flags = {"--memory.recompute layer": 85 * 10**9, "--memory.optimizer host": 79 * 10**9, "--parallel.tp 2": 10**9}
    remedies = [Remedy(name, "", config(), peak) for name, peak in flags.items()]
    assert "proposed: --memory.optimizer host\n" in report.text(plan, remedies=remedies)
    assert "none of these is enough by itself" in report.text(plan, remedies=remedies[:1])


def test_search_prunes_and_orders(planned):
    known, rejected = search.candidates(config(), TARGET)
    assert len(known) > 50
    assert {c.config.parallel.ep for c in known} == {1, 2, 4, 8}
    assert all(c.num_bytes <= TARGET.usable_bytes and c.seconds > 0 for c in known)
    assert all(c.config.train.batch_size == 64 for c in known)
    assert all(reason for reason in rejected.values())
    cut = replaced(config(), model=dict(expert_width=256))
    known, rejected = search.candidates(cut, TARGET)
    assert {c.config.parallel.etp for c in known} == {1, 2}, "a quarter of 256 has no grouped kernel"
    assert any("experts of width 64 have no grouped kernel" in reason for reason in rejected.values())
    small = dataclasses.replace(TARGET, name="a100")
    huge = replaced(config(), model=dict(d_model=65536, expert_width=65536, num_layers=200))
    known, rejected = search.candidates(huge, small)
    assert known == [] and any("are usable" in reason for reason in rejected.values())


def test_search_may_choose_a_recipe_that_the_gpus_have():
    recipes = ("compute", "fp8_block", "mxfp8")
    wide = replaced(config(), model=dict(d_model=512, expert_width=256))
    known, rejected = search.candidates(wide, TARGET, recipes=recipes)
    assert {c.config.precision.recipe for c in known} == {"compute", "fp8_block"}
    assert any("mxfp8" in family for family in rejected)
    bare = lambda c: replaced(c.config, precision=dict(recipe="compute"))
    seconds = {c.config: c.seconds for c in known}
    quantised = [c for c in known if c.config.precision.recipe == "fp8_block" and bare(c) in seconds]
    assert quantised and all(c.seconds < seconds[bare(c)] for c in quantised)
    assert {c.config.precision.recipe for c in search.candidates(wide, TARGET)[0]} == {"compute"}


def test_options_of_the_search_need_it(planned, capsys):
    assert command.main([*FLAGS, "--recipes", "compute", "fp8_block"]) == 2
    assert "--recipes has no effect without --search" in capsys.readouterr().err


def test_search_takes_the_fastest_that_fits_and_saves_it(planned, monkeypatch, capsys):
    chosen = replaced(config(), parallel=dict(ep=2, transport="alltoall"))
    candidate = search.Candidate(chosen, 1.0, 1.0)
    monkeypatch.setattr(search, "candidates", lambda *_: ([candidate], {"tp 64": "too many"}))
    _write(cache_folder() / key(chosen, TARGET), dataclasses.replace(compiled_before("clean"), peak_bytes=10**12))
    assert command.main([*FLAGS, "--search", "--save", str(planned / "best.json")]) == 0
    told = capsys.readouterr().out
    assert "left: tp 64: too many" in told and "1000.0 !" in told
    assert load(planned / "best.json").parallel == ParallelConfig()


def test_published_rows_can_be_planned():
    for row in ROWS:
        one, target = row.config(), parse_target(row.gpus)
        check(one)
        check_on(one, resolve_fold(one.parallel, target.num_gpus))
        assert row.assumed and row.source
    assert {row.fold for row in ROWS} == {"fit", "judge"}


def test_constants_are_fitted_on_one_half_and_judged_on_the_other():
    """Rows that run exactly as the stated shares say need no other ones; twice as fast, faster kernels or links."""
    step = compiled_before("clean")
    plan = read_plan(config(), TARGET, step)
    exact = plan.estimate.model_flops_per_s / 1e12
    rows = [
        ROWS[0]._replace(config=config, tflops=speed, fold=half)
        for speed, half in ((exact, "fit"), (exact / 2, "judge"))
    ]  # fmt: skip
    known = [calibrate.Case(row, TARGET, plan.module) for row in rows]
    fitted = calibrate.fit(known)
    assert fitted == DEFAULT
    found = calibrate.outcomes(known, fitted)
    assert calibrate.error(found[0].stated, rows[0]) == pytest.approx(0, abs=1e-9)
    told = calibrate.table(found, fitted)
    assert "- judged on (1 rows), fitted shares: median error 100%, worst 100%" in told
    assert "Not comparable yet" in told
