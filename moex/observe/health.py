"""The one-line verdict on a run: does the loss fall, are the numbers finite, are the experts used evenly?

N steps, L MoE layers, E experts. The "end" of a run is its last tenth, at most 100 steps.
"""

from typing import NamedTuple

import numpy as np

from moex.observe.load import max_over_mean
from moex.observe.run import Run

MIN_STEPS = 20  # below this many finite losses nobody can tell a trend from noise
MAX_LOAD = 2.0  # busiest expert over the mean of its layer, averaged over the end
MIN_EXPECTED_TOKENS = 10  # an expert is called dead only if uniform routing would have given it this many at the end
RISE = 0.1  # share of the fall so far that may be lost again before the loss counts as rising


class Verdict(NamedTuple):
    """What `judge` says."""

    level: str  # "good", "unsure" or "bad"
    text: str  # findings, the worst first


class Finding(NamedTuple):
    """One part of a verdict; levels as there."""

    level: str
    text: str


def end_window(num_steps: int) -> int:
    """Steps that count as the end of a run of `num_steps`."""
    return max(1, min(100, num_steps // 10))


def judge(run: Run) -> Verdict:
    """Puts the findings about a run in one sentence; its level is that of the worst of them."""
    findings = [*_finite(run), *_loss(run), *_held_out(run), *_experts(run)]
    order = {"bad": 0, "unsure": 1, "good": 2}
    findings.sort(key=lambda finding: order[finding.level])
    text = "; ".join(finding.text for finding in findings)
    return Verdict(findings[0].level, text[:1].upper() + text[1:] + ".")


def _finite(run: Run) -> list[Finding]:
    """Bad when any step has a NaN or infinity among its numbers."""
    where = run.steps[run.non_finite_steps]
    if not len(where):
        return []
    return [Finding("bad", f"{count(len(where), 'step')} with non-finite numbers (first: step {where[0]:,})")]


def _loss(run: Run) -> list[Finding]:
    """Compares the mean loss of the first tenth, the best tenth and the end, each give or take its standard error.

    Falls: end < first by more than two standard errors. Rising again: the end is above the best stretch by more than
    four standard errors and by more than RISE of the fall from first to best.
    """
    name = "lm_loss" if "lm_loss" in run.values else "loss"
    loss = run[name][np.isfinite(run[name])]
    if not len(loss):
        return [Finding("bad", "no step has a finite loss")]
    if len(loss) < MIN_STEPS:
        return [Finding("unsure", f"too early to tell: {count(len(loss), 'step')} so far")]
    width = max(end_window(len(loss)), 2)
    means, errors = _windows(loss, width)
    first, last, best = means[0], means[-1], means.min()
    error = float(np.hypot(errors[0], errors[-1]))
    fall = f"{first:.2f} to {last:.2f} nats"
    if not last < first - 2 * error:
        return [Finding("bad", f"the loss does not fall ({fall})")]
    if last > best + max(4 * errors[-1], RISE * (first - best)):
        return [Finding("bad", f"the loss has risen again (best {best:.2f}, now {last:.2f} nats)")]
    entropy = run.unigram_entropy
    if entropy is None:
        return [Finding("good", f"the loss falls ({fall})")]
    if last >= entropy:
        text = f"the loss falls ({fall}) but is not yet below the unigram entropy ({entropy:.2f})"
        return [Finding("unsure", text)]
    return [Finding("good", f"the loss falls ({fall}, {entropy - last:.2f} below the unigram entropy)")]


def _windows(values: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard errors of consecutive stretches of `width` values, the last ending with the last value."""
    rows = values[len(values) % width :].reshape(-1, width)
    rows = np.concatenate([values[None, :width], rows])
    return rows.mean(1), rows.std(1, ddof=1) / np.sqrt(width)


def _held_out(run: Run) -> list[Finding]:
    """Unsure when each of the last three held-out losses is over 2 % above the best: the model learns by heart."""
    held_out = run["eval_loss"]
    steps, held_out = run.steps[np.isfinite(held_out)], held_out[np.isfinite(held_out)]
    if len(held_out) < 4 or held_out[-3:].min() <= 1.02 * held_out.min():
        return []
    best = int(held_out.argmin())
    text = f"the held-out loss rises since step {steps[best]:,} ({held_out[best]:.2f} to {held_out[-1]:.2f} nats)"
    return [Finding("unsure", text)]


def end_loads(run: Run) -> np.ndarray:
    """Max/mean of each MoE layer, [L], mean over the steps of the end; NaN for a layer without tokens there."""
    ratios = max_over_mean(run.counts[-end_window(len(run.steps)) :])
    seen = np.isfinite(ratios)
    total = np.where(seen, ratios, 0).sum(0)
    return np.divide(total, seen.sum(0), out=np.full(total.shape, np.nan), where=seen.any(0))


def dead_experts(run: Run) -> list[tuple[int, int]]:
    """(MoE layer, expert) of every expert without a token at the end though uniform routing would give it some."""
    window = run.counts[-end_window(len(run.steps)) :]
    present = np.isfinite(window).any(0)
    tokens = np.where(np.isfinite(window), window, 0).sum(0)
    uniform = tokens.sum(-1, keepdims=True) / np.maximum(present.sum(-1, keepdims=True), 1)
    dead = present & (tokens == 0) & (uniform >= MIN_EXPECTED_TOKENS)
    return [(int(layer), int(expert)) for layer, expert in np.argwhere(dead)]


def _experts(run: Run) -> list[Finding]:
    """Bad when an expert is dead or a layer's max/mean is over MAX_LOAD; nothing to say without MoE layers."""
    loads = end_loads(run)
    if not np.isfinite(loads).any():
        return []
    findings = []
    dead = dead_experts(run)
    if dead:
        named = ", ".join(f"{expert} of layer {layer}" for layer, expert in dead[:3]) + (", …" if len(dead) > 3 else "")
        findings.append(Finding("bad", f"{count(len(dead), 'dead expert')} ({named})"))
    worst = int(np.nanargmax(loads))
    over = int((loads > MAX_LOAD).sum())
    if over:
        where = f"layer {worst}" if over == 1 else f"{over} layers, worst layer {worst}"
        findings.append(Finding("bad", f"experts unbalanced: max/mean load {loads[worst]:.2f} ({where})"))
    if not findings:
        findings.append(Finding("good", f"experts balanced (max/mean load at most {loads[worst]:.2f})"))
    return findings


def count(number: int, noun: str) -> str:
    """Number and noun, with the plural's s where it belongs."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
