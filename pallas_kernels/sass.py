"""What ptxas makes of a Mosaic GPU kernel, on a machine without a GPU: registers, spills, shared memory, instructions.

`inspect` compiles one case in a child process, for a described GPU. A process of its own, since Mosaic reads where to dump
once, keeps kernels that it has compiled, and compiles for one architecture only. The child's Python needs JAX's CUDA
plugin and NVIDIA's compiler packages, beside which CPU runs would print warnings: `make kernels` makes it an environment.
"""

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pallas_kernels.case import find

_ROOT = Path(__file__).resolve().parents[1]
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\S*\s.*`\((\.L_x_\d+)\)")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


class CompileError(RuntimeError):
    """A case that could not be compiled; the message has what the compiler said."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One compiled kernel.

    registers: of a thread, as the launch allocates them.  spill_bytes: stores and loads.  local_instructions: LDL and STL,
    which also count arrays indexed at run time.  shared_bytes: dynamic, with barriers.  tensor: tensor-core instructions
    by kind, e.g. QGMMA.64x128x32.F32.E4M3.E4M3.  loads, stores: bulk copies (UTMALDG, UTMASTG).  loop_tensor,
    loop_multiplies: tensor instructions and FFMA, FMUL, FADD in the innermost loop that has tensor instructions; their ratio
    is the promotion's price.  ptxas_s: seconds of ptxas.
    """

    kernel: str
    registers: int
    spill_bytes: int
    local_instructions: int
    shared_bytes: int
    tensor: dict[str, int]
    loads: int
    stores: int
    loop_tensor: int
    loop_multiplies: int
    ptxas_s: float


def toolchain(python: str | Path) -> Path | None:
    """The folder of ptxas, nvdisasm and cuobjdump in this interpreter's environment; None where it has none."""
    found = Path(python).parents[1].glob("lib/python3*/site-packages/nvidia/cu*/bin")
    tools = ("ptxas", "nvdisasm", "cuobjdump")
    return next((folder for folder in found if all((folder / tool).exists() for tool in tools)), None)


def inspect(specs: str, name: str, target: str, *, python: str | Path, timeout_s: float = 300) -> tuple[Report, ...]:
    """Compiles a case and reads every Mosaic kernel in it, in the order of their names.

    Args:
      specs: module with `production_cases`.  name: of the case.
      target: text of a GPU's description (a `xla.GpuTargetConfigProto`).
      python: interpreter of the environment with the compile-only packages.

    Raises CompileError with the compiler's text when lowering or ptxas refuses it or it holds no Mosaic kernel.
    """
    tools = toolchain(python)
    if tools is None:
        raise CompileError(f"{python} has no CUDA compiler packages (see scripts/setup_aot.sh)")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "target").write_text(target)
        dump = Path(folder) / "dump"
        dump.mkdir()
        environment = os.environ | dict(
            PATH=f"{tools}{os.pathsep}{os.environ.get('PATH', '')}",
            PYTHONPATH=str(_ROOT),
            JAX_PLATFORMS="cpu",
            JAX_ENABLE_COMPILATION_CACHE="0",  # a program from the cache wouldn't be compiled, hence not dumped
            MOSAIC_GPU_DUMP_TO=str(dump),
        )
        command = [str(python), "-m", "pallas_kernels.sass", specs, name, str(Path(folder) / "target")]
        try:
            done = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise CompileError(f"{name}: not compiled within {timeout_s:.0f} s") from error
        if done.returncode:
            raise CompileError(f"{name}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
        found = _read_all(dump)
    if not found:
        raise CompileError(f"{name} compiled, but no Mosaic kernel is in it")
    return found


def _read_all(dump: Path) -> tuple[Report, ...]:
    """Reports of all kernels dumped. Mosaic numbers its files; a kernel's number here counts those of the same name."""
    reports = []
    stems = sorted((path.stem for path in dump.glob("*.ptxas")), key=lambda stem: int(stem.rpartition("_")[2]))
    for stem in stems:
        name = stem.rpartition("_")[0]
        same = sum(report.kernel.partition(" ")[0] == name for report in reports)
        ptxas, sass = ((dump / f"{stem}.{ending}").read_text() for ending in ("ptxas", "sass_ctrl"))
        reports.append(parse(f"{name} {same + 1}" if same else name, ptxas, sass, _first_module(dump, stem)))
    return tuple(sorted(reports, key=lambda report: report.kernel))


def _first_module(dump: Path, stem: str) -> str:
    """The kernel's MLIR as it came in, up to its launch; the log goes on with every pass."""
    lines = []
    with (dump / f"{stem}.mlir-passes.log").open() as log:
        for line in log:
            lines.append(line)
            if "gpu.launch" in line:
                return "".join(lines)
    raise CompileError(f"{stem}: no launch in the compiler's log")


def parse(kernel: str, ptxas: str, sass: str, module: str) -> Report:
    """Reads ptxas' verbose report, the disassembly and the kernel's MLIR (for the shared memory that it launches with).

    Raises CompileError when one of them lacks what it should tell, so that a changed format is never taken for a zero.
    """

    def number(pattern: str, text: str) -> float:
        match = re.search(pattern, text)
        if match is None:
            raise CompileError(f"{kernel}: no {pattern!r} in the compiler's report")
        return float(match[1])

    instructions = _instructions(sass)
    operations = [operation for _, operation, _ in instructions]
    if "EXIT" not in operations:
        raise CompileError(f"{kernel}: the disassembly has no EXIT")
    tensor: dict[str, int] = {}
    for operation in filter(_is_tensor, operations):
        tensor[operation] = tensor.get(operation, 0) + 1
    inside = _tensor_loop(sass, instructions)
    count = lambda *kinds: sum(operation.split(".")[0] in kinds for operation in operations)
    shared = re.search(r"dynamic_shared_memory_size %(\w+)", module)
    return Report(
        kernel=kernel,
        registers=int(number(r"Used (\d+) registers", ptxas)),
        spill_bytes=int(number(r"(\d+) bytes spill stores", ptxas) + number(r"(\d+) bytes spill loads", ptxas)),
        local_instructions=count("LDL", "STL"),
        shared_bytes=int(number(rf"%{shared[1]} = arith\.constant (\d+) : i32", module)) if shared else 0,
        tensor=tensor,
        loads=count("UTMALDG"),
        stores=count("UTMASTG"),
        loop_tensor=sum(map(_is_tensor, inside)),
        loop_multiplies=sum(operation.split(".")[0] in ("FFMA", "FMUL", "FADD") for operation in inside),
        ptxas_s=number(r"Compile time = ([\d.]+) ms", ptxas) / 1e3,
    )


def _is_tensor(operation: str) -> bool:
    return operation.split(".")[0] in ("QGMMA", "HGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA", "HMMA", "QMMA")


def _instructions(sass: str) -> list[tuple[int, str, str]]:
    """(line number, operation, line) of every instruction."""
    lines = enumerate(sass.splitlines())
    return [(i, match[1], line) for i, line in lines if (match := _INSTRUCTION.search(line))]


def _tensor_loop(sass: str, instructions) -> list[str]:
    """Operations of the shortest stretch from a label to a branch back to it that has tensor instructions.

    Retries of a barrier stand behind the last EXIT and jump back: a stretch across an EXIT is no loop.
    """
    labels = {match[1]: i for i, line in enumerate(sass.splitlines()) if (match := _LABEL.match(line))}
    best: list[str] = []
    for at, _, line in instructions:
        branch = _BRANCH.search(line)
        if branch is None or labels.get(branch[1], at) >= at:
            continue
        inside = [operation for i, operation, _ in instructions if labels[branch[1]] < i <= at]
        if "EXIT" not in inside and any(map(_is_tensor, inside)) and (not best or len(inside) < len(best)):
            best = inside
    return best


def _compile(specs: str, name: str, target: str) -> None:
    """In the child: compiles a case for the described GPU. A Mosaic kernel reaches ptxas only when it is serialised."""
    import jax
    from jax.experimental import serialize_executable, topologies
    from jax.sharding import NamedSharding, PartitionSpec

    case = find(specs, name)
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    place = NamedSharding(mesh, PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in case.arguments]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Pallas asks it which GPU to lower for
        serialize_executable.serialize(jax.jit(case.function).lower(*arguments).compile())


if __name__ == "__main__":
    _compile(sys.argv[1], sys.argv[2], Path(sys.argv[3]).read_text())
