"""What every test runs under: 8 CPU devices, no silent promotion, full-precision products, no silent skip.

The environment is set before JAX is imported, so that a test's child processes inherit it.
`JAX_PLATFORMS=cuda` runs the tests marked needs_gpu, too; `scripts/setup_aot.sh` makes the environment in whose processes
those marked needs_aot compile (MOEX_AOT_PYTHON names another one's Python). Without they are left out, and the run says
how many.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    # A collective whose devices start 40 s apart ends the process; eight devices on two busy cores may need longer.
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICE_COUNT_FLAG}=8 {patience}".strip()
# Compiled programs of earlier runs. A size limit makes JAX lock the folder, which parallel workers need.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2 * 1024**3))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax
import pytest

from mesh.distributed import spare_threads
from pallas_kernels.sass import toolchain

spare_threads()  # before the first use of a device
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

HAVE_GPU = bool({"cuda", "gpu"} & set(os.environ["JAX_PLATFORMS"].split(",")))
AOT_PYTHON = Path(os.environ.get("MOEX_AOT_PYTHON", ROOT / ".venv-aot/bin/python"))
WANTING = {  # marker: what this run lacks, or ""
    "needs_gpu": "" if HAVE_GPU else "no GPU backend in JAX_PLATFORMS",
    "needs_aot": "" if toolchain(AOT_PYTHON) else "no compile-only CUDA packages: scripts/setup_aot.sh",
}


LONGEST = ("tests/train/", "tests/test_trainer.py", "tests/test_invariance.py", "tests/layers/", "tests/models/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out the tests that need what the run hasn't; files that take long come first, for workers to end together."""
    items.sort(key=lambda item: next((i for i, part in enumerate(LONGEST) if part in str(item.path)), len(LONGEST)))
    for item in items:
        for marker, lack in WANTING.items():
            if lack and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {lack}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many tests were left out for want of something, also when there were none."""
    skipped = terminalreporter.stats.get("skipped", [])
    for marker, lack in WANTING.items():
        number = sum(marker in report.keywords for report in skipped)
        told = f"{number} tests left out ({lack})" if lack else "run here, none left out"
        terminalreporter.write_line(f"{marker}: {told}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run in which no test ran: green must mean that something was tested."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    is_worker = hasattr(config, "workerinput")
    if is_worker or reporter is None or config.option.collectonly or session.exitstatus != pytest.ExitCode.OK:
        return
    if not any(reporter.stats.get(outcome) for outcome in ("passed", "xfailed")):
        reporter.write_line("\nno test ran: every test was skipped or deselected", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """The eight CPU devices, or the GPUs of a GPU run."""
    return jax.devices()


@pytest.fixture(scope="session")
def aot_python() -> Path:
    """Python of the compile-only environment; for tests marked needs_aot."""
    return AOT_PYTHON


@pytest.fixture(autouse=True, scope="module")
def forgotten_programs() -> Iterator[None]:
    """Drops a file's compiled programs after it: each maps pages of its own, and a process may have 65,530 mappings.

    Beyond that LLVM ends the process by a segmentation fault, some way into the suite.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is also the working folder: what a run leaves behind lands there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
