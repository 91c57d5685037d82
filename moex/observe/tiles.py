"""The key numbers of a run, as the report's tiles."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moex.observe.health import count, end_loads, end_window
from moex.observe.progress import format_duration
from moex.observe.run import Run, as_number

_PARAMETERS = ("parameters", "num_parameters", "params", "num_params", "total_parameters", "total_params")
_ACTIVE = ("active_parameters", "num_active_parameters", "active_params", "num_active_params")
_TOTAL_STEPS = ("total_steps", "num_steps", "steps")


class Tile(NamedTuple):
    """One key number, as text."""

    label: str
    value: str
    note: str = ""


def key_numbers(run: Run) -> list[Tile]:
    """The tiles, in order; one whose numbers the run does not have is left out."""
    makers = (_loss, _held_out, _bits_per_byte, _below_unigram, _speed, _utilisation, _tokens, _parameters)
    makers += (_wall_time, _load, _lost)
    return [tile for maker in makers if (tile := maker(run)) is not None]


def state(run: Run) -> str:
    """Finished or stopped, at which step and, if the start event tells it, of how many planned."""
    last = int(run.steps[-1])
    if run.finished:
        return f"finished at step {last:,}"
    total = find_number(run.last_event("start"), _TOTAL_STEPS)
    return f"stopped at step {last:,}" + (f" of {total:,}" if total else "")


def find_number(tree: object, names: tuple[str, ...]) -> float | None:
    """The first finite number under one of the names, in the order of the names, anywhere in nested objects."""
    for name in names:
        for key, value in _items(tree):
            if key == name and (number := as_number(value)) is not None:
                return number
    return None


def _items(tree: object) -> Iterator[tuple[str, object]]:
    if isinstance(tree, dict):
        yield from tree.items()
        for value in tree.values():
            yield from _items(value)


def bytes_vocabulary(run: Run) -> bool:
    """Whether a token is a byte: a tokenizer called byte or bytes, or a vocabulary of 256 to 264 entries."""
    items = [*_items(run.last_event("start")), *_items(run.last_event("data")), *_items(run.config)]
    if any(key == "tokenizer" and value in ("byte", "bytes") for key, value in items):
        return True
    sizes = [as_number(value) for key, value in items if key in ("vocab_size", "vocabulary_size")]
    return any(size is not None and 256 <= size <= 264 for size in sizes)


def last_finite(values: np.ndarray) -> float | None:
    """The last value that is neither NaN nor infinite."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else None


def best_estimate(run: Run) -> tuple[float, str] | None:
    """(cross entropy in nats a token, what it is): the last held-out loss, else the mean training loss of the end."""
    held_out = last_finite(run["eval_loss"])
    if held_out is not None:
        return held_out, "held-out"
    window = end_window(len(run.steps))
    values = run["lm_loss"][-window:]
    values = values[np.isfinite(values)]
    return (float(values.mean()), f"training, last {count(window, 'step')}") if len(values) else None


def _loss(run: Run) -> Tile | None:
    value = last_finite(run["loss"])
    if value is None:
        return Tile("Final loss", "none", "no step has a finite loss")
    window = end_window(len(run.steps))
    recent = run["loss"][-window:]
    recent = recent[np.isfinite(recent)]
    note = (
        f"nats a token; mean of the last {window:,}: {recent.mean():.3f}"
        if window > 1 and len(recent)
        else "nats a token"
    )
    return Tile("Final loss", f"{value:.3f}", note)


def _held_out(run: Run) -> Tile | None:
    value = last_finite(run["eval_loss"])
    if value is None:
        return None
    note = f"nats a token; best {np.nanmin(run['eval_loss']):.3f}"
    tokens = last_finite(run["eval_tokens"])
    return Tile("Held-out loss", f"{value:.3f}", note + (f", on {tokens:,.0f} tokens" if tokens else ""))


def _bits_per_byte(run: Run) -> Tile | None:
    estimate = best_estimate(run)
    if estimate is None or not bytes_vocabulary(run):
        return None
    return Tile("Bits per byte", f"{estimate[0] / math.log(2):.3f}", estimate[1])


def _below_unigram(run: Run) -> Tile | None:
    estimate = best_estimate(run)
    if estimate is None or run.unigram_entropy is None:
        return None
    distance = run.unigram_entropy - estimate[0]
    label = "Below unigram entropy" if distance >= 0 else "Above unigram entropy"
    return Tile(label, f"{abs(distance):.3f}", f"nats; {estimate[1]} against {run.unigram_entropy:.3f}")


def _speed(run: Run) -> Tile | None:
    speeds = run["tokens_per_s"]
    if not np.isfinite(speeds).any():
        return None
    flops = run["model_tflops"]
    note = f"median; {np.nanmedian(flops):,.4g} model TFLOP/s a device" if np.isfinite(flops).any() else "median"
    return Tile("Tokens a second", f"{np.nanmedian(speeds):,.0f}", note)


def _utilisation(run: Run) -> Tile | None:
    if not np.isfinite(run["mfu"]).any():
        return None
    return Tile("MFU", f"{100 * np.nanmedian(run['mfu']):.1f} %", "median, of the listed peak")


def _tokens(run: Run) -> Tile | None:
    tokens = run["valid_tokens"]
    if not np.isfinite(tokens).any():
        return None
    seen = float(np.nansum(tokens))
    note = f"in {count(len(run.steps), 'step')}"
    corpus = as_number(run.last_event("data").get("train_tokens"))
    if corpus:
        note += f"; {seen / corpus:,.2f} times the corpus"
    return Tile("Tokens seen", short(seen), note)


def _parameters(run: Run) -> Tile | None:
    start = run.last_event("start")
    total, active = find_number(start, _PARAMETERS), find_number(start, _ACTIVE)
    if total is None:
        return None
    return Tile("Parameters", short(total), f"{short(active)} active a token" if active is not None else "")


def _wall_time(run: Run) -> Tile | None:
    times = [time for event in run.events if (time := as_number(event.get("time"))) is not None]
    times += run["time"][np.isfinite(run["time"])].tolist()
    if not times:
        return None
    in_steps = run["step_s"][np.isfinite(run["step_s"])].sum()
    return Tile(
        "Wall time", format_duration(max(times) - min(times)), f"{format_duration(float(in_steps))} of it in steps"
    )


def _load(run: Run) -> Tile | None:
    loads = end_loads(run)
    if not np.isfinite(loads).any():
        return None
    worst = int(np.nanargmax(loads))
    note = f"busiest expert / mean at the end, MoE layer {worst}; median layer {np.nanmedian(loads):.2f}"
    return Tile("Worst expert load", f"{loads[worst]:.2f}", note)


def _lost(run: Run) -> Tile | None:
    """Shown only when something was lost: skipped updates, overflows of the budget, dropped rows."""
    parts = []
    for name, noun in (("skipped", "skipped step"), ("overflow", "overflow"), ("dropped", "dropped row")):
        number = int(np.nansum(run[name]))
        if number:
            parts.append(count(number, noun))
    return Tile("Lost", parts[0], ", ".join(parts[1:])) if parts else None


def short(number: float) -> str:
    """A large number in three figures with K, M, B or T: 1.23M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= size:
            scaled = number / size
            return f"{scaled:.{max(0, 2 - int(math.log10(abs(scaled))))}f}{letter}"
    return f"{number:,.0f}"
