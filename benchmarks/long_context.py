"""Long context: presets of 128K and 256K tokens compiled for their GPUs, and packed documents of very unequal length.

    python benchmarks/long_context.py                  # documents: balance of the ranks, dynamic against static, in seconds
    python benchmarks/long_context.py --compile        # the presets beside the one of 4096 tokens; needs scripts/setup_aot.sh

S tokens of a row, R rows, c context-parallel ranks that a document lies over. Exits with 1 when a preset doesn't fit, the
audit finds a fault, or model FLOPs a token are over 1 % from the published pair of TFLOP/s and tokens/s.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from configs import GPUS, PRESETS
from mesh.topology import ACCELERATORS
from moex.config import RunConfig
from moex.data import Packed, Tokens
from moex.data.packing import pack_buckets
from moex.layers.context import dealt
from moex.models.flops import train_flops_per_token
from moex.plan.as_json import as_json
from moex.plan.plan import make_plan
from moex.plan.rates import DEFAULT
from moex.plan.target import KINDS, parse_target

SHORT, LONG = "qwen3_235b_256xh100", ("qwen3_235b_128k_128xh100", "qwen3_235b_256k_256xh100")
PUBLISHED = {131_072: 1150e12 / 1556}
"""FLOPs a token by sequence: TFLOP/s over tokens/s of a GPU, arXiv 2603.07685 table 11 (Qwen3-235B)."""
FUSED_FLOPS = {4096: (553e12, 422e12), 16_384: (638e12, 523e12)}
"""FLOP/s forward and backward of cuDNN's attention on Hopper by sequence, arXiv 2603.07685; longer ones as 16,384."""


