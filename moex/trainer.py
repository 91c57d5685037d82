"""The training loop, its order of operations in plain sight.

The loop enqueues step n + 1 before it reads the numbers of step n, so devices never wait for the host; it catches up
before it evaluates or saves. A step whose buffers overflowed left the state as it was, and so did those enqueued behind
it: the loop goes back to it with larger buffers.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from mesh.distributed import Start, describe
from moex import startup
from moex.checkpoint import Checkpoints
from moex.config import RunConfig
from moex.data import Prefetch
from moex.evaluate import evaluate
from moex.generate import generate
from moex.models.flops import mfu
from moex.observe import operands, routing
from moex.observe.metrics import RunLog
from moex.observe.profile import Profile, out_of_memory_told
from moex.observe.progress import Progress
from moex.observe.report import write_report
from moex.observe.trackers import open_trackers
from moex.train.program import Program, build
from moex.train.rungs import Rungs, ladder, usual_of
from moex.train.state import TrainState, counted
from moex.validate import ConfigError, check_on, resolve_fold

EXIT_DONE, EXIT_PREEMPTED = 0, 75
MAX_SKIPS = 10
"""Steps in a row with non-finite loss or gradients after which the run ends with an error."""
COMPILE_PATIENCE_MS = 3_600_000
"""How long a process waits for the others to have compiled."""


def run(config: RunConfig, start: Start) -> int:
    """Trains up to the configured number of steps, from the newest checkpoint of the run folder if it has one.

    Returns the process's exit code.  Raises ConfigError before anything is compiled when configuration, devices, data or
    an existing run folder don't fit.
    """
    if jax.process_index() == 0:  # before the mesh: when that doesn't fit the devices, here they are
        _print_table(describe(start))
    fold = resolve_fold(config.parallel, jax.device_count())
    check_on(config, fold, jax.default_backend(), jax.devices()[0].device_kind)
    data, folder = startup.load_data(config), Path(config.run_folder)
    changed = startup.check_existing(folder, config, data)
    programs = {size: [build(rung, fold) for rung in ladder(at_size(config, size))] for size in data.train.sizes.sizes}
    derived = startup.derive(programs[config.train.batch_size][0], data)
    if jax.process_index() == 0:
        _print_table(startup.table(config, derived))
        startup.write_inputs(folder, config, derived)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(folder, config.checkpoint))
        first = checkpoints.latest or 0
        if first >= config.train.steps:
            print(f"{folder} is trained to step {first} already: raise --train.steps, or pass another --folder")
            return EXIT_DONE
        log, progress = _Silent(), _Silent()
        if jax.process_index() == 0:
            log = stack.enter_context(RunLog(folder, open_trackers(config, folder)))
            options = dict(every=config.observe.log_every, unigram_entropy=data.unigram_entropy)
            progress = stack.enter_context(Progress(config.train.steps, first, **options))
        if first and changed:
            log.event("changed", step=first, settings={name: dict(was=a, now=b) for name, (a, b) in changed.items()})
        code = _Loop(config, programs, data, derived, checkpoints, log, progress).run(first)
    if jax.process_index() == 0 and code == EXIT_DONE:
        print(f"{'run folder':>16}  {folder}\n{'report':>16}  {write_report(folder)}")
    return code


def at_size(config: RunConfig, batch_size: int) -> RunConfig:
    """The same run with steps of this many rows, in micro-batches of the same rows."""
    micro = config.train.batch_size // config.train.accumulation
    train = dataclasses.replace(config.train, batch_size=batch_size, accumulation=batch_size // micro)
    return dataclasses.replace(config, train=train)


def _print_table(lines: list[tuple[str, str]]) -> None:
    print("\n".join(f"{name:>16}  {text}" for name, text in lines), flush=True)


class _Silent:
    """Stands for the log and the progress display on processes other than the first."""

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: None


class Pending(NamedTuple):
    """A step that was enqueued and not read yet; rung: the buffer size it runs with; waited: seconds for its batch."""

    step: int
    rung: int
    metrics: Any
    waited: float


class _Loop:
    """What the loop holds beside the model's state: the steps not yet read, and the clock."""

    def __init__(
        self, config: RunConfig, programs: Mapping[int, Sequence[Program]], data: startup.Data,
        derived: Mapping[str, Any], checkpoints, log, progress,
    ):  # fmt: skip
        self.config, self.data, self.derived = config, data, derived
        self.by_size, self.sizes = programs, data.train.sizes
        self.programs = programs[config.train.batch_size]
        self.program = self.programs[0]
        self.checkpoints, self.log, self.progress = checkpoints, log, progress
        self.rungs = Rungs(len(self.programs), config.parallel.tail)
        self.pending: collections.deque[Pending] = collections.deque()
        self.skips, self.clock = 0, 0.0
        self.held_out: float | None = None

    def run(self, first: int) -> int:
        train, observe = self.config.train, self.config.observe
        steps, run_ahead = train.steps, train.run_ahead
        state = self._start(first)
        step_functions = self._compile(first)
        preempted = False
        memory_told = out_of_memory_told(Path(self.config.run_folder), self.log)
        with memory_told, contextlib.closing(Prefetch(self._batch, first)) as batches, Profile(self.config) as profile:
            self.clock = time.perf_counter()
            n = first
            while n < steps:
                asked = time.perf_counter()
                batch, rung = batches.get(n), self.rungs.of(n)
                waited = time.perf_counter() - asked
                profile.before(n)
                if observe.record_routing_every and n % observe.record_routing_every == 0:
                    self._record_routing(n, state, batch)
                if observe.measure_precision_every and n % observe.measure_precision_every == 0:
                    self._measure_precision(n, state, batch)
                with jax.transfer_guard("disallow"), jax.profiler.StepTraceAnnotation("train", step_num=n):
                    state, metrics = step_functions[self.sizes.size(n), rung](state, batch)
                self.pending.append(Pending(n, rung, metrics, waited))
                done, last = n + 1, n + 1 == steps
                preempted = multihost_utils.reached_preemption_sync_point(n) or preempted
                saving = last or preempted or self.checkpoints.due(done)
                evaluating = bool(observe.eval_every) and (last or done % observe.eval_every == 0)
                pausing = saving or evaluating
                failed = self._record_until(1 if pausing else run_ahead)
                if pausing and failed is None:
                    failed = self._overflowed()
                if failed is not None:
                    n = failed  # the steps behind it left the state alone, too
                    continue
                if pausing:
                    ready = time.perf_counter()  # the step's own time ends before its evaluation
                    self._record(self._evaluate(state) if evaluating and not preempted else {}, ready)
                if saving:
                    began = time.perf_counter()
                    self.checkpoints.save(done, state, self._facts())
                    self.log.event("checkpoint", step=done, seconds=time.perf_counter() - began)
                if preempted:
                    self.log.event("preempted", step=done)
                    self.progress.note(f"preempted: saved after step {done}")
                    return EXIT_PREEMPTED
                if pausing:
                    self.clock = time.perf_counter()  # pauses don't count as time of the next step
                n = done
        self._sample(state)
        self.log.event("finish", step=steps)
        return EXIT_DONE

    def _start(self, first: int) -> TrainState:
        derived = self.derived
        facts = (
            "corpus",
            "corpus_fingerprint",
            "train_tokens",
            "held_out_tokens",
            "train_documents",
            "held_out_documents",
        )
        facts += ("bytes_per_token",)
        self.log.event("data", unigram_entropy=derived["unigram_entropy"], **{name: derived[name] for name in facts})
        self.log.resume(first)
        if jax.process_index() == 0:
            routing.supersede(Path(self.config.run_folder), first)
        if not first:
            self.log.event("start", **derived)
            return self.program.initial_state(self.checkpoints.weights(self.program.state))
        self.log.event("resume", step=first, **derived)
        self.progress.note(f"continuing after step {first}")
        # Only the first process surely has the log; all must begin with the same size.
        tail = self.config.parallel.tail
        usual = multihost_utils.broadcast_one_to_all(np.int32(usual_of(self.log.rungs() or (), tail)))
        self.rungs = Rungs(len(self.programs), tail, int(usual))
        state = self.checkpoints.restore(self.program.state, first)
        seen, expected = counted(jax.device_get(state.samples)), self.sizes.samples_before(first)
        if seen != expected:
            raise ConfigError(
                f"the checkpoint of step {first} has seen {seen} samples, but by this run's batch sizes it would be "
                f"{expected}: it belongs to another run"
            )
        return state

    def _compile(self, first: int) -> dict[tuple[int, int], Any]:
        """The step for every batch size still to come and every buffer size; the states of all are alike."""
        compiled = {}
        for size in self.sizes.sizes_between(first, self.config.train.steps):
            for rung, program in enumerate(self.by_size[size]):
                began = time.perf_counter()
                compiled[size, rung] = program.train.lower(program.state, program.batch).compile()
                self.log.event("compile", rung=rung, rows=size, seconds=time.perf_counter() - began)
        # Some compile longer than others, and a first collective waits for its peers for 30 s only.
        multihost.get_barrier_sync_fn()(key="compiled", timeout_ms=COMPILE_PATIENCE_MS)
        return compiled

    def _batch(self, step: int):
        program = self.by_size[self.sizes.size(step)][0]
        return program.place(lambda rows: self.data.train.batch(step, rows), step)

    def _facts(self) -> dict[str, Any]:
        names = ("mesh", "num_devices", "device_kind", "corpus", "corpus_fingerprint", "parameters")
        return {name: self.derived[name] for name in names} | dict(jax=jax.__version__, processes=jax.process_count())

    def _record_routing(self, step: int, state: TrainState, batch) -> None:
        """Writes which experts every token of the batch chooses, before any is dropped."""
        last = self.by_size[self.sizes.size(step)][-1]
        chosen = last.record(state.params, state.router_bias, batch)  # no buffer of the last can overflow
        chosen = multihost_utils.process_allgather(chosen, tiled=True)
        if jax.process_index() == 0:
            config = self.config
            routing.write(Path(config.run_folder), step, np.asarray(chosen), config.model.router.num_experts)
        self.clock = time.perf_counter()

    def _measure_precision(self, step: int, state: TrainState, batch) -> None:
        """Writes what quantisation does to each product's operands, at the state and on the batch of a step."""
        last = self.by_size[self.sizes.size(step)][-1]
        measured = jax.device_get(last.measure(state.params, state.router_bias, batch))
        if jax.process_index() == 0:
            operands.write(Path(self.config.run_folder), step, measured)
        self.clock = time.perf_counter()

    def _evaluate(self, state: TrainState) -> dict[str, Any]:
        assert self.data.held_out is not None, "load_data refuses eval_every without held-out text"
        began = time.perf_counter()
        read = lambda state: evaluate(self.programs, state, self.data.held_out, max_rows=self.config.observe.eval_rows)
        result = read(state)
        self.held_out = result.loss
        averaged = dict(eval_loss_ema=read(state._replace(params=state.ema)).loss) if state.ema else {}
        return dict(eval_loss=result.loss, eval_tokens=result.tokens, eval_s=time.perf_counter() - began) | averaged

    def _record_until(self, ahead: int) -> int | None:
        """Reads pending steps, oldest first, until only `ahead` are left.

        Returns the step to run again when one has overflowed; it and those behind it are no longer pending then.
        """
        while len(self.pending) > ahead:
            if (failed := self._overflowed()) is not None:
                return failed
            self._record({})
        return None

    def _overflowed(self) -> int | None:
        """Waits for the oldest pending step. Its number when it was not applied: then nothing is pending any more."""
        oldest = self.pending[0]
        if jax.device_get(oldest.metrics["applied"]):
            return None
        values = jax.device_get({name: x for name, x in oldest.metrics.items() if x.ndim == 0})
        rung = self.rungs.overflowed(oldest.step, oldest.rung)
        needs = {name: float(x) for name, x in values.items() if name.startswith("need_")}
        self.log.event("retry", step=oldest.step, rung=rung, overflow=int(values["overflow"]), **needs)
        self.pending.clear()
        return oldest.step

    def _record(self, extra: Mapping[str, Any], ready: float | None = None) -> None:
        """Logs the oldest pending step, which was applied.  Raises RuntimeError when it says that training must end."""
        n, rung, metrics, waited = self.pending.popleft()
        self.rungs.applied(n, rung)
        values = jax.device_get(metrics)
        ready = ready or time.perf_counter()
        seconds, self.clock = ready - self.clock, ready
        del values["applied"]
        rate, devices = float(values["valid_tokens"]) / seconds, self.derived["num_devices"]
        flops = self.derived["flops_per_token"]
        record = {name: value.item() if value.ndim == 0 else value for name, value in values.items()} | dict(
            tokens_per_s=rate, model_tflops=rate * flops / devices / 1e12,
            mfu=mfu(flops, rate, devices, self.derived["peak_flops"]),
            rung=rung, rows=self.sizes.size(n), step_s=seconds, data_s=waited, time=time.time(), **extra,
        )  # fmt: skip
        if self.config.observe.sample_ids:
            record["sample_ids"] = self.data.train.sample_ids(n)
        self.log.step(record)
        self.progress.update(record)
        self.skips = self.skips + 1 if record["skipped"] else 0
        if self.skips >= MAX_SKIPS:
            raise RuntimeError(
                f"loss or gradients were not finite for {MAX_SKIPS} steps in a row, the last of them {n}"
            )

    def _sample(self, state: TrainState) -> None:
        observe = self.config.observe
        if not observe.sample_tokens:
            return
        tokenizer = self.data.corpora[0].tokenizer
        prompt = tokenizer.encode([observe.sample_prompt])[0].tolist()[-self.config.train.seq_len :]
        text = tokenizer.decode(generate(self.programs[-1], state, [prompt], observe.sample_tokens)[0])
        step = self.config.train.steps
        self.log.event("sample", step=step, prompt=observe.sample_prompt, text=text)
        self.progress.note(f"after {step} steps, continuing {observe.sample_prompt!r}:\n{observe.sample_prompt}{text}")
        if self.held_out is not None:
            entropy = self.data.unigram_entropy
            gap = entropy - self.held_out
            place = f"{abs(gap):.4f} {'below' if gap > 0 else 'above'} the unigram entropy {entropy:.4f}"
            self.progress.note(f"held-out loss {self.held_out:.4f} nats, {place}")
