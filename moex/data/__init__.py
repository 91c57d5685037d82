"""Data: corpora as flat token arrays."""

from moex.data.corpus import Corpus, Tokens, check_tokens, fingerprint, stdlib_corpus, unigram_entropy

__all__ = [
    "Corpus",
    "Tokens",
    "check_tokens",
    "fingerprint",
    "stdlib_corpus",
    "unigram_entropy",
]