def lengths_of(num_docs: int, median: float, spread: float, longest: int) -> np.ndarray:
    """Log-normal lengths of documents, cut at a row."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), spread, num_docs)
    return np.clip(drawn, 16, longest).astype(np.int64)


def corpus_of(lengths: np.ndarray) -> Tokens:
    starts = np.cumsum([0, *lengths])
    return Tokens(np.zeros(starts[-1], np.uint32), starts, ("",) * len(lengths))


def imbalance(rows: Packed, cp: int, deal: str) -> np.ndarray:
    """Of each row the most pairs of query and key that a rank has, over the mean of its ranks: float [R]."""
    arrays = rows.read(np.arange(rows.num_rows))
    order = dealt(arrays["segments"], cp, deal)
    seen = np.where(arrays["segments"] > 0, arrays["positions"] + 1, 0)
    pairs = np.take_along_axis(seen, order, axis=1).reshape(rows.num_rows, cp, -1).sum(axis=2)
    return pairs.max(axis=1) / pairs.mean(axis=1)


class Bucket(NamedTuple):
    """Documents over `group` ranks: their rows, and tokens that are none."""

    group: int
    rows: int
    padding: int


def buckets(tokens: Tokens, seq_len: int, groups: Sequence[int]) -> list[Bucket]:
    found, lanes = [], [seq_len * group // groups[-1] for group in groups]
    for group, lane, packing in zip(groups, lanes, pack_buckets(tokens.starts, lanes), strict=True):
        packed = Packed([tokens], seq_len, packings=[packing], lane_len=lane)
        found.append(Bucket(group, packed.num_rows, packed.num_padding))
    return found


def documents(seq_len: int, cp: int, median: float, spread: float, num_docs: int) -> None:
    lengths = lengths_of(num_docs, median, spread, seq_len)
    tokens = corpus_of(lengths)
    static = Packed([tokens], seq_len)
    quantiles = ", ".join(f"{q:,.0f}" for q in np.quantile(lengths, [0.5, 0.9, 0.99]))
    print(f"{num_docs:,} documents, log-normal, spread {spread:g}: half, 90 %, 99 % are up to {quantiles} tokens")
    print(
        f"packed into {static.num_rows} rows of {seq_len:,} over cp {cp}, {static.num_padding / static.num_rows:,.0f} padding"
    )
    print("\nmost pairs of query and key of a rank over the mean (time of a kernel that skips masked pairs)")
    print(f"  {'dealt by':10}{'mean':>8}{'worst row':>12}")
    for deal in ("row", "document"):
        found = imbalance(static, cp, deal)
        print(f"  {deal:10}{found.mean():8.3f}{found.max():12.3f}")
    groups = [c for c in (2**i for i in range(cp.bit_length())) if c <= cp]
    parts = [bucket for bucket in buckets(tokens, seq_len, groups) if bucket.rows]
    dynamic = sum(bucket.rows * bucket.group for bucket in parts)
    print("\ndynamic context parallelism: steps of a ring a row, which its time goes by")
    print(f"  {'ranks':>6}{'documents to':>14}{'rows':>8}{'padding a row':>15}")
    for group, rows, padding in parts:
        print(f"  {group:6}{seq_len * group // cp:14,}{rows:8}{padding / rows:15,.0f}")
    ratio = dynamic / (static.num_rows * cp)
    model = PRESETS[LONG[0]]().model
    other = train_flops_per_token(model, 0) * sum(bucket.rows for bucket in parts) / static.num_rows
    core = train_flops_per_token(model, seq_len) - train_flops_per_token(model, 0)
    print(f"  attention: {dynamic} of {static.num_rows * cp} ring steps, {ratio:.3f} of static")
    print(f"  Qwen3-235B's whole step, all FLOPs at one rate: {(core * ratio + other) / (core + other):.3f} of static")


class Told(NamedTuple):
    """mfu, fused_mfu: as compiled, and with attention at the rates of a fused kernel.  problems: what ends with 1."""

    mfu: float
    fused_mfu: float
    problems: list[str]


def compiled(name: str) -> Told:
    config, target = PRESETS[name](), parse_target(GPUS[name])
    plan = make_plan(config, target, tell=lambda line: print(line, file=sys.stderr, flush=True))
    values, seq_len = as_json(plan, []), config.train.seq_len
    flops, estimate = train_flops_per_token(config.model, seq_len), values["estimate"]
    fused_s = fused_step_s(config, values, target.num_gpus, ACCELERATORS[KINDS[target.name]].bf16_flops)
    fused_mfu = estimate["mfu"] * estimate["step_s"] / fused_s
    print(
        f"{name}: peak {values['memory']['peak_bytes'] / 1e9:.1f} of {values['gpus']['usable_bytes'] / 1e9:.0f} GB; model "
        f"{flops / 1e9:.1f} GFLOP a token; step {estimate['step_s']:.1f} s, MFU {100 * estimate['mfu']:.1f} %; with fused "
        f"attention {fused_s:.1f} s, {100 * fused_mfu:.1f} %",
        flush=True,
    )
    problems = [] if values["fits"] else [f"{name}: {values['verdict']}"]
    problems += [f"{name}: {found['text']}" for found in values["audit"] if found["level"] == "fault"]
    if (published := PUBLISHED.get(seq_len)) and abs(flops / published - 1) > 0.01:
        problems.append(f"{name}: {flops / 1e9:.1f} GFLOP a token, published {published / 1e9:.1f}")
    return Told(estimate["mfu"], fused_mfu, problems)


def fused_step_s(config: RunConfig, values: dict, num_gpus: int, peak_flops: float) -> float:
    """The estimate with other kernels in place of all of attention's, and of what XLA leaves no scope for (the sums of its
    loops): projections at the share of products, the causal half of scores and values at a fused kernel's rate.
    """
    train, a, d = config.train, config.model.attention, config.model.d_model
    tokens = train.batch_size * train.seq_len / num_gpus * config.model.num_layers
    kept = sum(
        row["seconds"] for row in values["compute"]
        if row["scope"] != "attention" and (row["phase"], row["scope"]) != ("update", "step")
    )  # fmt: skip
    weights = 2 * d * (a.num_heads + a.num_kv_heads) * a.head_dim
    projections_s = 2 * 4 * weights * tokens / (DEFAULT.matmul * peak_flops)  # forward, again, and two gradients
    forward, backward = FUSED_FLOPS[train.seq_len if train.seq_len in FUSED_FLOPS else max(FUSED_FLOPS)]
    core = 2 * train.seq_len * a.num_heads * a.head_dim * tokens
    return kept + values["estimate"]["exposed_s"] + projections_s + core * (2 / forward + 2.5 / backward)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile the presets, minutes each")
    parser.add_argument("--seq-len", type=int, default=131_072)
    parser.add_argument("--cp", type=int, default=8)
    parser.add_argument("--median", type=float, default=2000, help="of the lengths of documents")
    parser.add_argument("--spread", type=float, default=1.5, help="standard deviation of their logarithms")
    parser.add_argument("--documents", type=int, default=4000)
    a = parser.parse_args()
    if not a.compile:
        documents(a.seq_len, a.cp, a.median, a.spread, a.documents)
        return 0
    short, *long = (compiled(name) for name in (SHORT, *LONG))
    for name, told in zip(LONG, long, strict=True):
        print(
            f"{name} over {SHORT}: MFU {told.mfu / short.mfu:.2f} times as compiled, "
            f"{told.fused_mfu / short.fused_mfu:.2f} times with fused attention"
        )
    forward, backward = FUSED_FLOPS[max(FUSED_FLOPS)]
    print(
        "Assumed: a roofline of the compiled program, see docs/planning.md; layers computed again. As compiled, attention is "
        f"plain XLA and moves its scores through memory. Fused attention: {forward / 1e12:.0f} and {backward / 1e12:.0f} "
        "TFLOP/s forward and backward of the causal half (553 and 422 at 4096 tokens), published for one GPU and sequences "
        "that aren't split; waits for collectives as compiled."
    )
    problems = [problem for told in (short, *long) for problem in told.problems]
    print("\n".join(problems) or "as it should be")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
