"""A run from the command line to its folder: what it writes, how it is continued, killed, preempted and refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import train
from mesh.distributed import Start
from moex.checkpoint import open_step
from moex.cli import load, parse
from moex.observe import routing
from moex.observe.jsonl import read_jsonl
from moex.observe.metrics import STEP_FIELDS, TIMED, check_step
from moex.observe.report import write_report
from moex.train.step import NEEDS

ROOT = Path(__file__).resolve().parent.parent
TIMES = set(TIMED)
ARGUMENTS = [
    "tiny", "--model.d-model=32", "--model.num-layers=2", "--model.expert-width=16", "--train.steps=6",
    "--train.seq-len=32", "--optimizer.warmup-steps=2", "--checkpoint.every-steps=3", "--observe.eval-every=4",
    "--observe.eval-rows=16", "--observe.sample-tokens=5", "--parallel.ep=2", "--parallel.transport=alltoall",
    "--observe.record-routing-every=4",
]  # fmt: skip
QUIET = ["--observe.eval-every=0", "--observe.sample-tokens=0"]


def without(*names: str) -> list[str]:
    """The arguments but for some, and without evaluation and samples."""
    left_out = (*names, *(flag.partition("=")[0] for flag in QUIET))
    return [a for a in ARGUMENTS if a.partition("=")[0] not in left_out] + QUIET


# The command line with something that happens to the process right after it has logged a step.
HOOKED = """
import os, signal, sys, time
from pathlib import Path
import train
from moex.observe.metrics import RunLog

folder, at, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
log_step = RunLog.step

def hooked(self, record):
    log_step(self, record)
    if record["step"] == at:
        while name == "SIGKILL" and not (Path(folder) / "checkpoints" / "3").is_dir():
            time.sleep(0.05)
        os.kill(os.getpid(), getattr(signal, name))
    if record["step"] >= at:
        time.sleep(1.0)  # the notice of a preemption takes a moment to come round

RunLog.step = hooked
sys.exit(train.main(sys.argv[4:]))
"""


def start_nothing(patch: pytest.MonkeyPatch):
    """`jax.distributed` cannot start in a process that has used devices; the runs in child processes start it."""
    patch.setattr("mesh.distributed.initialise", lambda: Start("one process", None, 1, 0))


@pytest.fixture(autouse=True)
def already_started(monkeypatch):
    start_nothing(monkeypatch)


def in_child(folder: Path, at: int, name: str, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", HOOKED, str(folder), str(at), name, *ARGUMENTS, f"--folder={folder}", *more]
    environ = dict(os.environ, PYTHONPATH=str(ROOT), JAX_DEFAULT_MATMUL_PRECISION="highest")  # as in this process
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run of six steps, with checkpoints after three and six."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    with pytest.MonkeyPatch.context() as patch:
        start_nothing(patch)
        assert train.main([*ARGUMENTS, f"--folder={folder}"]) == 0
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A copy of the finished folder, to spoil."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def metrics(folder: Path, but: frozenset[str] | set[str] = frozenset()) -> list[dict]:
    lines = read_jsonl(folder / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMES | but} for line in lines]


def events(folder: Path, kind: str) -> list[dict]:
    return [event for event in read_jsonl(folder / "events.jsonl") if event["kind"] == kind]


def assert_same_training(folder: Path, other: Path, but: frozenset[str] | set[str] = frozenset()):
    assert metrics(folder, but) == metrics(other, but)
    ours, theirs = open_step(folder, 6), open_step(other, 6)
    assert_same_tree(ours, theirs, "")


def assert_same_tree(ours, theirs, name):
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), name
        for key in ours:
            assert_same_tree(ours[key], theirs[key], f"{name}.{key}")
    elif isinstance(ours, list | tuple):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_tree(a, b, f"{name}.{i}")
    else:
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes(), name


def test_folder_holds_all_that_a_reader_needs(finished):
    names = {path.name for path in finished.iterdir()}
    files = "config.json env.json plan.json metrics.jsonl events.jsonl report.html"
    assert names == {*files.split(), "checkpoints", "routing", "tb"}
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["3", "6"]
    assert "<svg" in (finished / "report.html").read_text()


def test_recorded_choices_are_those_of_the_step(finished):
    """As many tokens chose each expert as the step's line says: nothing is dropped here, and nothing masked."""
    lines = {line["step"]: line for line in read_jsonl(finished / "metrics.jsonl")}
    found = list(routing.read(finished))
    assert [step for step, *_ in found] == [0, 4]
    for step, experts, num_experts in found:
        by_layer = np.moveaxis(experts, 3, 0)
        counts = [np.bincount(layer.reshape(-1), minlength=num_experts + 1)[:-1].tolist() for layer in by_layer]
        assert counts == lines[step]["expert_counts"]


