"""The project's own machinery: versions, the search for a Python, the documents' commands, the import rules."""

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from docs import step_diagram
from scripts import run_doc_commands as docs

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {extra: [Requirement(text) for text in texts] for extra, texts in PROJECT["optional-dependencies"].items()}
CORE = [Requirement(text) for text in PROJECT["dependencies"]]


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"==[^*]+", str(pin.specifier)) for pin in parsed), "a pin is one exact version"
    return {canonicalize_name(pin.name): Version(str(pin.specifier).removeprefix("==")) for pin in parsed}


# --- versions


PINNED = [*CORE, *(one for extra in ("data", "eval", "hf", "dev", "track") for one in EXTRAS[extra])]


@pytest.mark.parametrize("requirement", PINNED, ids=lambda requirement: requirement.name)
def test_each_dependency_is_pinned_within_its_range(requirement):
    assert pins()[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_pins_close_over_what_is_installed():
    """Every installed package that a pinned one needs is pinned, too: nothing floats."""
    from importlib.metadata import PackageNotFoundError, requires

    floating = set()
    for name in pins():
        try:
            needed = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:  # an extra that this environment lacks
            continue
        # Without an extra's name every `extra == ...` marker is false.
        active = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
        floating |= {canonicalize_name(one.name) for one in active} - set(pins())
    assert not floating


def test_constraints_name_versions_only():
    text = (ROOT / "constraints.txt").read_text()
    assert not re.search(r"https?:|file:|^-|@ ", text, flags=re.MULTILINE)


def test_cuda_extra_asks_for_the_same_jax_as_the_core():
    core_jax = next(one for one in CORE if one.name == "jax")
    (cuda,) = EXTRAS["cuda"]
    assert cuda.name == "jax"
    assert cuda.extras == {"cuda13"}
    assert cuda.specifier == core_jax.specifier


def test_jax_range_holds_the_floor_that_ci_runs():
    floor = re.search(r"^FLOOR_JAX=(\S+)$", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE)
    core_jax = next(one for one in CORE if one.name == "jax")
    assert floor
    assert f">={floor[1]}" in str(core_jax.specifier)


# --- the search for a Python


def write_python(path: Path, version: str | None) -> Path:
    """A stand-in interpreter: reports `version` as the real one would, or fails as a shim without a version does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if version is None:
        body = "echo 'no version selected' >&2; exit 127"
    else:
        major, minor = version.split(".")
        # Runs the program that it is given on this Python, under the stand-in's version and path.
        body = (
            f'program=$(cat); shift; exec "{sys.executable}" -c "import sys\n'
            f"sys.version_info = ({major}, {minor}, 0, 'final', 0); sys.executable = '{path}'\n"
            "sys.argv = ['-'] + sys.argv[1:]\n"
            '$program" "$@"'
        )
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def find_python(tmp_path):
    """Runs the search where only the stand-ins in bin/ and home/.pyenv exist, beside a shell's own tools."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "bin" / "cat").symlink_to(shutil.which("cat"))

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["/bin/sh", str(ROOT / "scripts/find_python.sh"), *arguments],
            env={"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home"), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_python_newest_on_path_is_taken(find_python, tmp_path):
    write_python(tmp_path / "bin/python3.12", "3.12")
    newest = write_python(tmp_path / "bin/python3.13", "3.13")
    assert find_python().stdout.strip() == str(newest)


def test_python_shim_that_fails_is_passed_over(find_python, tmp_path):
    write_python(tmp_path / "bin/python3.13", None)
    write_python(tmp_path / "bin/python3", "3.11")
    suitable = write_python(tmp_path / "home/.pyenv/versions/3.12.1/bin/python", "3.12")
    write_python(tmp_path / "home/.pyenv/versions/3.9.18/bin/python", "3.9")
    assert find_python().stdout.strip() == str(suitable)


def test_python_pyenv_root_is_honoured(find_python, tmp_path):
    suitable = write_python(tmp_path / "elsewhere/versions/3.13.0/bin/python", "3.13")
    assert find_python(PYENV_ROOT=str(tmp_path / "elsewhere")).stdout.strip() == str(suitable)


def test_python_one_version_can_be_asked_for(find_python, tmp_path):
    write_python(tmp_path / "bin/python3.13", "3.13")
    wanted = write_python(tmp_path / "bin/python3.12", "3.12")
    assert find_python("3.12").stdout.strip() == str(wanted)
    assert find_python("3.14").returncode == 2


@pytest.mark.parametrize("version", ["3.11", "3.15"])
def test_python_unsuitable_ends_with_what_to_install(find_python, tmp_path, version):
    write_python(tmp_path / "bin/python3", version)
    result = find_python()
    assert result.returncode == 2
    assert result.stdout == ""
    assert "moex needs Python 3.12" in result.stderr
    assert "apt install" in result.stderr


def test_python_named_by_the_user_is_used_or_refused(find_python, tmp_path):
    write_python(tmp_path / "bin/python3.13", "3.13")
    old = write_python(tmp_path / "old/python", "3.11")
    mine = write_python(tmp_path / "mine/python", "3.12")
    assert find_python(PYTHON=str(mine)).stdout.strip() == str(mine)
    refused = find_python(PYTHON=str(old))
    assert refused.returncode == 2
    assert str(old) in refused.stderr


def test_make_passes_the_searchs_status_on(tmp_path):
    """`make test` without any Python: the message, and no environment left behind."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("make", "sh", "cat", "cksum", "dirname", "date", "ls", "rm", "sed", "cp"):
        (tools / tool).symlink_to(shutil.which(tool))
    result = subprocess.run(
        [shutil.which("make"), "test"],
        cwd=tmp_path,
        env={"PATH": str(tools), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "moex needs Python 3.12" in result.stderr
    assert not (tmp_path / ".venv").exists()


# --- the documents' commands

PAGE = """# Title

```sh
echo one
false
```

```python
print("not a command")
```

````text
```sh
echo shown, not run
```
````

```sh no-run
sbatch job.sh
```

1. In a list:

   ```sh timeout=7
   echo two
   ```
"""


def test_docs_blocks_are_found_with_their_lines():
    blocks = list(docs.find_blocks(PAGE, "page.md"))
    assert [(block.line, block.text, block.runnable) for block in blocks] == [
        (4, "echo one\nfalse", True),
        (19, "sbatch job.sh", False),
        (25, "echo two", True),
    ]
    assert blocks[2].timeout_s == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```bash\nls\n```", "page.md:1: write sh"),
        ("\n```sh norun\nls\n```", "page.md:2: unknown word 'norun'"),
        ("```sh\nls\n", "page.md:1: this fence is never closed"),
        ("```sh\npip install -e .\n```", "page.md:1: pip would install"),
    ],
)
def test_docs_convention_is_enforced(text, message):
    with pytest.raises(docs.DocumentError, match=re.escape(message)):
        list(docs.find_blocks(text, "page.md"))


def run_page(tmp_path: Path, text: str, **options) -> str | None:
    results = (
        docs.run_block(block, tmp_path, dict(os.environ), **options) for block in docs.find_blocks(text, "page.md")
    )
    return next((message for message in results if message), None)


def test_docs_failing_command_is_named_by_file_and_line(tmp_path):
    message = run_page(tmp_path, PAGE)
    assert message
    assert message.startswith("page.md:5: exit status 1: false")
    assert "one" in message


def test_docs_blocks_share_a_folder(tmp_path):
    assert run_page(tmp_path, "```sh\necho 3 > made\n```\n\n```sh\ntest $(cat made) = 3\n```\n") is None


def test_docs_block_that_hangs_is_ended(tmp_path):
    message = run_page(tmp_path, "```sh timeout=1\nsleep 60\n```\n")
    assert message
    assert message.startswith("page.md:2: not finished after 1 s")


def test_docs_block_that_is_not_run_must_be_valid_shell(tmp_path):
    message = run_page(tmp_path, "\n```sh no-run\nif true; then\n```\n")
    assert message
    assert message.startswith("page.md:3: not valid shell")


def test_docs_commands_already_run_are_passed_over(tmp_path):
    assert run_page(tmp_path, "```sh\nfalse\ntrue\n```\n", already_run=["false"]) is None


def test_docs_drawing_of_the_step_is_what_its_script_draws():
    assert (ROOT / "docs/step.svg").read_text() == step_diagram.draw(), "run docs/step_diagram.py"


def test_docs_of_this_checkout_follow_the_convention():
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        list(docs.find_blocks(path.read_text(), path.name))


# --- who imports whom


@pytest.fixture
def lint(tmp_path):
    """A project of empty modules under this project's contracts; lints it with one import added to one module."""
    shutil.copy(ROOT / ".importlinter", tmp_path)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/import_contracts.py", tmp_path / "scripts")
    packages = ("moex", "moex/models", "moex/dispatch", "moex/precision", "mesh", "pallas_kernels", "configs")
    modules = ("moex/trainer", "moex/cli", "moex/config", "moex/data", "moex/layers", "moex/train")
    for name in packages:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    for name in (*modules, "moex/models/families", "moex/models/decoder", "configs/qwen3", "mesh/fold"):
        (tmp_path / f"{name}.py").touch()

    def run(importer: str, imported: str) -> subprocess.CompletedProcess:
        (tmp_path / importer).write_text(f"import {imported}\n")
        return subprocess.run(
            [Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("moex/trainer.py", "moex.data"),
        ("moex/data.py", "moex.models"),
        ("moex/cli.py", "configs.qwen3"),
        ("configs/qwen3.py", "moex.models.families"),
        ("moex/dispatch/__init__.py", "mesh.fold"),
        ("mesh/fold.py", "jax.numpy"),
    ],
)
def test_imports_that_point_down_are_kept(lint, importer, imported):
    result = lint(importer, imported)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("moex/data.py", "moex.trainer"),
        ("moex/layers.py", "moex.models"),
        ("moex/dispatch/__init__.py", "moex.precision"),
        ("moex/config.py", "mesh"),
        ("mesh/fold.py", "pallas_kernels"),
        ("pallas_kernels/__init__.py", "mesh.fold"),
        ("mesh/fold.py", "moex.config"),
        ("mesh/fold.py", "flax"),
        ("pallas_kernels/__init__.py", "optax"),
        ("moex/trainer.py", "configs"),
        ("configs/qwen3.py", "moex.models.decoder"),
        ("configs/qwen3.py", "jax"),
        ("moex/data.py", "train"),
        ("moex/stray.py", "os"),
    ],
)
def test_imports_that_do_not_are_refused(lint, importer, imported):
    result = lint(importer, imported)
    assert result.returncode == 1
    assert "BROKEN" in result.stdout


SCRIPTS = [path for folder in ("benchmarks", "docs", "scripts") for path in sorted((ROOT / folder).glob("*.py"))]
OWN = {"benchmarks", "configs", "docs", "mesh", "moex", "pallas_kernels", "scripts", "tests", "train"}


@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if "__main__" in path.read_text()], ids=lambda path: path.stem
)
def test_a_script_finds_the_project_wherever_it_is_called_from(path):
    """Python puts a script's own folder on its path, not the root: a script that imports the project adds the root first."""
    body = ast.parse(path.read_text()).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom | ast.Import)]
    names = lambda node: [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
    own = [node.lineno for node in imports if any(name.partition(".")[0] in OWN for name in names(node))]
    adds = [node.lineno for node in body if "sys.path" in ast.unparse(node)]
    assert not own or (adds and adds[0] < own[0])
