"""Data: corpora as flat token arrays, batches addressed by step, and a background prefetch."""

from moex.data.batches import Batches, read_windows
from moex.data.corpus import Corpus, Tokens, check_tokens, decode_bytes, fingerprint, stdlib_corpus, unigram_entropy
from moex.data.prefetch import Prefetch

__all__ = [
    "Batches",
    "Corpus",
    "Prefetch",
    "Tokens",
    "check_tokens",
    "decode_bytes",
    "fingerprint",
    "read_windows",
    "stdlib_corpus",
    "unigram_entropy",
]