def test_config_json_is_the_configuration(finished, capsys):
    config = parse([*ARGUMENTS, f"--folder={finished}"]).config
    assert load(finished / "config.json") == config
    assert parse(["--config", str(finished / "config.json")]).config == config
    assert train.main(["--config", str(finished / "config.json"), "--print-config"]) == 0
    assert capsys.readouterr().out == (finished / "config.json").read_text()


def test_metrics_have_one_line_a_step_with_every_field(finished):
    lines = read_jsonl(finished / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    for line in lines:
        check_step(line)
        assert STEP_FIELDS.keys() <= line.keys()
        assert np.shape(line["expert_counts"]) == (2, 8)
        real = 8 * 32
        assert np.sum(line["expert_counts"], axis=-1).tolist() == [2 * real] * 2
        assert 0.8 * real < line["valid_tokens"] <= real
        assert line["mfu"] is None and line["skipped"] == line["overflow"] == line["dropped"] == 0
        assert line["tokens_per_s"] == pytest.approx(line["valid_tokens"] / line["step_s"])
    assert [line["lr"] for line in lines[:3]] == pytest.approx([0, 2e-3, 4e-3])
    assert ["eval_loss" in line for line in lines] == [False, False, False, True, False, True]
    assert lines[0]["lm_loss"] == pytest.approx(np.log(256), abs=0.5)
    assert lines[-1]["lm_loss"] < lines[0]["lm_loss"]


def test_events_tell_the_run(finished):
    kinds = [event["kind"] for event in read_jsonl(finished / "events.jsonl")]
    assert kinds == ["data", "start", "compile", "checkpoint", "checkpoint", "sample", "finish"]
    assert [event["step"] for event in events(finished, "checkpoint")] == [3, 6]
    (sample,) = events(finished, "sample")
    assert sample["prompt"] == "def "
    assert sample["text"]
    (data,) = events(finished, "data")
    assert 3.0 < data["unigram_entropy"] < 3.5


def test_plan_and_environment_say_what_ran(finished):
    plan, env = (json.loads((finished / name).read_text()) for name in ("plan.json", "env.json"))
    saved = open_step(finished)
    sizes = [np.size(leaf) for leaf in _leaves(saved["params"])]
    assert plan["parameters"] == sum(sizes)
    assert plan["num_devices"] == 8 and "ep=2" in plan["mesh"]
    assert plan["tokens_per_step"] == 8 * 32 and plan["total_steps"] == 6
    assert {"moe_layers.moe.router.weight", "ends.embedding"} <= set(plan["weight_decay"])
    assert len(env["devices"]) == 8 and env["versions"]["jax"]


def _leaves(tree):
    for value in tree.values():
        yield from _leaves(value) if isinstance(value, dict) else (value,)


def test_killed_run_continues_to_the_same_bits(finished, tmp_path, capsys):
    folder = tmp_path / "killed"
    done = in_child(folder, 4, "SIGKILL")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [line["step"] for line in metrics(folder)] == [0, 1, 2, 3, 4]
    assert not (folder / "report.html").exists()
    assert train.main([*ARGUMENTS, f"--folder={folder}"]) == 0
    assert "continuing after step 3" in capsys.readouterr().out
    assert_same_training(folder, finished)
    assert [event["step"] for event in events(folder, "superseded_step")] == [3, 4]
    (resume,) = events(folder, "resume")
    assert resume["step"] == 3


def test_preempted_run_saves_exits_75_and_continues_to_the_same_bits(finished, tmp_path):
    folder = tmp_path / "preempted"
    done = in_child(folder, 0, "SIGTERM")
    assert done.returncode == 75, done.stderr
    assert "preempted: saved after step" in done.stdout
    (preempted,) = events(folder, "preempted")
    steps = preempted["step"]
    assert 0 < steps < 6
    assert [line["step"] for line in metrics(folder)] == list(range(steps))
    assert events(folder, "checkpoint")[-1]["step"] == steps
    assert train.main([*ARGUMENTS, f"--folder={folder}"]) == 0
    assert not events(folder, "superseded_step")
    # A preempted run saves and leaves, also where its last step should have been evaluated.
    assert_same_training(folder, finished, but={"eval_loss", "eval_tokens"})
    assert metrics(folder)[-1] == metrics(finished)[-1]


def test_finished_folder_is_left_alone(copied, capsys):
    before = (copied / "metrics.jsonl").read_bytes(), (copied / "events.jsonl").read_bytes()
    assert train.main([*ARGUMENTS, f"--folder={copied}"]) == 0
    assert "is trained to step 6 already: raise --train.steps" in capsys.readouterr().out
    assert ((copied / "metrics.jsonl").read_bytes(), (copied / "events.jsonl").read_bytes()) == before


def test_finished_folder_is_continued_by_more_steps_on_another_mesh(copied):
    arguments = without("--parallel.ep", "--parallel.transport", "--train.steps")
    more = ["--train.steps=7", "--parallel.zero=3", "--parallel.cp=2"]
    assert train.main([*arguments, f"--folder={copied}", *more]) == 0
    assert [line["step"] for line in metrics(copied)] == list(range(7))
    write_report(copied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--optimizer.peak-lr=1e-3", "optimizer.peak_lr was 0.004, is 0.001"),
        ("--train.seed=1", "train.seed was 0, is 1"),
        ("--model.expert-width=24", "model.expert_width was 16, is 24"),
        ("--train.accumulation=2", "train.accumulation was 1, is 2"),
    ],
)
def test_another_configuration_is_refused(finished, capsys, monkeypatch, change, message):
    monkeypatch.setattr("moex.trainer.build", lambda *_: pytest.fail("reached the program"))
    before = (finished / "config.json").read_bytes()
    dp = ["--parallel.cp=2"] if "accumulation" in change else []
    assert train.main([*without(change.partition("=")[0]), f"--folder={finished}", change, *dp]) == 2
    error = capsys.readouterr().err
    assert message in error and "another --folder" in error
    assert (finished / "config.json").read_bytes() == before


