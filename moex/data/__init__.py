"""Data: corpora as flat token arrays, batches addressed by step, and a background prefetch."""

from moex.data.batches import Batches
from moex.data.buckets import Buckets
from moex.data.corpus import Corpus, Split, check_mixture, mixed_entropy
from moex.data.packing import pack
from moex.data.prefetch import Prefetch
from moex.data.ramp import Ramp, ramp_of
from moex.data.rows import Packed, Rows, Windows
from moex.data.shards import open_shards
from moex.data.stdlib import stdlib_corpus
from moex.data.tokenizers import Tokenizer, decode_bytes
from moex.data.tokens import Tokens, check_tokens, entropy, fingerprint, unigram_entropy

__all__ = [
    "Batches",
    "Buckets",
    "Corpus",
    "Packed",
    "Prefetch",
    "Ramp",
    "Rows",
    "Split",
    "Tokenizer",
    "Tokens",
    "Windows",
    "check_mixture",
    "check_tokens",
    "decode_bytes",
    "entropy",
    "fingerprint",
    "mixed_entropy",
    "open_corpus",
    "open_shards",
    "pack",
    "ramp_of",
    "stdlib_corpus",
    "unigram_entropy",
]

STDLIB = "stdlib"


def open_corpus(location: str) -> Corpus:
    """`stdlib`, or a folder of shards, local or remote.  Raises ValueError when there is none."""
    return stdlib_corpus() if location == STDLIB else open_shards(location)
