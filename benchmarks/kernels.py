"""Compiles every GPU kernel at the shapes of published models for a described GPU, and prints what ptxas made of it.

    make kernels [ARGS="--only WORD --check --write"]

--only takes the cases with WORD in their name. --write replaces the committed table, kernels_h100.json, by what was found
(rows of other cases stay). --check compares with it and exits with 1 when a case spills, touches local memory, lost its
tensor-core instructions or takes more registers, or is not in the table. Needs no GPU, and says nothing of speed.
"""

import argparse
import dataclasses
import importlib
import json
import pkgutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pallas_kernels
from pallas_kernels.sass import CompileError, Report, inspect

TARGET = Path(__file__).parents[1] / "moex/plan/targets/h100.txtpb"
TABLE = Path(__file__).parent / "kernels_h100.json"


def production_cases() -> list[tuple[str, str]]:
    """(module, case name) of every op that has production shapes."""
    ops = [f"pallas_kernels.{m.name}" for m in pkgutil.iter_modules(pallas_kernels.__path__) if m.ispkg]
    specs = [importlib.import_module(f"{op}.specs") for op in ops]
    return [(m.__name__, case.name) for m in specs if hasattr(m, "production_cases") for case in m.production_cases()]


def as_row(report: Report) -> dict:
    """What the committed table keeps: everything but the time."""
    return {name: value for name, value in dataclasses.asdict(report).items() if name != "ptxas_s"}


def as_text(table: dict[str, list[dict]]) -> str:
    """JSON with a line for every kernel, so that a diff shows which one changed."""
    rows = lambda case: ",\n".join(f"  {json.dumps(row)}" for row in table[case])
    return "{\n" + ",\n".join(f" {json.dumps(case)}: [\n{rows(case)}\n ]" for case in sorted(table)) + "\n}\n"


def complaints(row: dict, committed: dict | None) -> list[str]:
    """Why a kernel isn't as good as the table says; empty where it is."""
    found = [f"{row[name]} {name}" for name in ("spill_bytes", "local_instructions") if row[name]]
    if committed is None:
        return [*found, "is not in the table"]
    found += [f"no {kind} any more" for kind in committed["tensor"] if kind not in row["tensor"]]
    if row["registers"] > committed["registers"]:
        found.append(f"{row['registers']} registers, {committed['registers']} in the table")
    return found


def line(case: str, r: Report) -> str:
    """One kernel's line of the printed table."""
    ratio = f"{r.loop_multiplies / r.loop_tensor:.1f}" if r.loop_tensor else "-"
    kinds = ", ".join(f"{n} {kind}" for kind, n in r.tensor.items()) or "-"
    return (
        f"{case:70}{r.registers:5}{r.spill_bytes:6}{r.local_instructions:6}{r.shared_bytes:8}{r.loads:4}{r.stores:4}"
        f"{ratio:>8}{r.ptxas_s:8.2f}  {r.kernel}: {kinds}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    chosen = [(specs, name) for specs, name in production_cases() if arguments.only in name]
    if not chosen:
        parser.error(f"no case has {arguments.only!r} in its name")
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    found, failed = {}, []
    print(f"{'case':70}{'regs':>5}{'spill':>6}{'local':>6}{'shared':>8}{'ld':>4}{'st':>4}{'FMA/MMA':>8}{'ptxas s':>8}")
    for specs, name in chosen:
        try:
            reports = inspect(specs, name, TARGET.read_text(), python=sys.executable)
        except CompileError as error:
            failed.append(f"{name}: {error}")
            print(f"{name:70}  could not be compiled")
            continue
        found[name] = [as_row(report) for report in reports]
        old = {row["kernel"]: row for row in table.get(name, [])}
        for report, row in zip(reports, found[name], strict=True):
            print(line(name, report), flush=True)
            why = complaints(row, old.get(row["kernel"]))
            failed += [f"{name}, {row['kernel']}: {reason}" for reason in why] if arguments.check else []
    if arguments.write:
        everything = {name for _, name in production_cases()}
        rows = {name: row for name, row in (table | found).items() if name in everything}
        TABLE.write_text(as_text(rows))
    print(*failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
