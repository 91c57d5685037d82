"""Text to shards and back: what is written is what was read, wherever it lies, and what was changed is told."""

import gzip
import json
import shutil

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tokenizers import Tokenizer, models, pre_tokenizers

from moex.data import Batches, Packed, Tokens, Windows, check_mixture, open_corpus, unigram_entropy
from moex.data.__main__ import main
from moex.data.documents import read_documents
from moex.data.index import read_index
from moex.data.tokenize import write_corpus
from moex.data.tokenizers import Bytes, FromFile

TEXTS = ["naïve π\n", "second", "a third, longer document", "second"]
WORDS = {"[UNK]": 0, "a": 1, "b": 2, "c": 3, "<end>": 4}


def write(folder, texts=TEXTS, **options):
    """A corpus of texts, or of (prompt, text)."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [dict(prompt=t[0], text=t[1]) if isinstance(t, tuple) else dict(text=t) for t in texts]
    lines = folder / "documents.jsonl"
    lines.write_text("\n".join(map(json.dumps, records)))
    out = str(folder / "corpus")
    prompted = isinstance(texts[0], tuple)
    documents = read_documents([lines], prompt_field="prompt" if prompted else "")
    write_corpus(documents, out, options.pop("tokenizer", Bytes()), prompts=prompted, **options)
    return out


def documents_of(split):
    return [
        shard.tokens[a:b].tolist()
        for shard in split.shards
        for a, b in zip(shard.starts[:-1], shard.starts[1:], strict=True)
    ]


def words(**options) -> FromFile:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return FromFile(tokenizer.to_str(), **options)


def test_documents_are_the_bytes_of_their_texts_with_an_end(tmp_path):
    corpus = open_corpus(write(tmp_path))
    assert documents_of(corpus.train) == [[*text.encode(), 0] for text in TEXTS]
    assert corpus.train.num_bytes == sum(len(text.encode()) for text in TEXTS)
    (shard,) = corpus.train.shards
    assert not shard.tokens.flags.owndata and not shard.tokens.flags.writeable and shard.tokens.dtype == np.uint8
    np.testing.assert_array_equal(corpus.train.counts_V, np.bincount(shard.tokens, minlength=256))
    assert unigram_entropy(shard.tokens) > 0 and corpus.held_out.num_tokens == 0


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "parquet"])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, kind):
    inputs, records = tmp_path / "in", [dict(text=text, other=1) for text in TEXTS]
    inputs.mkdir()
    lines = "\n".join(map(json.dumps, records)).encode()
    if kind == "txt":
        for i, text in enumerate(TEXTS):
            (inputs / f"{i}.txt").write_text(text)
    elif kind == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(records), inputs / "rows.parquet")
    else:
        (inputs / f"lines.{kind}").write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    assert [document.text for document in read_documents([inputs])] == TEXTS


def test_a_tokenizer_file_sets_ids_end_and_width(tmp_path):
    tokenizer = words(end_token="<end>")
    corpus = open_corpus(write(tmp_path, ["a b c", "c x"], tokenizer=tokenizer))
    assert documents_of(corpus.train) == [[1, 2, 3, 4], [3, 0, 4]]
    assert corpus.tokenizer.vocab_size == len(WORDS) and corpus.tokenizer.digest == tokenizer.digest
    assert corpus.tokenizer.decode([1, 2, 99, 4]) == "a b\N{REPLACEMENT CHARACTER}<end>"
    assert corpus.tokenizer.encode(["b a"])[0].tolist() == [2, 1]
    with pytest.raises(ValueError, match="has no token '<eos>'"):
        words(end_token="<eos>")


@pytest.mark.parametrize(("size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_ids_take_no_more_bytes_than_the_vocabulary_needs(tmp_path, size, dtype):
    class Wide(Bytes):
        vocab_size = size

    assert read_index(write(tmp_path, tokenizer=Wide()))["dtype"] == dtype


def test_shards_together_are_the_corpus(tmp_path):
    one = open_corpus(write(tmp_path / "one"))
    many = open_corpus(write(tmp_path / "many", shard_tokens=1))
    assert len(many.train.shards) == len(TEXTS)
    assert documents_of(many.train) == documents_of(one.train)
    ids = lambda corpus: np.concatenate(
        [
            b["tokens"][b["segments"] > 0]
            for b in Batches(
                [Windows(corpus.train.shards, 4)], rows=1, accumulation=1, seed=0, shuffle=False
            ).eval_batches()
        ]
    )
    np.testing.assert_array_equal(ids(one), ids(many))


def test_copies_of_a_document_stay_on_one_side_of_the_split(tmp_path):
    texts = [f"document {i % 50}" for i in range(200)]
    corpus = open_corpus(write(tmp_path, texts, held_out=0.3))
    train, held_out = ({tuple(d) for d in documents_of(split)} for split in (corpus.train, corpus.held_out))
    assert not train & held_out and len(train | held_out) == 50
    assert 5 <= len(held_out) <= 25


def test_prompts_are_read_but_not_learned(tmp_path):
    corpus = open_corpus(write(tmp_path, [("ask ", "say"), ("", "free")]))
    row = {name: array[0, 0] for name, array in packed(corpus, 16).batch(0).items()}
    told = bytes(row["labels"][row["mask"]].astype(np.uint8))
    assert sorted(told.split(b"\0")) == sorted([b"say", b"ree", b""])  # nobody predicts a document's first token


def packed(corpus, seq_len):
    return Batches([Packed(corpus.train.shards, seq_len)], rows=1, accumulation=1, seed=0)


@pytest.fixture
def remote(monkeypatch):
    """An s3:// that lies in memory."""
    fsspec.register_implementation("s3", MemoryFileSystem, clobber=True)
    fsspec.filesystem("s3").store.clear()
    yield "s3://bucket/corpus"
    fsspec.filesystem("s3").store.clear()


