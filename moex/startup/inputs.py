"""The corpora of a run, opened and checked, and their batches."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console

from moex.config import RunConfig
from moex.data import (
    Batches,
    Buckets,
    Corpus,
    Packed,
    Rows,
    Split,
    Windows,
    check_mixture,
    mixed_entropy,
    open_corpus,
    ramp_of,
)
from moex.data.inspect import render_batch
from moex.validate import ConfigError


class Data(NamedTuple):
    """corpora: with the same tokenizer.  train, held_out: their batches, held_out None where no corpus has any.
    unigram_entropy: nats a token of guessing by frequency alone in the training text.  bytes_per_token: of held-out text,
    or of training text without any.
    """

    corpora: tuple[Corpus, ...]
    train: Batches | Buckets
    held_out: Batches | None
    unigram_entropy: float
    bytes_per_token: float

    @property
    def name(self) -> str:
        return ", ".join(corpus.name for corpus in self.corpora)

    @property
    def fingerprint(self) -> str:
        """Of all that batches depend on: one corpus's own, or one over those of several, in their order."""
        prints = [corpus.fingerprint for corpus in self.corpora]
        return prints[0] if len(prints) == 1 else hashlib.sha256("\n".join(prints).encode()).hexdigest()


def load_data(config: RunConfig) -> Data:
    """Opens and checks the corpora.

    Raises ConfigError when one is missing, too small, made by another tokenizer, has ids past the vocabulary, shards twice,
    or would be gone through more often than data.max_epochs.
    """
    try:
        corpora = tuple(open_corpus(location) for location in config.data.corpus)
        check_mixture(corpora, config.model.vocab_size)
        splits = [corpus.train for corpus in corpora]
        if config.parallel.cp_groups:
            train = _buckets(config, splits[0])
        else:
            train = _batches(config, splits, config.data.weights, shuffle=True)
        held_out_splits = [corpus.held_out for corpus in corpora if corpus.held_out.num_tokens]
        held_out = _batches(config, held_out_splits, (), shuffle=False) if held_out_splits else None
    except ValueError as error:
        raise ConfigError(f"data: {error}") from error
    if held_out is None and config.observe.eval_every:
        raise ConfigError(
            f"observe.eval_every={config.observe.eval_every}: no corpus has held-out documents; tokenise with --held-out"
            " above 0, or set it to 0"
        )
    _check_epochs(config, corpora, train)
    entropy = mixed_entropy([corpus.train for corpus in corpora], train.weights)
    measured = held_out_splits or [corpus.train for corpus in corpora]
    bytes_per_token = sum(s.num_bytes for s in measured) / sum(s.num_tokens for s in measured)
    return Data(corpora, train, held_out, entropy, bytes_per_token)


def _buckets(config: RunConfig, split: Split) -> Buckets:
    train = config.train
    options = dict(rows=train.batch_size // train.accumulation, seed=train.seed)
    return Buckets(split.shards, train.seq_len, config.parallel.groups_of(train.accumulation), **options)


def _batches(config: RunConfig, splits: Sequence[Split], weights: Sequence[float], *, shuffle: bool) -> Batches:
    train = config.train
    kind = Packed if config.data.packing == "documents" else Windows
    sources: list[Rows] = [kind(split.shards, train.seq_len) for split in splits]
    rows = train.batch_size // train.accumulation
    sizes = ramp_of(config.train) if shuffle else None
    options = dict(rows=rows, accumulation=train.accumulation, seed=train.seed)
    return Batches(sources, **options, weights=weights, sizes=sizes, shuffle=shuffle)


def _check_epochs(config: RunConfig, corpora: Sequence[Corpus], train: Batches | Buckets) -> None:
    limit, epochs = config.data.max_epochs, train.epochs(config.train.steps)
    most = int(np.argmax(epochs))
    if limit and epochs[most] > limit:
        raise ConfigError(
            f"data.max_epochs={limit:g}, but train.steps={config.train.steps} go {epochs[most]:.2f} times through"
            f" {corpora[most].name} ({train.sources[most].num_rows} rows): lower train.steps, batch_size or its weight"
        )


def show_batch(config: RunConfig, step: int) -> None:
    """Prints a step's batch as text, with masks and boundaries.  Raises ConfigError as `load_data` does."""
    data = load_data(config)
    batch = data.train.batch(step)
    source_of = data.train.source_of(batch["sample_ids"]).reshape(-1).tolist()
    names = {i: data.corpora[s].name for i, s in zip(batch["sample_ids"].reshape(-1).tolist(), source_of, strict=True)}
    Console(soft_wrap=True).print(render_batch(batch, data.corpora[0].tokenizer, names))
