"""A batch as a person reads it: each row's documents, and which of their tokens are learned."""

import itertools
from collections.abc import Mapping

import numpy as np
from rich.text import Text

from moex.data.tokenizers import Tokenizer

_LEGEND = "bold: learned   dim: input only (a prompt, or before a boundary)   │: a document begins   ·: padding"


def render_batch(
    batch: Mapping[str, np.ndarray], tokenizer: Tokenizer, sources: Mapping[int, str] | None = None
) -> Text:
    """The rows of `Batches.batch`, decoded token by token.  A token is shown bold where it is a label that counts.

    Off a terminal, where bold cannot be seen, the numbers before each document say the same.
    sources: name of the corpus that a sample is from.
    """
    text = Text(_LEGEND + "\n", style="italic")
    for micro, row in np.ndindex(batch["sample_ids"].shape):
        sample = int(batch["sample_ids"][micro, row])
        one = {name: array[micro, row] for name, array in batch.items() if name != "sample_ids"}
        real, learned = int((one["segments"] > 0).sum()), int(one["mask"].sum())
        where = f" of {sources[sample]}" if sources and sample in sources else ""
        head = f"micro-batch {micro}, row {row}: sample {sample}{where}; {real} tokens, {learned} learned"
        text.append(f"\n{head}, {len(one['mask']) - real} padding\n", style="bold underline")
        text.append(_row(one, tokenizer))
    return text


def _row(row: Mapping[str, np.ndarray], tokenizer: Tokenizer) -> Text:
    text, padding = Text(), int((row["segments"] == 0).sum())
    for segment in range(1, int(row["segments"].max(initial=0)) + 1):
        at = np.flatnonzero(row["segments"] == segment)
        # Token i is learned when the place before it has it as a label; a row's last label stands after it.
        learned = np.concatenate([[False], row["mask"][at]])
        ids = np.append(row["tokens"][at], row["labels"][at[-1]])[: len(at) + bool(row["mask"][at[-1]])]
        text.append(f"│ {len(at)} tokens, {int(learned.sum())} learned: ", style="cyan")
        for begin, end in _runs(learned[: len(ids)]):
            text.append(_visible(tokenizer.decode(ids[begin:end])), style="bold" if learned[begin] else "dim")
        text.append("\n")
    if padding:
        text.append(f"· {padding} padding\n", style="dim")
    return text


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """Stretches of equal flags."""
    cuts = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
    return [(a, b) for a, b in itertools.pairwise(cuts) if a < b]


def _visible(text: str) -> str:
    """Control characters as their pictures, but for line ends."""
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text)
