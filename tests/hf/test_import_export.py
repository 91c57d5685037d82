"""A public checkpoint becomes a run and comes back bit for bit, from any mesh; what doesn't fit is refused by name."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moex import cli
from moex.checkpoint import open_step
from moex.checkpoint.look import listed, verify
from moex.hf.__main__ import main
from moex.hf.load import load
from moex.hf.params import targets
from tests.hf.conftest import GOLDENS
from tests.models.golden import golden, program_on

NAMES = sorted(path.name for path in GOLDENS.iterdir())
MESH = ("--parallel.dp=2", "--parallel.cp=2", "--parallel.tp=2", "--parallel.edp=2", "--parallel.ep=4", "--parallel.zero=3",
        "--parallel.transport=alltoall", "--train.batch-size=4")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("one_device")
def test_import_then_export_gives_every_tensor_back(name, public, capsys):
    run = public.imported(GOLDENS / name)
    assert [one.step for one in listed(run)] == [0]
    assert list(verify(run)) == ["no checksums were saved with it, so a changed value cannot be seen"]
    out = public.exported(run)
    assert public.bits(out) == public.bits(GOLDENS / name)
    assert json.loads((out / "config.json").read_text()) == json.loads((GOLDENS / name / "config.json").read_text())
    printed = capsys.readouterr().out
    assert "largest tensor" in printed and "the host holds one at a time" in printed
    coefficient = json.loads((GOLDENS / name / "config.json").read_text()).get("router_aux_loss_coef", 0)
    assert (f"balance loss x {coefficient:g}" if coefficient else "balance loss off") in printed
    assert f"--config {run}/config.json" in printed


def test_any_mesh_exports_the_same_bytes(public, monkeypatch):
    name = "gpt_oss"
    over_eight = public.imported(GOLDENS / name, *MESH, name="eight")
    many = public.exported(over_eight, "--shard-bytes=100000", name="many")
    with monkeypatch.context() as patch:
        first = jax.devices()[:1]
        patch.setattr(jax, "device_count", lambda: 1)
        patch.setattr(jax, "devices", lambda *_: first)
        single = public.exported(public.imported(GOLDENS / name, name="one"), "--shard-bytes=100000", name="single")
        again = public.imported(many, name="again")  # the files in several parts are read as the one was
    files = sorted(path.name for path in many.iterdir())
    assert sum(file.endswith(".safetensors") for file in files) > 1
    assert files == sorted(path.name for path in single.iterdir())
    for file in files:
        assert (many / file).read_bytes() == (single / file).read_bytes(), file
    tree, want = open_step(again)["params"], open_step(over_eight)["params"]
    jax.tree.map(np.testing.assert_array_equal, tree, want)
    assert public.bits(many) == public.bits(GOLDENS / name)


def test_pieces_are_written_on_devices_as_on_the_host():
    g = golden("mixtral")
    program = program_on(g.config, "ulysses")
    silent = lambda *_: None
    small, large = (load(g.folder, g.pieces, targets(program.state), silent, small_bytes=n) for n in (2**20, 0))
    assert all(small[name].sharding == large[name].sharding for name in small)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((small, large)))


@pytest.mark.usefixtures("one_device")
def test_formats_of_tensors_stay_and_the_bias_is_float32(public):
    """A checkpoint in BF16 whose balancing bias is float32; numbers that BF16 hasn't stay out of it."""
    fine = np.float32(0.5 + 2**-20)

    def change(tensors):
        for name in tensors:
            if name.endswith("e_score_correction_bias"):
                tensors[name] = np.full_like(tensors[name], fine)
            else:
                tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    folder = public.folder("deepseek_v3", change, dtype="bfloat16")
    run = public.imported(folder)
    bias = open_step(run)["router_bias"]
    assert bias.dtype == np.float32 and (bias == fine).all()
    assert public.bits(public.exported(run)) == public.bits(folder)
    wide = public.bits(public.exported(run, "--dtype=float32"))
    assert {dtype for dtype, *_ in wide.values()} == {"float32"}
    narrow = public.bits(public.exported(run, "--dtype=float16"))
    assert {dtype for n, (dtype, *_) in narrow.items() if n.endswith("correction_bias")} == {"float32"}


