"""The log on disk: strict JSON, checked fields, torn lines, resuming."""

import json

import numpy as np
import pytest

from moex.observe import operands, routing
from moex.observe.jsonl import encode
from moex.observe.metrics import STEP_FIELDS, RunLog, read_jsonl
from moex.precision.statistics import SIZE


def strict(text: str):
    def refuse(name):
        raise AssertionError(f"{name} in the file")

    return json.loads(text, parse_constant=refuse)


def record(step: int, **changes) -> dict:
    values = dict.fromkeys(STEP_FIELDS, 1.0) | {"step": step, "expert_counts": [[3, 5], [4, 4]], "mfu": None}
    return values | changes


def lines(path) -> list[dict]:
    return [strict(line) for line in path.read_text().splitlines()]


def test_non_finite_values_become_null_and_are_named(tmp_path):
    with RunLog(tmp_path) as log:
        log.step(record(0, loss=float("nan"), grad_norm=np.float32("inf"), lr=1e-3))
        log.event("start", peak=-np.inf, nested={"a": np.nan, "b": 2})
    (step,) = lines(tmp_path / "metrics.jsonl")
    assert step["loss"] is None
    assert step["grad_norm"] is None
    assert step["lr"] == 1e-3
    assert step["non_finite"] == ["loss", "grad_norm"]
    (event,) = lines(tmp_path / "events.jsonl")
    assert event["nested"] == {"a": None, "b": 2}
    assert event["non_finite"] == ["peak", "nested.a"]


def test_numpy_becomes_plain_numbers(tmp_path):
    with RunLog(tmp_path) as log:
        log.step(
            record(
                np.int64(7),
                loss=np.float32(0.5),
                overflow=np.bool_(False),
                valid_tokens=np.uint32(4_000_000_000),
                expert_counts=[np.array([1, 2], np.int32), (np.int64(3), 4)],
            )
        )
    (step,) = lines(tmp_path / "metrics.jsonl")
    assert step["step"] == 7
    assert step["loss"] == 0.5
    assert step["overflow"] is False
    assert step["valid_tokens"] == 4_000_000_000
    assert step["expert_counts"] == [[1, 2], [3, 4]]
    assert "non_finite" not in step


def test_each_line_is_on_disk_before_the_log_is_closed(tmp_path):
    log = RunLog(tmp_path)
    log.step(record(0))
    log.event("checkpoint", step=0)
    assert lines(tmp_path / "metrics.jsonl")[0]["step"] == 0
    event = lines(tmp_path / "events.jsonl")[0]
    assert event["kind"] == "checkpoint"
    assert event["step"] == 0
    assert event["time"] > 1.7e9
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.step(record(1))


@pytest.mark.parametrize("field", STEP_FIELDS)
def test_a_missing_field_is_named(tmp_path, field):
    broken = record(0)
    del broken[field]
    with RunLog(tmp_path) as log, pytest.raises(ValueError, match=f"missing field '{field}'"):
        log.step(broken)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_an_unknown_field_is_named_with_a_suggestion(tmp_path):
    with RunLog(tmp_path) as log, pytest.raises(ValueError, match=r"'grad_nrom' \(did you mean 'grad_norm'\?\)"):
        log.step(record(0, grad_nrom=1.0))


@pytest.mark.parametrize("step", [-1, 1.5, True, None])
def test_a_step_that_is_no_step_number_is_refused(tmp_path, step):
    with RunLog(tmp_path) as log, pytest.raises(ValueError, match="'step' must be a whole number"):
        log.step(record(step))


def test_a_value_without_a_json_form_is_refused_and_nothing_is_written(tmp_path):
    with RunLog(tmp_path) as log:
        with pytest.raises(TypeError, match="'loss'"):
            log.step(record(0, loss=1j))
        with pytest.raises(ValueError, match="'time'"):
            log.event("start", time=3)
        with pytest.raises(ValueError, match="non_finite"):
            log.event("start", non_finite=[])
    assert (tmp_path / "metrics.jsonl").read_bytes() == (tmp_path / "events.jsonl").read_bytes() == b""


