"""Corpora and inputs that were damaged, cut off or made up: each is refused with a reason, and nothing half written stays."""

import gzip
import json

import numpy as np
import pytest

from moex.data import Packed, Windows, check_mixture, open_corpus
from moex.data.__main__ import main, summary
from moex.data.shards import verify
from tests.odd import changed


@pytest.fixture
def corpus(tmp_path):
    """A corpus of three shards and held-out documents."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02}.txt").write_text(f"hello world {number}\n" * 5)
    out = tmp_path / "corpus"
    assert main(["tokenize", str(texts), "--out", str(out), "--held-out", "0.2", "--shard-tokens", "1000"]) == 0
    return out


def use(folder):
    """What a run does with a corpus before it trains.  Raises ValueError."""
    opened = open_corpus(str(folder))
    check_mixture([opened], 256)
    for split in (opened.train, opened.held_out):
        for kind in (Windows, Packed) if split.num_tokens else ():
            rows = kind(split.shards, 16)
            rows.read(np.arange(min(rows.num_rows, 4)))


def test_every_wrong_field_of_the_index_is_refused_or_harmless(corpus):
    index, reasons = json.loads((corpus / "index.json").read_text()), []
    for path, new in changed(index):
        (corpus / "index.json").write_text(json.dumps(new))
        for read in (lambda: list(verify(str(corpus))), lambda: summary(str(corpus)), lambda: use(corpus)):
            try:
                read()
            except ValueError as error:
                reasons.append((path, str(error)))
    assert len(reasons) > 1000 and all(text for _, text in reasons)
    told = [text for path, text in reasons if path == ("splits", "train", "counts", "file")]
    assert any("must be a plain file name" in text for text in told)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"\xff", b"[]", b"[" * 100_000, b'{"format": 1}', b'{"a": ' + b"1" * 5000 + b"}"]
)
def test_an_index_that_is_none_is_refused(corpus, capsys, raw):
    (corpus / "index.json").write_bytes(raw)
    assert main(["show", str(corpus)]) == main(["verify", str(corpus)]) == 2
    assert "index.json" in capsys.readouterr().err


def test_files_that_do_not_fit_the_index_are_named(corpus):
    for path in sorted(corpus.glob("*-*")) + sorted(corpus.glob("*.counts")):
        raw = path.read_bytes()
        for new in (b"", raw[:-1], raw + b"\0", None):
            path.unlink() if new is None else path.write_bytes(new)
            with pytest.raises(ValueError, match=path.name):
                use(corpus)
        for new in () if path.suffix == ".tokens" else (b"\xff" * len(raw), raw[::-1]):
            path.write_bytes(new)
            with pytest.raises(ValueError, match=r"Tokens.starts|doesn't count"):
                use(corpus)
        path.write_bytes(raw)
    use(corpus)


def test_an_id_outside_the_vocabulary_is_found_when_it_is_read(corpus):
    index = json.loads((corpus / "index.json").read_text()) | dict(vocab_size=128)
    (corpus / "index.json").write_text(json.dumps(index))
    for split in ("train", "held_out"):
        path = corpus / f"{split}.counts"
        path.write_bytes(path.read_bytes()[: 8 * 128])
    path = corpus / "train-00000.tokens"
    path.write_bytes(path.read_bytes()[:10] + b"\xc8" + path.read_bytes()[11:])
    with pytest.raises(ValueError, match=r"token 200 at offset 10 of document 'number 0' \(token 10 of .*train-00000"):
        use(corpus)


INPUTS = {
    "deep.jsonl": b'{"text": ' + b"[" * 100_000,
    "list.jsonl": b"[1]\n",
    "long.jsonl": b'{"text": ' + b"1" * 5000 + b"}",
    "no.jsonl.gz": b"no gzip",
    "cut.jsonl.gz": gzip.compress(b'{"text":"abc"}\n' * 1000)[:-20],
    "cut_late.jsonl.gz": gzip.compress(b"".join(b'{"text":"%d"}\n' % i for i in range(40_000)))[:-20],
}


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_cannot_be_read_leaves_nothing(tmp_path, capsys, name):
    """Whatever was read of it before: then it may have been written, too."""
    (tmp_path / name).write_bytes(INPUTS[name])
    out = tmp_path / "out"
    assert main(["tokenize", str(tmp_path / name), "--out", str(out)]) == 2
    assert name in capsys.readouterr().err and not out.exists()
    out.mkdir()
    (out / "notes").write_text("mine")
    assert main(["tokenize", str(tmp_path / name), "--out", str(out)]) == 2
    assert [path.name for path in out.iterdir()] == ["notes"]


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/none"])
def test_a_place_that_cannot_be_written_is_refused(tmp_path, monkeypatch, capsys, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    assert main(["tokenize", "file", "--out", out]) == 2
    assert "error: " in capsys.readouterr().err
