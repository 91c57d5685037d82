"""Numbers of quantised tensors against the reference library's, and what a folder may not be."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from moex.hf.folder import Folder, block_scaled, mxfp4
from tests.hf.conftest import GOLDENS

CODES = load_file(GOLDENS.parent / "quantised" / "codes.safetensors")


def test_mxfp4_is_the_references():
    got = mxfp4(CODES["mxfp4.x_blocks"], CODES["mxfp4.x_scales"])
    np.testing.assert_array_equal(got, CODES["mxfp4.expected"])
    assert np.isnan(mxfp4(np.full((1, 1, 16), 0x11, np.uint8), np.array([[255]], np.uint8))).all()


def test_fp8_blocks_are_the_references():
    codes = CODES["fp8.x"].view(ml_dtypes.float8_e4m3fn)
    got = block_scaled(codes, CODES["fp8.x_scale_inv"], (128, 128))
    np.testing.assert_array_equal(got, CODES["fp8.expected"])


@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (128, 128), (200, 300)])
def test_blocks_at_the_edges_are_cut(shape):
    rng = np.random.default_rng(0)
    codes = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random((-(-shape[0] // 128), -(-shape[1] // 128))).astype(np.float32)
    got = block_scaled(codes, scales, (128, 128))
    for i in np.ndindex(*scales.shape):
        part = tuple(slice(128 * n, 128 * (n + 1)) for n in i)
        np.testing.assert_array_equal(got[part], codes[part].astype(np.float32) * scales[i])


def test_scales_must_belong_and_fit(public):
    one = np.ones((1, 1), np.float32)
    with pytest.raises(ValueError, match=r"scales without a tensor .*x_scale_inv"):
        Folder(public.folder("mixtral", lambda t: t.update(x_scale_inv=one)))
    with pytest.raises(ValueError, match="x_blocks is there, but x_scales is not"):
        Folder(public.folder("mixtral", lambda t: t.update(x_blocks=np.ones((2, 1, 16), np.uint8))))
    pair = dict(x_blocks=np.ones((2, 1, 16), np.uint8), x_scales=np.ones((2, 2), np.uint8))
    with pytest.raises(ValueError, match="no MXFP4 pair"):
        Folder(public.folder("mixtral", lambda t: t.update(pair)))


def test_other_quantisations_are_refused(public):
    folder = public.folder("mixtral", quantization_config=dict(quant_method="gptq"))
    with pytest.raises(ValueError, match="quant_method='gptq' must be fp8 or mxfp4"):
        Folder(folder)
    (folder / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="holds no JSON object"):
        Folder(folder)
    with pytest.raises(ValueError, match="is no folder"):
        Folder(folder / "nothing")