def test_reading_passes_over_a_torn_last_line_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n{"step": 2, "lo')
    assert read_jsonl(path) == [{"step": 0}, {"step": 1}]
    path.write_bytes(b'{"step": 0}\n{"step": 1}')
    assert read_jsonl(path) == [{"step": 0}, {"step": 1}]
    for broken in (b'{"step": 1, "lo\n', b"[1]\n", b"\n", b'{"a": NaN}\n', b'{"a": "\xff"}\n'):
        path.write_bytes(b'{"step": 0}\n' + broken + b'{"step": 2}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: "):
            read_jsonl(path)
        path.write_bytes(b'{"step": 0}\n' + broken)
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: "):
            read_jsonl(path)


def test_resume_moves_later_steps_and_leaves_earlier_lines_as_they_were(tmp_path):
    with RunLog(tmp_path) as log:
        for step in range(6):
            log.step(record(step, loss=10.0 - step))
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    with RunLog(tmp_path) as log:
        assert log.resume(4) == 2
        log.step(record(4, loss=0.25))
    after = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert after[:4] == before[:4]
    assert [line["loss"] for line in lines(tmp_path / "metrics.jsonl")] == [10, 9, 8, 7, 0.25]
    moved = lines(tmp_path / "events.jsonl")
    assert [(e["kind"], e["step"], e["record"]["loss"]) for e in moved] == [
        ("superseded_step", 4, 6.0),
        ("superseded_step", 5, 5.0),
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


def test_resume_moves_the_steps_of_every_file_that_has_some(tmp_path):
    """Measurements of precision and recorded choices, too; a torn line of either file is kept as text."""
    with RunLog(tmp_path) as log:
        for step in range(6):
            log.step(record(step))
    for step in (0, 2, 4):
        vector = np.ones((1, 3, SIZE))
        operands.write(tmp_path, step, {"a": vector})
        routing.write(tmp_path, step, np.zeros((1, 1, 1, 1, 1), np.int32), 2)
    with (tmp_path / "precision.jsonl").open("a") as file:
        file.write('{"step": 5, "prod')
    with RunLog(tmp_path) as log:
        assert log.resume(3) == 4
        routing.supersede(tmp_path, 3)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert [line["step"] for line in lines(tmp_path / "precision.jsonl")] == [0, 2]
    torn, *moved = lines(tmp_path / "events.jsonl")
    assert (torn["kind"], torn["text"]) == ("superseded_step", '{"step": 5, "prod')
    assert [(e["step"], e.get("file")) for e in moved] == [(3, None), (4, None), (5, None), (4, "precision.jsonl")]
    assert moved[-1]["record"]["products"]["a"].keys() == {"x", "dy", "w"}
    assert [step for step, *_ in routing.read(tmp_path)] == [0, 2]
    assert [path.name for path in (tmp_path / "routing/superseded").iterdir()] == ["00000004.npz"]


def test_resume_past_the_last_step_changes_nothing(tmp_path):
    with RunLog(tmp_path) as log:
        log.step(record(0))
        before = (tmp_path / "metrics.jsonl").read_bytes()
        assert log.resume(1) == 0
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def test_torn_lines_are_kept_as_text(tmp_path):
    metrics, events = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl"
    metrics.write_bytes(encode(record(0)) + encode(record(1)) + b'{"step": 2, "loss": 1.')
    events.write_bytes(b'{"kind": "start", "time": 1.0}\n{"kind": "samp')
    with RunLog(tmp_path) as log:
        log.resume(1)
        log.step(record(1))
    assert [line["step"] for line in lines(metrics)] == [0, 1]
    start, torn, torn_step, moved = lines(events)
    assert start == {"kind": "start", "time": 1.0}
    assert (torn["kind"], torn["text"]) == ("torn_line", '{"kind": "samp')
    assert (torn_step["kind"], torn_step["text"]) == ("superseded_step", '{"step": 2, "loss": 1.')
    assert (moved["kind"], moved["step"]) == ("superseded_step", 1)


def test_a_whole_last_line_without_newline_is_not_joined_to_the_next(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(encode(record(0)).rstrip())
    with RunLog(tmp_path) as log:
        log.step(record(1))
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1]


def test_a_kill_before_the_replacement_loses_nothing(tmp_path, monkeypatch):
    with RunLog(tmp_path) as log:
        for step in range(3):
            log.step(record(step))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, RunLog(tmp_path) as log:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            log.resume(1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    with RunLog(tmp_path) as log:
        assert log.resume(1) == 2


def test_resume_names_a_line_without_a_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"loss": 1}\n')
    with RunLog(tmp_path) as log, pytest.raises(ValueError, match="line 2: no step number"):
        log.resume(1)
