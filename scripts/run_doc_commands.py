"""Runs the shell commands that README.md and docs/*.md show, so that no documented command can go stale.

Every fence opened by ```sh is run; ```sh no-run is only checked for syntax; ```sh timeout=900 sets another limit in
seconds. The blocks of one document run in order in one fresh copy of the checkout, with the checkout's environment
first on PATH. The first failing block of a document ends that document and is reported as file:line.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TIMEOUT_S = 300
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>[^`]*)$")
OTHER_SHELLS = {"bash", "shell", "console", "shell-session", "zsh"}


@dataclass(frozen=True, kw_only=True)
class Block:
    """One ```sh fence: its commands, and the line of the document on which they begin (from 1)."""

    document: str
    line: int
    text: str
    runnable: bool = True
    timeout_s: float = DEFAULT_TIMEOUT_S


class DocumentError(ValueError):
    """A fence that the convention does not allow."""


def find_blocks(text: str, document: str) -> Iterator[Block]:
    """Yields the ```sh fences of a Markdown text.

    Raises: DocumentError for an unknown word after sh, another shell's name, or a fence that is never closed.
    """
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        number += 1
        if not opening:
            continue
        first = number
        while number < len(lines) and not _closes(lines[number], opening["ticks"]):
            number += 1
        if number == len(lines):
            raise DocumentError(f"{document}:{first}: this fence is never closed")
        body = [line.removeprefix(opening["indent"]) for line in lines[first:number]]
        number += 1
        language, *words = opening["info"].split() or [""]
        if language in OTHER_SHELLS:
            raise DocumentError(f"{document}:{first}: write sh, or sh no-run, in place of {language}")
        if language == "sh":
            yield _block(document, first + 1, body, words)


def _closes(line: str, ticks: str) -> bool:
    stripped = line.strip()
    return len(stripped) >= len(ticks) and set(stripped) == {ticks[0]}


def _block(document: str, line: int, body: list[str], words: list[str]) -> Block:
    runnable, timeout_s = True, float(DEFAULT_TIMEOUT_S)
    for word in words:
        if word == "no-run":
            runnable = False
        elif match := re.fullmatch(r"timeout=(\d+)", word):
            timeout_s = float(match[1])
        else:
            raise DocumentError(f"{document}:{line - 1}: unknown word {word!r}; known are no-run and timeout=SECONDS")
    text = "\n".join(body)
    if runnable and "pip install" in text and "-m venv" not in text:
        raise DocumentError(
            f"{document}:{line - 1}: pip would install into the environment of the checkout; "
            "make a new one in the same block (python -m venv), or mark the block no-run"
        )
    return Block(document=document, line=line, text=text, runnable=runnable, timeout_s=timeout_s)


def script_of(block: Block, already_run: Iterable[str] = ()) -> str:
    """A bash script whose line numbers are the document's, so that bash itself names the right line.

    Commands in `already_run` become empty lines.
    """
    skipped = set(already_run)
    commands = ["" if line.strip() in skipped else line for line in block.text.split("\n")]
    # A block begins on line 2 or later (its fence stands above it): line 1 is free for the prologue.
    prologue = "set -eEuo pipefail; trap 'echo \"@failed $LINENO $BASH_COMMAND\" >&2' ERR"
    return "\n".join([prologue, *[""] * (block.line - 2), *commands]) + "\n"


def run_block(block: Block, folder: Path, environment: dict[str, str], already_run: Iterable[str] = ()) -> str | None:
    """Runs one block; None when all its commands succeed, else one message that starts with file:line."""
    script = folder / ".doc_commands.sh"
    script.write_text(script_of(block, already_run))
    syntax = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    if syntax.returncode:
        return f"{block.document}:{block.line}: not valid shell: {syntax.stderr.strip()}"
    if not block.runnable:
        return None
    process = subprocess.Popen(
        ["bash", str(script)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=block.timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return f"{block.document}:{block.line}: not finished after {block.timeout_s:.0f} s\n{_tail(output)}"
    if process.returncode == 0:
        return None
    # The trap also fires in the shells around a failing command: the first report is the innermost.
    failed = re.search(r"^@failed (\d+) (.*)$", output, flags=re.MULTILINE)
    line, command = (int(failed[1]), failed[2]) if failed else (block.line, block.text)
    return f"{block.document}:{line}: exit status {process.returncode}: {command}\n{_tail(output)}"


def _tail(output: str, num_lines: int = 30) -> str:
    lines = [line for line in output.splitlines() if not line.startswith("@failed ")]
    return "\n".join(f"    {line}" for line in lines[-num_lines:])


def copy_checkout(root: Path, target: Path) -> None:
    """Copies what git tracks, and what it neither tracks nor ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


def environment_for(root: Path) -> dict[str, str]:
    """The caller's environment with the checkout's Python first; `make` in the copy uses that environment, too."""
    environment = dict(os.environ)
    venv = Path(sys.prefix)
    environment |= {
        "PATH": f"{venv / 'bin'}{os.pathsep}{environment.get('PATH', '')}",
        "VIRTUAL_ENV": str(venv),
        "VENV": str(venv),
    }
    environment.pop("PYTHON", None)
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(root / ".jax_cache"))
    environment.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2 * 1024**3))
    return environment


def run_document(path: Path, root: Path, already_run: Iterable[str] = ()) -> str | None:
    """Runs a document's blocks in one copy of the checkout; None or the message of the first that fails."""
    document = str(path.relative_to(root))
    blocks = list(find_blocks(path.read_text(), document))
    if not blocks:
        return None
    with tempfile.TemporaryDirectory(prefix="moex-docs-") as folder:
        copy_checkout(root, Path(folder))
        for block in blocks:
            started = time.monotonic()
            if message := run_block(block, Path(folder), environment_for(root), already_run):
                return message
            state = f"{time.monotonic() - started:.0f} s" if block.runnable else "not run, syntax checked"
            print(f"{block.document}:{block.line}: {block.text.strip().splitlines()[0]} ({state})", flush=True)
    return None


def main(arguments: list[str] | None = None) -> int:
    """Runs the documents named, or all of them; returns 1 when one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="*", type=Path, help="default: README.md and docs/*.md")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--already-run", action="append", default=[], help="a command line to pass over")
    parser.add_argument("--workers", type=int, default=1, help="documents run side by side")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    documents = [path.resolve() for path in options.documents] or [root / "README.md", *sorted(root.glob("docs/*.md"))]

    def run(path: Path) -> str | None:
        try:
            return run_document(path, root, options.already_run)
        except DocumentError as error:
            return str(error)

    failures = []
    with ThreadPoolExecutor(options.workers) as pool:
        for message in filter(None, pool.map(run, documents)):
            failures.append(message)
            print(message, file=sys.stderr, flush=True)
    if failures:
        print(f"{len(failures)} of {len(documents)} documents failed", file=sys.stderr)
        return 1
    print(f"{len(documents)} documents: every command ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
