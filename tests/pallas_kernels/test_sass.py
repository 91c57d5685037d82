"""The compile-only harness: what it reads from a compiled kernel, and that no compiler's complaint is lost."""

from pathlib import Path

import pytest

from pallas_kernels import sass

TARGET = (Path(__file__).parents[2] / "moex/plan/targets/h100.txtpb").read_text()
PTXAS = """ptxas info    : Function properties for a_kernel
    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compile time = 52.439 ms
"""
DISASSEMBLY = """a_kernel:
        /*0000*/                   UTMALDG.2D [UR8], [UR4] ;
.L_x_1:
        /*0010*/                   LDL R1, [R2] ;
.L_x_2:
        /*0020*/                   QGMMA.64x128x32.F32.E4M3.E5M2 R88, gdesc[UR8], R88 ;
        /*0030*/              @!P1 FFMA R1, R2, R3, R4 ;
   -:-:-:Y:01        /*0040*/                   FMUL R1, R2, R3 ;
        /*0050*/               @P0 BRA `(.L_x_2) ;
        /*0060*/                   FMUL R1, R2, R3 ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_1) ;
"""
LAUNCH = """%room_1 = arith.constant 131096 : i32
gpu.launch blocks(%a) dynamic_shared_memory_size %room_1 {
"""


def inspect(name, python):
    return sass.inspect("tests.pallas_kernels.small_kernels", name, TARGET, python=python)


def test_what_is_read():
    report = sass.parse("a_kernel", PTXAS, DISASSEMBLY, LAUNCH)
    assert (report.registers, report.spill_bytes, report.local_instructions) == (168, 12, 1)
    assert report.shared_bytes == 131096
    assert report.tensor == {"QGMMA.64x128x32.F32.E4M3.E5M2": 1}
    assert (report.loads, report.stores) == (1, 0)
    assert (report.loop_tensor, report.loop_multiplies) == (1, 2)  # of the inner loop, not of the outer one
    assert report.ptxas_s == pytest.approx(0.052, abs=1e-3)


@pytest.mark.parametrize("ptxas, disassembly, message", [("", DISASSEMBLY, "registers"), (PTXAS, "", "EXIT")])
def test_what_is_missing_is_no_zero(ptxas, disassembly, message):
    with pytest.raises(sass.CompileError, match=message):
        sass.parse("a_kernel", ptxas, disassembly, LAUNCH)


def test_an_environment_without_the_packages_is_named(tmp_path):
    with pytest.raises(sass.CompileError, match="no CUDA compiler packages"):
        inspect("product", tmp_path / "bin" / "python")


@pytest.mark.needs_aot
def test_a_product_of_float8_is_one_by_tensor_cores(aot_python):
    (report,) = inspect("product", aot_python)
    assert report.kernel == "product"
    assert report.tensor == {"QGMMA.64x128x32.F32.E4M3.E4M3": 8}  # 2 x 64 rows, 4 x 32 of K
    assert (report.spill_bytes, report.local_instructions, report.loads) == (0, 0, 2)
    assert 2 * 128 * 128 < report.shared_bytes < 2 * 128 * 128 + 1024  # two operands and barriers
    assert 128 < report.registers <= 255  # the sums alone take 128


@pytest.mark.needs_aot
def test_spills_are_seen(aot_python):
    (report,) = inspect("too many live", aot_python)
    assert report.registers == 255
    assert report.spill_bytes > 0
    assert report.local_instructions > 0


@pytest.mark.needs_aot
@pytest.mark.parametrize(
    "name, message",
    [
        ("not K-major", "Only f16 WGMMA supports transposes"),
        ("too much shared memory", "exceeds available shared memory"),
        ("no kernel", "no Mosaic kernel is in it"),
        ("nowhere", "no case 'nowhere'.*it has product"),
    ],
)
def test_what_the_compiler_refuses_is_raised_with_its_words(name, message, aot_python):
    with pytest.raises(sass.CompileError, match=message):
        inspect(name, aot_python)