def test_a_remote_corpus_reads_as_a_local_one(tmp_path, remote):
    texts = [(f"ask {i} ", "answer " * (i % 5 + 1)) for i in range(40)]
    local = open_corpus(write(tmp_path, texts))
    documents = read_documents([tmp_path / "documents.jsonl"], prompt_field="prompt")
    write_corpus(documents, remote, Bytes(), prompts=True)
    far = open_corpus(remote)
    assert far.fingerprint == local.fingerprint
    assert not isinstance(far.train.shards[0].tokens, np.ndarray)
    for step in range(5):
        ours, theirs = packed(far, 64).batch(step), packed(local, 64).batch(step)
        assert all((ours[name] == theirs[name]).all() for name in ours)
    assert main(["verify", remote]) == 0


def test_the_command_writes_shows_and_verifies(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello\n")
    out = str(tmp_path / "corpus")
    assert main(["tokenize", str(tmp_path / "a.txt"), "--out", out, "--held-out", "0"]) == 0
    assert "7 tokens in 1 documents, 1 shards" in capsys.readouterr().out
    assert main(["verify", out]) == 0
    path = tmp_path / "corpus" / "train-00000.tokens"
    path.write_bytes(b"jello" + path.read_bytes()[5:])
    assert main(["verify", out]) == 1
    assert f"{path} has sha256" in capsys.readouterr().out
    assert main(["show", str(tmp_path)]) == 2
    assert "has no index.json" in capsys.readouterr().err


REFUSED = {
    "missing": (["nowhere.txt"], "nowhere.txt does not exist"),
    "field": (["lines.jsonl", "--field", "body"], "lines.jsonl, line 1: no text under 'body'; it has text"),
    "json": (["broken.jsonl"], "broken.jsonl, line 2: not JSON"),
    "bytes": (["latin.txt"], "latin.txt is not UTF-8"),
    "surrogate": (["half.jsonl"], "half.jsonl, line 1: 'text' holds half a surrogate pair"),
    "end": (["lines.jsonl", "--end-token", "<end>"], "--end-token <end> has no effect with --tokenizer bytes"),
    "tokenizer": (["lines.jsonl", "--tokenizer", "gpt2"], "--tokenizer gpt2: no such file"),
    "no tokenizer": (["lines.jsonl", "--tokenizer", "lines.jsonl"], "lines.jsonl is no tokenizer file"),
    "prompt": (["latin.txt", "--prompt-field", "p"], "latin.txt is plain text, which has no field 'p'"),
    "empty": (["blank.txt"], "no document with text is left to train on"),
    "share": (["lines.jsonl", "--held-out", "1"], "held_out=1.0 must be at least 0 and below 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_inputs_that_do_not_fit_exit_with_2_and_the_place(run_folder, capsys, case):
    (run_folder / "lines.jsonl").write_text('{"text": "x"}')
    (run_folder / "broken.jsonl").write_text('{"text": "x"}\n{"text"')
    (run_folder / "half.jsonl").write_text('{"text": "\\ud800"}')
    (run_folder / "latin.txt").write_bytes(b"caf\xe9")
    (run_folder / "blank.txt").write_text(" \n")
    arguments, message = REFUSED[case]
    assert main(["tokenize", *arguments, "--out", "out"]) == 2
    assert message in capsys.readouterr().err
    assert not (run_folder / "out" / "index.json").exists()


def test_a_folder_is_not_written_twice(tmp_path):
    out = write(tmp_path)
    with pytest.raises(ValueError, match="holds a corpus already"):
        write_corpus(read_documents([tmp_path / "documents.jsonl"]), out, Bytes())


def test_what_does_not_fit_the_index_is_named(tmp_path):
    out = write(tmp_path)
    path = tmp_path / "corpus" / "train-00000.tokens"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"train-00000.tokens has 49 bytes, the index says 50 \(50 of uint8\)"):
        open_corpus(out)
    path.unlink()
    with pytest.raises(ValueError, match=r"train-00000.tokens is missing"):
        open_corpus(out)
    index = tmp_path / "corpus" / "index.json"
    index.write_text(index.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="is of format 2, this version reads 1"):
        open_corpus(out)


def test_a_mixture_is_checked_before_it_is_trained_on(tmp_path):
    one, other = open_corpus(write(tmp_path / "one")), open_corpus(write(tmp_path / "other", ["else"]))
    check_mixture([one, other], 256)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    copy = open_corpus(str(tmp_path / "copy" / "corpus"))
    with pytest.raises(ValueError, match=r"copy/corpus/train-00000.tokens holds the same tokens as .*one/corpus/train"):
        check_mixture([one, copy], 256)
    with pytest.raises(ValueError, match="another tokenizer"):
        check_mixture([one, open_corpus(write(tmp_path / "words", ["a"], tokenizer=words()))], 256)
    with pytest.raises(
        ValueError, match=r"token 195 at offset 2 of document 'number 0' \(token 2 of .*train-00000.tokens\)"
    ):
        check_mixture([one], 128)


def test_learned_flags_must_be_as_many_as_tokens():
    with pytest.raises(ValueError, match="2 entries for 3 tokens"):
        Tokens(np.zeros(3, np.uint8), np.array([0, 3]), ("a",), np.ones(2, np.uint8))
