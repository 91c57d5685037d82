"""What a large corpus costs: time and memory to open it, a batch a million steps on, and tokens a second beside the need.

The corpus is made up: 2 billion ids in files with holes, so it takes little disk; a child process opens it. Prints one line
a packing; `--check` ends with 1 where opening takes over 2 seconds or 200 MB, or a host with 8 GPUs would wait for one
loading thread.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from configs import PRESETS
from mesh.topology import peak_flops
from moex.models.flops import train_flops_per_token

NUM_TOKENS, VOCAB, SEQ_LEN, ROWS = 2 * 10**9, 50_000, 4096, 64
MFU, GPUS, DEVICE = 0.4, 8, "NVIDIA H100 80GB HBM3"
LIMIT_S, LIMIT_MB = 2.0, 200.0


def write_sparse(folder: Path) -> None:
    """An index and files of the right sizes; documents have log-normal lengths, about 1,000 tokens in the mean."""
    lengths = np.random.default_rng(0).lognormal(6.2, 1.2, NUM_TOKENS // 1000).astype(np.int64) + 1
    starts = np.minimum(np.cumsum([0, *lengths]), NUM_TOKENS)
    starts[-1] = NUM_TOKENS
    with (folder / "train-00000.tokens").open("wb") as file:
        file.truncate(2 * NUM_TOKENS)
    starts.astype("<i8").tofile(folder / "train-00000.starts")
    counts = np.zeros(VOCAB, "<i8")
    counts[0] = NUM_TOKENS
    counts.tofile(folder / "train.counts")
    part = lambda kind: dict(file=f"train-00000.{kind}", sha256="not read")
    shard = dict(num_tokens=NUM_TOKENS, num_documents=len(lengths), tokens=part("tokens"), starts=part("starts"))
    split = dict(num_bytes=NUM_TOKENS, counts=dict(file="train.counts", sha256="not read"), shards=[shard])
    tokenizer = dict(name="bytes", sha256="bytes", end=0)
    index = dict(format=1, dtype="uint16", vocab_size=VOCAB, tokenizer=tokenizer, splits=dict(train=split))
    (folder / "index.json").write_text(json.dumps(index))


def measure(folder: str, packing: str, out) -> None:
    """Runs in a fresh process: opens the corpus, reads batches, sends the numbers."""
    import grain

    from moex.data import Batches, Packed, Windows, check_mixture, open_corpus

    assert len(grain.MapDataset.range(1)) == 1  # what importing grain takes is not the corpus's
    before, began = _resident_mb("VmRSS"), time.perf_counter()
    computed = time.process_time()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    corpus = open_corpus(folder)
    check_mixture([corpus], VOCAB)
    rows = (Windows if packing == "windows" else Packed)(corpus.train.shards, SEQ_LEN)
    batches = Batches([rows], rows=ROWS, accumulation=1, seed=0)
    batches.batch(0)
    computed = time.process_time() - computed
    opened, memory = time.perf_counter() - began, _resident_mb("VmHWM") - before
    began = time.perf_counter()
    batches.batch(10**6)
    far = time.perf_counter() - began
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < 3:
        steps += 1
        batches.batch(steps)
    rate = steps * ROWS * SEQ_LEN / (time.perf_counter() - began)
    out.send((opened, computed, memory, far, rate, rows.num_rows))


def _resident_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def need() -> float:
    """Tokens a second of a host of 8 H100s that trains Qwen3-30B-A3B at 40 % of its peak."""
    peak = peak_flops(DEVICE)
    assert peak, f"{DEVICE} is listed"
    return GPUS * peak * MFU / train_flops_per_token(PRESETS["qwen3_30b_a3b"]().model, SEQ_LEN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    spawn, bad = multiprocessing.get_context("spawn"), False
    with tempfile.TemporaryDirectory() as folder:
        write_sparse(Path(folder))
        for packing in ("windows", "documents"):
            ours, theirs = spawn.Pipe()
            child = spawn.Process(target=measure, args=(folder, packing, theirs))
            child.start()
            opened, computed, memory, far, rate, num_rows = ours.recv()
            child.join()
            ratio = rate / need()
            bad |= opened > LIMIT_S or memory > LIMIT_MB or ratio < 1
            cost = f"{opened:.2f} s ({computed:.2f} of CPU) and {memory:.0f} MB"
            needed = f"the {need():,.0f} of {GPUS} H100s on Qwen3-30B-A3B at {MFU:.0%} MFU"
            print(
                f"{packing:>9}: {NUM_TOKENS:,} tokens in {num_rows:,} rows open with the first batch in {cost}; "
                f"step 1,000,000 in {1000 * far:.0f} ms; one thread reads {rate:,.0f} tokens/s, {ratio:.1f} x {needed}"
            )
    return int(check and bad)


if __name__ == "__main__":
    sys.exit(main())
