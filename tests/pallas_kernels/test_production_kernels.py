"""GPU kernels at the shapes of published models: the committed table is whole and clean, and the compiler still agrees."""

import json

import pytest

from benchmarks.kernels import TABLE, TARGET, as_row, complaints, production_cases
from pallas_kernels.sass import inspect

CASES = {name: specs for specs, name in production_cases()}
COMMITTED = json.loads(TABLE.read_text())
FEW = (
    "grouped_matmul Qwen3-30B up 8 groups",
    "scaled_grouped_matmul DeepSeek-V3 up 4 groups",
    "scaled_grouped_matmul DeepSeek-V3 dgrad down 4 groups",
    "scaled_grouped_matmul DeepSeek-V3 wgrad up 4 groups, aligned, added",
    "scaled_grouped_matmul float32 result",
)
"""Every kernel once: compiling all takes minutes, and `make kernels ARGS=--check` does it."""


def test_the_table_has_every_case():
    assert len(CASES) == len(production_cases()), "two cases of one name"
    assert set(COMMITTED) == set(CASES), "run `make kernels ARGS=--write`"


@pytest.mark.parametrize("name", [name for name in CASES if "matmul" in name])
def test_matmuls_use_tensor_cores_and_spill_nothing(name):
    kind = "QGMMA" if name.startswith("scaled") else "HGMMA"
    assert len(COMMITTED[name]) == (1 if name.startswith("scaled") else 3)  # bfloat16: the product and two gradients
    for row in COMMITTED[name]:
        assert row["tensor"]
        assert all(operation.startswith(kind) for operation in row["tensor"])
        assert row["loop_tensor"] > 0
        assert row["spill_bytes"] == row["local_instructions"] == 0


def test_what_got_worse_is_told():
    row = COMMITTED[FEW[1]][0]
    assert complaints(row, row) == []
    worse = row | dict(spill_bytes=8, registers=row["registers"] + 1, tensor={})
    assert [c.split(" ")[0] for c in complaints(worse, row)] == ["8", "no", str(row["registers"] + 1)]
    assert complaints(row, None) == ["is not in the table"]


@pytest.mark.needs_aot
@pytest.mark.parametrize("name", FEW)
def test_the_compiler_agrees_with_the_table(name, aot_python):
    reports = inspect(CASES[name], name, TARGET.read_text(), python=aot_python)
    rows = {row["kernel"]: row for row in COMMITTED[name]}
    for report in reports:
        assert complaints(as_row(report), rows.get(report.kernel)) == []
    assert len(reports) == len(rows)
