"""Data: corpora as flat token arrays and batches addressed by step."""

from moex.data.batches import Batches, read_windows
from moex.data.corpus import Corpus, Tokens, check_tokens, fingerprint, stdlib_corpus, unigram_entropy

__all__ = [
    "Batches",
    "Corpus",
    "Tokens",
    "check_tokens",
    "fingerprint",
    "read_windows",
    "stdlib_corpus",
    "unigram_entropy",
]