@pytest.mark.usefixtures("one_device")
def test_tokenizer_files_travel_and_code_does_not(public):
    folder = public.folder("mixtral")
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "modeling_evil.py").write_text("raise SystemExit('executed')")
    out = public.exported(public.imported(folder))
    assert (out / "tokenizer.json").read_text() == '{"a": 1}'
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
    "tied, head, tells",
    [
        (True, "absent", ""),
        (True, "equal", "unexpected: lm_head.weight"),
        (False, "own", ""),
        (False, "absent", "missing: lm_head.weight"),
    ],
)
def test_tied_embeddings_follow_the_flag(public, capsys, tied, head, tells):
    """The flag decides, not which tensors are there: a head beside a tied embedding would be lost, a missing one made up."""

    def change(tensors):
        if head == "absent":
            del tensors["lm_head.weight"]
        if head == "equal":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    folder = public.folder("qwen3_moe", change, tie_word_embeddings=tied)
    if tells:
        assert main(["import", str(folder), str(public.tmp_path / "run")]) == 2
        assert tells in capsys.readouterr().err
        return
    ends = open_step(public.imported(folder))["params"]["ends"]
    assert ("head" in ends) != tied
    assert tied or np.abs(ends["head"] - ends["embedding"]).max() > 0


@pytest.mark.parametrize(
    "change, tells",
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"), "missing: model.layers.1.mlp.experts.3.up"),
        (lambda t: t.update({"model.layers.9.x": np.ones(2, np.float32)}), "unexpected: model.layers.9.x"),
        (
            lambda t: t.update({"model.norm.weight": np.ones(31, np.float32)}),
            r"shape: model.norm.weight (31,) (config.json: (32,))",
        ),
        (lambda t: t.update({"model.norm.weight": np.ones(32, np.int32)}), "format: model.norm.weight int32"),
    ],
)  # fmt: skip
def test_every_tensor_is_accounted_for(public, capsys, change, tells):
    folder = public.folder("qwen3_moe", change)
    assert main(["import", str(folder), str(public.tmp_path / "run")]) == 2
    assert tells in capsys.readouterr().err
    assert not (public.tmp_path / "run").exists()


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/hostname", "sub/part.safetensors", "..\\x", "missing.safetensors"]
)
def test_an_index_cannot_leave_its_folder(public, capsys, file):
    folder = public.folder("mixtral")
    (folder / "model.safetensors").rename(public.tmp_path / "outside.safetensors")
    names = load_file(public.tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=dict.fromkeys(names, file))))
    assert main(["import", str(folder), str(public.tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert "not a plain name in its folder" in told or "no file missing.safetensors" in told


def test_broken_files_are_told(public, capsys):
    folder = public.folder("mixtral")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for spoilt, tells in (
        (whole[:-4], "cut off"),
        (b"\xff" * 64, "no safetensors file"),
        (whole[:8] + b"!" + whole[9:], "cannot be read"),
    ):
        weights.write_bytes(spoilt)
        assert main(["import", str(folder), str(public.tmp_path / "run")]) == 2
        assert tells in capsys.readouterr().err


@pytest.mark.usefixtures("one_device")
def test_a_used_folder_and_contradicting_flags_are_refused(public, capsys):
    run = public.imported(GOLDENS / "mixtral")
    assert main(["import", str(GOLDENS / "mixtral"), str(run)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main(["import", str(GOLDENS / "mixtral"), str(public.tmp_path / "x"), "--model.num-layers=3"]) == 2
    assert "model.num_layers=3 contradicts the checkpoint's 2" in capsys.readouterr().err
    assert main(["export", str(run), str(GOLDENS / "mixtral")]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main(["export", str(run), str(public.tmp_path / "y"), "--family=qwen2_moe"]) == 2
    assert "has no way to say" in capsys.readouterr().err
    assert cli.load(public.imported(GOLDENS / "mixtral", "--model.router.aux-coefficient=0.5") / "config.json")


@pytest.mark.usefixtures("one_device")
def test_layers_that_predict_further_tokens_are_left_out_and_said(public, capsys):
    further = {"model.layers.3.eh_proj.weight": np.ones((32, 64), np.float32)}
    folder = public.folder("deepseek_v3", lambda t: t.update(further))
    run = public.imported(folder)
    assert "left out: 1 tensors" in capsys.readouterr().out
    assert public.bits(public.exported(run)) == public.bits(GOLDENS / "deepseek_v3")


@pytest.mark.usefixtures("one_device")
def test_layers_that_predict_further_tokens_come_along_when_asked(public, capsys):
    folder = GOLDENS.parent / "mtp"
    run = public.imported(folder, "--model.mtp-depth=1")
    saved = open_step(run)
    assert saved["router_bias"].shape == (2, 8) and (saved["router_bias"] != 0).all()
    assert public.bits(public.exported(run)) == public.bits(folder)
    assert main(["import", str(GOLDENS / "mixtral"), str(public.tmp_path / "x"), "--model.mtp-depth=1"]) == 2
    assert "have no layers that predict further tokens" in capsys.readouterr().err


@pytest.mark.usefixtures("one_device")
def test_quantised_weights_are_read_as_the_reference_reads_them(public):
    """FP8 in a checkpoint, cut blocks included, and gpt-oss's MXFP4; the numbers themselves are in test_folder.py."""
    rng = np.random.default_rng(0)

    def fp8(tensors):
        for name in [n for n in tensors if "experts" in n]:
            rows, columns = tensors[name].shape
            scales = rng.random((-(-rows // 16), -(-columns // 16))).astype(np.float32) + 0.5
            codes = (tensors[name] * 8).astype(ml_dtypes.float8_e4m3fn)
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
            expected[name] = codes.astype(np.float32) * scales.repeat(16, 0).repeat(16, 1)[:rows, :columns]

    expected: dict[str, np.ndarray] = {}
    folder = public.folder("qwen3_moe", quantization_config=dict(quant_method="fp8", weight_block_size=[16, 16]))
    tensors = load_file(folder / "model.safetensors")
    fp8(tensors)
    write(folder / "model.safetensors", tensors)
    run = public.imported(folder)
    out = load_file(public.exported(run, "--dtype=float32") / "model.safetensors")
    for name, want in expected.items():
        np.testing.assert_array_equal(out[name], want)
    in_full = public.exported(run)
    assert "quantization_config" not in json.loads((in_full / "config.json").read_text())
    assert {str(x.dtype) for n, x in load_file(in_full / "model.safetensors").items() if "experts" in n} == {"bfloat16"}


def write(file, tensors):
    """The library's NumPy side cannot write 8-bit floats."""
    from moex.hf import storage

    places = storage.create(file, [(name, x.dtype, x.shape) for name, x in tensors.items()])
    for name, x in tensors.items():
        storage.write(places[name], x)


@pytest.mark.usefixtures("one_device")
def test_mxfp4_of_gpt_oss(public):
    codes = load_file(GOLDENS.parent / "quantised" / "codes.safetensors")
    rng = np.random.default_rng(1)
    folder = public.folder("gpt_oss", quantization_config=dict(quant_method="mxfp4"))
    tensors = load_file(folder / "model.safetensors")
    blocks = rng.integers(0, 256, (4, 64, 1, 16), dtype=np.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    del tensors[name]
    tensors |= {f"{name}_blocks": blocks, f"{name}_scales": np.full((4, 64, 1), 120, np.uint8)}
    save_file(tensors, folder / "model.safetensors")
    out = load_file(public.exported(public.imported(folder)) / "model.safetensors")
    assert out[name].dtype == ml_dtypes.bfloat16 and out[name].shape == (4, 32, 64)
    table = dict(zip(range(16), [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], strict=True))
    for e, row, byte in ((0, 0, 0), (3, 63, 15), (2, 17, 7)):
        low, high = blocks[e, row, 0, byte] & 15, blocks[e, row, 0, byte] >> 4
        assert out[name][e, 2 * byte, row] == table[low] * 2.0**-7
        assert out[name][e, 2 * byte + 1, row] == table[high] * 2.0**-7
    assert codes
