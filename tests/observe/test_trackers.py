"""Numbers of a step reach TensorBoard's files, and the packages of the extra as they want to be called."""

import struct
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from moex.config import ObserveConfig, RunConfig
from moex.observe.metrics import RunLog
from moex.observe.trackers import open_trackers, scalars
from tests.observe.conftest import expert_counts, step_record


def record(step):
    counts = expert_counts(10, 2, 4, np.random.default_rng(0))
    return step_record(step, counts[step], 10, np.random.default_rng(step)) | {"router_not_finite": 0}


def with_trackers(*names) -> RunConfig:
    return RunConfig(observe=ObserveConfig(trackers=names))


def events_in(folder: Path):
    """Records of the event files: length, its checksum, the message, its checksum."""
    for path in sorted(folder.glob("events.*")):
        raw, at = path.read_bytes(), 0
        while at < len(raw):
            (length,) = struct.unpack_from("<Q", raw, at)
            yield Event.FromString(raw[at + 12 : at + 12 + length])
            at += 16 + length


def test_tensorboard_gets_every_number_of_every_step(tmp_path):
    with RunLog(tmp_path, open_trackers(with_trackers("tensorboard"), tmp_path)) as log:
        for step in range(3):
            log.step(record(step))
    found = {
        (value.tag, event.step): value.simple_value
        for event in events_in(tmp_path / "tb")
        for value in event.summary.value
    }
    for step in range(3):
        wanted = scalars(record(step))
        assert {
            "loss/loss",
            "optimizer/lr",
            "speed/tokens_per_s",
            "router/worst_load",
            "load/layer_001",
        } <= wanted.keys()
        for name, number in wanted.items():
            assert found[name, step] == pytest.approx(number, rel=1e-6), name


def test_numbers_that_are_none_are_left_out():
    numbers = scalars(record(0) | {"mfu": None, "loss": float("nan"), "skipped": np.int32(1), "expert_counts": []})
    assert not {"speed/mfu", "loss/loss", "router/worst_load"} & numbers.keys()
    assert numbers["optimizer/skipped"] == 1.0


class Recorder(types.SimpleNamespace):
    """Takes any call and keeps it."""

    def __init__(self):
        super().__init__(calls=[])

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="id1"), log=self.log, finish=self.finish)

        return call


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_continued_run_is_the_same_one_at_the_tracker(tmp_path, monkeypatch, name):
    package = Recorder()
    monkeypatch.setitem(sys.modules, name, package)
    for step in range(2):
        with RunLog(tmp_path, open_trackers(with_trackers(name), tmp_path)) as log:
            log.step(record(step))
    own = (tmp_path / f"{name}_id").read_text()
    begun = [kwargs for call, _, kwargs in package.calls if call in ("init", "start_run")]
    ids = [kwargs.get("id" if name == "wandb" else "run_id") for kwargs in begun]
    assert ids == ([own, own] if name == "wandb" else [None, own])
    sent = [(args[0], kwargs["step"]) for call, args, kwargs in package.calls if call in ("log", "log_metrics")]
    assert sent == [(scalars(record(0)), 0), (scalars(record(1)), 1)]
    assert [call for call, _, _ in package.calls][-1] in ("finish", "end_run")