def test_another_corpus_is_refused(copied, capsys, monkeypatch):
    monkeypatch.setattr("moex.trainer.build", lambda *_: pytest.fail("reached the program"))
    plan = json.loads((copied / "plan.json").read_text())
    (copied / "plan.json").write_text(json.dumps(plan | dict(corpus_fingerprint="0" * 64)))
    assert train.main([*ARGUMENTS, f"--folder={copied}"]) == 2
    assert "was trained on another corpus" in capsys.readouterr().err


def test_a_checkpoint_that_has_seen_other_samples_is_refused(copied, capsys, monkeypatch):
    """A config.json that was written over: its batch sizes don't lead to the samples that the state counted."""
    monkeypatch.setattr("moex.trainer._Loop._compile", lambda *_: pytest.fail("reached compilation"))
    path = copied / "config.json"
    path.write_text(path.read_text().replace('"batch_size": 8', '"batch_size": 16'))
    arguments = [*without("--train.steps"), "--train.steps=7", "--train.batch-size=16", f"--folder={copied}"]
    assert train.main(arguments) == 2
    assert "of step 6 has seen 48 samples, but by this run's batch sizes it would be 96" in capsys.readouterr().err


def test_folder_that_is_no_run_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("")
    assert train.main([*ARGUMENTS, f"--folder={tmp_path}"]) == 2
    assert "exists and is no run folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_run_that_stays_non_finite_ends_with_an_error(tmp_path):
    arguments = [a for a in ARGUMENTS if not a.startswith(("--train.steps", "--optimizer.warmup"))]
    wild = [
        "--train.steps=40",
        "--optimizer.warmup-steps=0",
        "--optimizer.peak-lr=1e38",
        "--checkpoint.every-steps=100",
    ]
    with pytest.raises(RuntimeError, match="not finite for 10 steps in a row"):
        train.main([*arguments, *wild, f"--folder={tmp_path / 'wild'}"])
    lines = read_jsonl(tmp_path / "wild" / "metrics.jsonl")
    assert [line["skipped"] for line in lines[-10:]] == [1] * 10
    assert len(lines) < 14
    assert not events(tmp_path / "wild", "finish")
    write_report(tmp_path / "wild")


OVERFLOWING = [
    "--parallel.ep=8", "--model.router.forced=skew", "--model.router.forced-skew=3", "--model.router.aux-coefficient=0",
    "--optimizer.schedule=constant", "--model.num-layers=1", "--observe.eval-every=6",
]  # fmt: skip
TIGHT = ["--parallel.cell-factor=1", "--parallel.spill-factor=0.5", "--parallel.row-factor=1"]
STASH = ["--memory.stash", "experts", "--memory.stash-factor=1"]  # buffers hold the worst case, the stash doesn't


def trained(folder, *flags):
    """Lines of metrics without times and sizes, and the last checkpoint's tree."""
    arguments = [a for a in without("--parallel.ep", "--model.num-layers") if a not in QUIET[:1]]
    assert train.main([*arguments, *OVERFLOWING, *flags, f"--folder={folder}"]) == 0
    own = TIMES | {"rung", *NEEDS}
    lines = [{k: v for k, v in line.items() if k not in own} for line in read_jsonl(folder / "metrics.jsonl")]
    return lines, open_step(folder)


