"""`python -m moex.data tokenize|show|verify`: writes a corpus, says what one holds, compares its files with its index."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from moex.data import open_shards
from moex.data.documents import read_documents
from moex.data.index import read_index
from moex.data.shards import verify
from moex.data.tokenize import write_corpus
from moex.data.tokenizers import Bytes, FromFile, Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenize:
    """Writes text as a corpus that `--data.corpus` reads: memory-mapped shards and an index."""

    inputs: tyro.conf.Positional[tuple[Path, ...]]
    """Files or folders: .jsonl, .jsonl.gz, .ndjson, .parquet; any other file is one document."""
    out: str
    """Folder to write, local or gs://, s3://, az://, hf://."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face tokenizer.json."""
    end_token: str = ""
    """Token of tokenizer.json that ends every document, such as <|endoftext|>; none otherwise."""
    field: str = "text"
    """Where records have their text."""
    prompt_field: str = ""
    """Where records have a prompt, which precedes the text and is not learned."""
    held_out: float = 0.005
    """Share of documents kept for evaluation."""
    shard_tokens: int = 1 << 28
    """A shard ends at the first document that brings it to this many tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Show:
    """Says what a corpus holds."""

    corpus: tyro.conf.Positional[str]
    """Its folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify:
    """Reads all of a corpus and compares it with the digests in its index; exit code 1 when something differs."""

    corpus: tyro.conf.Positional[str]
    """Its folder."""


_COMMANDS = (
    Annotated[Tokenize, tyro.conf.subcommand("tokenize")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 2 with the reason when inputs or arguments don't fit."""
    command = tyro.cli(_COMMANDS, args=arguments, prog="python -m moex.data")
    try:
        if isinstance(command, Tokenize):
            _tokenize(command)
            return 0
        if isinstance(command, Show):
            print(summary(command.corpus))
            return 0
        problems = list(verify(command.corpus))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(problems) if problems else f"{command.corpus}: every file is as it was written")
    return 1 if problems else 0


def _tokenize(command: Tokenize) -> None:
    documents = read_documents(command.inputs, command.field, command.prompt_field)
    write_corpus(
        documents, command.out, _tokenizer(command), held_out=command.held_out, shard_tokens=command.shard_tokens,
        prompts=bool(command.prompt_field),
    )  # fmt: skip
    print(summary(command.out))


def _tokenizer(command: Tokenize) -> Tokenizer:
    if command.tokenizer == Bytes.name:
        if command.end_token:
            raise ValueError(f"--end-token {command.end_token} has no effect with --tokenizer bytes, where byte 0 ends")
        return Bytes()
    path = Path(command.tokenizer)
    if not path.is_file():
        raise ValueError(f"--tokenizer {path}: no such file; give `bytes` or the path of a tokenizer.json")
    return FromFile(path.read_text("utf-8"), command.end_token, path.name)


def summary(location: str) -> str:
    """What a corpus holds, in lines."""
    index, corpus = read_index(location), open_shards(location)
    lines = [f"{location}: {index['dtype']}, {index['vocab_size']:,} ids by {corpus.tokenizer.name}"]
    for name, split in (("train", corpus.train), ("held out", corpus.held_out)):
        if split.num_tokens:
            sizes = f"{split.num_tokens:,} tokens in {split.num_documents:,} documents, {len(split.shards)} shards"
            lines.append(f"{name:>9}  {sizes}, {split.num_bytes / split.num_tokens:.2f} bytes a token")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
