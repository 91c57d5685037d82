"""The embedded corpus: what is in it, how it is split, and what is refused."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from moex.data import Tokens, check_tokens, fingerprint, stdlib_corpus, unigram_entropy


@pytest.fixture(scope="module")
def corpus():
    return stdlib_corpus()


def make_tokens(*documents, dtype=np.uint16):
    flat = np.array([token for document in documents for token in document], dtype=dtype)
    starts = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    return Tokens(flat, starts, tuple(f"doc{d}" for d in range(len(documents))))


def shards(corpus):
    return corpus.train.shards[0], corpus.held_out.shards[0]


def fake_library(monkeypatch, root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))


def test_documents_are_the_files(corpus):
    root = sysconfig.get_path("stdlib")
    for split in shards(corpus):
        for d in (0, len(split.names) // 2, len(split.names) - 1):
            with (Path(root) / split.names[d]).open("rb") as file:
                assert split.tokens[split.starts[d] : split.starts[d + 1]].tobytes() == file.read() + b"\0"


def test_byte_zero_ends_documents_and_stands_nowhere_else(corpus):
    for split in shards(corpus):
        np.testing.assert_array_equal(np.flatnonzero(split.tokens == 0), split.starts[1:] - 1)


def test_splits_are_sorted_disjoint_and_near_one_in_twenty(corpus):
    train, held_out = corpus.train.shards[0].names, corpus.held_out.shards[0].names
    assert list(train) == sorted(train) and list(held_out) == sorted(held_out)
    assert not set(train) & set(held_out)
    assert 0.03 < len(held_out) / (len(train) + len(held_out)) < 0.08
    assert 0.02 < corpus.held_out.num_tokens / (corpus.train.num_tokens + corpus.held_out.num_tokens) < 0.10
    assert corpus.train.num_tokens > 5_000_000


def test_the_whole_library_is_in_but_for_packages_and_tests(corpus):
    names = set(corpus.train.shards[0].names) | set(corpus.held_out.shards[0].names)
    tables = {"encodings/cp1252.py", "pydoc_data/topics.py", "html/entities.py"}
    assert {"argparse.py", "json/decoder.py", "unittest/case.py"} | tables <= names
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    assert not any(name.startswith("_sysconfigdata") for name in names)


def test_another_process_with_another_hash_seed_reads_the_same(corpus):
    code = "import moex.data; print(moex.data.stdlib_corpus().fingerprint)"
    env = {"PYTHONHASHSEED": "12345", "PYTHONPATH": ":".join(filter(None, sys.path))}
    printed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == corpus.fingerprint


def test_import_does_not_load_jax_or_grain():
    code = "import sys, moex.data; moex.data.stdlib_corpus(200_000); print({'jax', 'grain'} & set(sys.modules))"
    env = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    printed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"


def test_entropy_of_train_matches_a_recomputation(corpus):
    train = corpus.train.shards[0].tokens
    # Mean negative log probability token by token, rather than a sum over the vocabulary.
    _, inverse, counts = np.unique(train, return_inverse=True, return_counts=True)
    assert unigram_entropy(train) == pytest.approx(-np.log(counts[inverse] / train.size).mean(), rel=1e-9)
    assert 3.0 < unigram_entropy(train) < 3.5


def test_entropy_of_known_distributions():
    assert unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(np.log(256))
    assert unigram_entropy(np.full(7, 3, np.uint16)) == 0.0
    assert unigram_entropy(np.array([0, 0, 1, 2], np.uint32)) == pytest.approx(1.5 * np.log(2))
    with pytest.raises(ValueError, match="empty"):
        unigram_entropy(np.zeros(0, np.uint8))


@pytest.mark.parametrize("limit_bytes", [60_000, 500_000])
def test_limit_caps_both_splits_and_keeps_them_apart(corpus, limit_bytes):
    small = stdlib_corpus(limit_bytes)
    assert 0.8 * limit_bytes < small.train.num_tokens + small.held_out.num_tokens <= limit_bytes
    assert set(small.train.shards[0].names) < set(corpus.train.shards[0].names)
    assert set(small.held_out.shards[0].names) < set(corpus.held_out.shards[0].names)
    assert small.fingerprint != corpus.fingerprint


@pytest.mark.parametrize("limit_bytes", [0, 100, -5])
def test_limit_too_small_for_a_held_out_file_says_so(limit_bytes):
    with pytest.raises(ValueError, match=f"split is empty.*limit_bytes={limit_bytes}; raise it"):
        stdlib_corpus(limit_bytes)


def test_missing_sources_name_the_path(monkeypatch, tmp_path):
    fake_library(monkeypatch, tmp_path, {"os.pyc": b"x", "site-packages/numpy.py": b"x = 1\n"})
    with pytest.raises(ValueError, match="no Python sources under") as error:
        stdlib_corpus()
    assert str(tmp_path) in str(error.value)


def test_files_with_byte_zero_and_blank_files_are_skipped(monkeypatch, tmp_path):
    good = {f"m{i:02}.py": b"x = %d\n" % i for i in range(60)}
    fake_library(
        monkeypatch, tmp_path, good | {"nul.py": b"a\0b", "blank.py": b" \n", "test/t.py": b"t", "notes.txt": b"t"}
    )
    corpus = stdlib_corpus()
    assert set(corpus.train.shards[0].names) | set(corpus.held_out.shards[0].names) == set(good)


def test_decode():
    corpus = stdlib_corpus(100_000)
    text = "naïve π = 3\n"
    assert corpus.tokenizer.decode(np.frombuffer(text.encode(), np.uint8)) == text
    assert corpus.tokenizer.decode([]) == ""
    assert corpus.tokenizer.decode([104, 0xC3, 105, 300, -1, 33]) == "h\ufffdi\ufffd\ufffd!"
    start, end = corpus.held_out.shards[0].starts[:2]
    assert corpus.tokenizer.decode(corpus.held_out.shards[0].tokens[start:end]).endswith("\0")


def test_fingerprint_sees_tokens_offsets_names_dtype_and_split():
    base = make_tokens([1, 2], [3])
    others = [
        make_tokens([1, 2], [4]),
        make_tokens([1], [2, 3]),
        Tokens(base.tokens, base.starts, ("doc0", "other")),
        make_tokens([1, 2], [3], dtype=np.uint32),
    ]
    prints = {fingerprint(base, base), *(fingerprint(base, other) for other in others), fingerprint(others[0], base)}
    assert len(prints) == 6
    assert fingerprint(base) == fingerprint(make_tokens([1, 2], [3]))


def test_check_tokens_names_document_and_offset():
    tokens = make_tokens([1, 2, 3], [], [4, 99, 5], [99])
    check_tokens(tokens, 100)
    for chunk_tokens in (1, 2, 1 << 24):
        with pytest.raises(ValueError, match=r"token 99 at offset 1 of document 'doc2'.*vocab_size=99 allows 0 to 98"):
            check_tokens(tokens, 99, chunk_tokens)
    check_tokens(make_tokens([255], dtype=np.uint8), 256)
    with pytest.raises(ValueError, match="token 255 at offset 0"):
        check_tokens(make_tokens([255], dtype=np.uint8), 255)
    with pytest.raises(ValueError, match="vocab_size=0"):
        check_tokens(tokens, 0)


@pytest.mark.parametrize(
    "tokens, starts, names, message",
    [
        (np.zeros(3, np.int32), [0, 3], "a", "int32"),
        (np.zeros((1, 3), np.uint8), [0, 3], "a", r"uint8\[1, 3\]"),
        (np.zeros(3, np.uint8), [0, 3], "ab", "2 offsets for 2 names; pass 3"),
        (np.zeros(3, np.uint8), [0, 2], "a", "from 0 to 2 over 3 tokens"),
        (np.zeros(3, np.uint8), [1, 3], "a", "from 1 to 3"),
        (np.zeros(3, np.uint8), [0, 2, 1, 3], "abc", r"decreases from 2 to 1 at document 1 \('b'\)"),
    ],
)
def test_tokens_that_do_not_fit_together_are_refused(tokens, starts, names, message):
    with pytest.raises(ValueError, match=message):
        Tokens(tokens, np.array(starts, np.int64), tuple(names))


def test_starts_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match="int32"):
        Tokens(np.zeros(3, np.uint8), np.array([0, 3], np.int32), ("a",))