@pytest.fixture(scope="module")
def never_overflowing(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        start_nothing(patch)
        return trained(tmp_path_factory.mktemp("worst"))


@pytest.mark.parametrize(
    "run_ahead, parts, tight",
    [(1, [6], TIGHT), (2, [3, 6], TIGHT), (1, [6], STASH)],
    ids=["straight", "continued", "stash"],
)
def test_a_step_that_overflows_is_run_again_and_nothing_tells(tmp_path, never_overflowing, run_ahead, parts, tight):
    """Routing so skewed that two sizes are too small in every step: bit by bit the run with worst-case buffers.

    So is the evaluation, which has rows of its own to find room for.
    """
    want_lines, want = never_overflowing
    for steps in parts:
        lines, got = trained(tmp_path, *tight, f"--train.run-ahead={run_ahead}", f"--train.steps={steps}")
    evaluated = {"eval_loss", "eval_tokens"}  # a run of three steps ends with an evaluation, too
    left_out = lambda lines: [{k: v for k, v in line.items() if k not in evaluated} for line in lines]
    assert left_out(lines) == left_out(want_lines)
    assert lines[-1] == want_lines[-1]
    assert lines[-1]["eval_tokens"] > 0
    assert [line["dropped"] for line in lines] == [line["overflow"] for line in lines] == [0] * 6
    jax.tree.map(np.testing.assert_array_equal, got, want)
    retries = events(tmp_path, "retry")
    assert [event["rung"] for event in retries if event["step"] == 0] == [1, 2]
    assert all(event["overflow"] > 0 and event["need_rows"] > 1 for event in retries)
    assert len(retries) < 2 * len(lines), (
        "after a few such steps, or where a run goes on after such, steps begin larger"
    )


def test_learning_rate_goes_on_where_it_was(tmp_path):
    """Warm-up of 10 steps to 1e-3, cosine to 1e-4 at 100: steps 40 and 41, in one go and continued at 40."""
    arguments = without("--train.steps", "--optimizer.warmup-steps", "--checkpoint.every-steps", "--model.num-layers")
    arguments += ["--optimizer.peak-lr=1e-3", "--optimizer.final-lr=1e-4", "--optimizer.warmup-steps=10"]
    arguments += ["--optimizer.schedule-steps=100", "--model.num-layers=1", "--observe.trackers"]
    assert train.main([*arguments, "--train.steps=42", f"--folder={tmp_path / 'straight'}"]) == 0
    for steps in (40, 42):
        assert train.main([*arguments, f"--train.steps={steps}", f"--folder={tmp_path / 'continued'}"]) == 0
    for name in ("straight", "continued"):
        rates = [line["lr"] for line in read_jsonl(tmp_path / name / "metrics.jsonl")]
        np.testing.assert_allclose(rates[40:], [7.7500e-4, 7.6126e-4], rtol=2e-5)
    assert metrics(tmp_path / "continued") == metrics(tmp_path / "straight")
    (changed,) = events(tmp_path / "continued", "changed")
    assert changed["settings"] == {"train.steps": {"was": 40, "now": 42}}


def test_a_profile_of_some_steps_is_written(finished, tmp_path):
    """--profile 1:2 traces one step; nothing else of the run changes."""
    assert train.main([*ARGUMENTS, f"--folder={tmp_path / 'traced'}", "--profile", "1:2"]) == 0
    assert list((tmp_path / "traced" / "profiles").rglob("*.xplane.pb"))
    assert metrics(tmp_path / "traced") == metrics(finished)


def test_out_of_memory_leaves_a_profile(tmp_path, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes")

    monkeypatch.setattr("moex.trainer._Loop._record_routing", full)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as error:
        train.main([*ARGUMENTS, f"--folder={tmp_path / 'full'}"])
    assert "memory.recompute" in error.value.__notes__[0]
    assert (tmp_path / "full" / "memory-0.prof").stat().st_size > 0
    assert events(tmp_path / "full", "out_of_memory")[0]["message"].startswith("RESOURCE_EXHAUSTED")


def test_a_batch_is_shown_and_nothing_trained(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("moex.trainer.build", lambda *_: pytest.fail("reached the program"))
    assert train.main([*ARGUMENTS, f"--folder={tmp_path / 'run'}", "--inspect-batch", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("micro-batch 0, row") == 8 and "32 tokens," in out
    assert not (tmp_path / "run").exists()
