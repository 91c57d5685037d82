"""The training step of a configuration, compiled for GPUs that this machine need not have.

`compile_step` starts a child process in an environment with JAX's CUDA plugin (`scripts/setup_aot.sh`): beside the plugin
every CPU run prints warnings, and a process compiles for one GPU architecture only. `python -m moex.plan.compiled` is that
child.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from moex.cli import dump, load
from moex.config import RunConfig
from moex.train.program import build
from moex.validate import check, check_on, resolve_fold

_ROOT = Path(__file__).resolve().parents[2]


class CompileError(RuntimeError):
    """A step that could not be compiled; the message has what the compiler said."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """argument_bytes, temporary_bytes, peak_bytes: of one GPU's memory.  host_bytes: of its host's, of which
    host_argument_bytes are there between steps.  alias_bytes: results that are written over arguments.  text: the scheduled
    module (HLO).  thunks: what is run of it, in order, as XLA lists it, CUDA graphs (command buffers) among it.  live: XLA's
    list of the arrays that are alive when most memory is.  log: what the compiler has warned of.  compile_s: seconds of
    lowering and compiling.
    """

    argument_bytes: int
    temporary_bytes: int
    peak_bytes: int
    host_bytes: int
    alias_bytes: int
    text: str
    thunks: str
    live: str
    log: str
    compile_s: float
    host_argument_bytes: int = 0


def compile_step(
    config: RunConfig,
    num_gpus: int,
    target: str,
    *,
    python: str | Path,
    gpus_per_host: int = 8,
    timeout_s: float = 1800,
) -> CompiledStep:
    """Compiles the step for `num_gpus` GPUs.

    Args:
      target: text of the GPU's description (a `xla.GpuTargetConfigProto`).
      python: interpreter of the environment with the compile-only packages.

    Raises ConfigError when the configuration doesn't fit the GPUs; CompileError with the compiler's text.
    """
    check(config)
    check_on(config, resolve_fold(config.parallel, num_gpus))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(dump(config))
        (folder / "target").write_text(target)
        environment = os.environ | dict(PYTHONPATH=str(_ROOT), JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="0")
        environment["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_module_re=.*step.*"
        command = [str(python), "-m", "moex.plan.compiled", name, str(num_gpus), str(gpus_per_host)]
        try:
            done = subprocess.run(
                command, env=environment, cwd=name, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise CompileError(f"not compiled within {timeout_s:.0f} s") from error
        if done.returncode:
            raise CompileError(f"exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
        numbers = json.loads((folder / "numbers.json").read_text())
        live = _dumped(folder, "-live-range.txt").partition("Stack trace breakdown")[2]
        passed = any(folder.glob("*.thunk_sequence_after_thunk_passes.txt"))  # not where no CUDA graphs are wanted
        thunks = _dumped(folder, ".thunk_sequence_after_thunk_passes.txt" if passed else ".thunk_sequence.txt")
        text = (folder / "module").read_text()
        return CompiledStep(text=text, thunks=thunks, live=live, log=done.stderr[-20_000:], **numbers)


def _dumped(folder: Path, ending: str) -> str:
    """The largest dump with this ending: a program may be dumped beside small helpers of the same name."""
    found = sorted(folder.glob(f"*{ending}"), key=lambda path: path.stat().st_size)
    if not found:
        raise CompileError(f"the compiler has dumped no *{ending}")
    return found[-1].read_text(errors="replace")


def _child(folder: Path, num_gpus: int, gpus_per_host: int) -> None:
    from jax.experimental import topologies

    config = load(folder / "config.json")
    fold = resolve_fold(config.parallel, num_gpus)
    hosts = -(-num_gpus // gpus_per_host)
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=(folder / "target").read_text(),
        topology=f"1x{hosts}x{min(num_gpus, gpus_per_host)}",
    )
    mesh = topologies.make_mesh(topology, fold.shape, fold.names)
    program = build(config, fold, mesh=mesh)
    began = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = program.train.lower(program.state, program.batch).compile()
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    parked = memory.host_argument_size_in_bytes
    numbers = dict(
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes - parked,  # XLA counts arguments whatever memory they are in
        host_bytes=memory.host_temp_size_in_bytes + parked,
        host_argument_bytes=parked,
        alias_bytes=memory.alias_size_in_bytes + memory.host_alias_size_in_bytes,
        compile_s=seconds,
    )
    (folder / "module").write_text(compiled.as_text())
    (folder / "numbers.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    _child(Path(sys.argv[1]), *map(int, sys.argv[2:]))
