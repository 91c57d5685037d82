"""Public configurations: nothing is passed over, what is read is written back, and rotations are the reference's by value."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from configs import PRESETS
from moex.config import ModelConfig
from moex.layers.rope import feature_scale, frequencies, rotate, softmax_scale
from moex.models.families import FAMILIES, from_public, to_public
from moex.models.pattern import Kind, kinds, segments
from moex.models.public import TRAINING_ONLY, flattened
from tests.odd import changed

GOLDENS = Path(__file__).parents[1] / "goldens"
PUBLIC = {path.parent.name: json.loads(path.read_text()) for path in sorted(GOLDENS.glob("hf/*/config.json"))}
POSITIONS = load_file(GOLDENS / "positions.safetensors")
every_family = pytest.mark.parametrize("name", PUBLIC)


def test_every_family_has_a_checkpoint():
    assert PUBLIC.keys() == FAMILIES.keys()


@every_family
def test_what_is_written_reads_as_the_same_model(name):
    model = from_public(PUBLIC[name])
    found = [family for family in FAMILIES if _writes(model, family)]
    assert name in found
    assert to_public(model)["model_type"] == found[0]
    again, want = flattened(from_public(to_public(model, name))), flattened(model)
    assert {k: v for k, v in again.items() if k not in TRAINING_ONLY} == {
        k: v for k, v in want.items() if k not in TRAINING_ONLY
    }


def _writes(model, family):
    try:
        return bool(to_public(model, family))
    except ValueError:
        return False


@every_family
def test_an_unknown_field_is_an_error_that_names_it(name):
    with pytest.raises(ValueError, match="may change the mathematics and are not known here: attention_twist=2"):
        from_public(PUBLIC[name] | dict(attention_twist=2))


@pytest.mark.parametrize(
    "name, field, value, tells",
    [
        ("mixtral", "hidden_act", "gelu", "hidden_act='gelu' is not supported here; it may be 'silu'"),
        ("mixtral", "attention_dropout", 0.1, "attention_dropout=0.1"),
        ("mixtral", "router_jitter_noise", 0.1, "router_jitter_noise=0.1"),
        ("qwen3_moe", "use_sliding_window", True, "use_sliding_window=True"),
        ("qwen3_moe", "mlp_only_layers", [1], r"mlp_only_layers=\\[1\\]"),
        ("qwen3_moe", "attention_bias", True, "attention_bias=True"),
        ("olmoe", "clip_qkv", 8.0, "clip_qkv=8.0"),
        ("gpt_oss", "layer_types", ["full_attention"], "layer_types must name"),
        ("deepseek_v2", "topk_method", "noaux_tc", "topk_method='noaux_tc' must be"),
        ("deepseek_v3", "scoring_func", "softmax", "scoring_func='softmax'"),
        ("deepseek_v3", "moe_layer_freq", 2, "moe_layer_freq=2"),
        ("glm4_moe", "rope_parameters", dict(rope_type="llama3", rope_theta=1.0), "rope_type='llama3'"),
        ("qwen3_moe", "rope_parameters", dict(rope_type="default", rope_theta=1.0, twist=1), "unknown fields"),
        ("gpt_oss", "rope_parameters", PUBLIC["gpt_oss"]["rope_parameters"] | dict(attention_factor=2.0), "=2.0"),
        ("glm4_moe", "model_type", "llama", "model_type='llama' is none of"),
        ("mixtral", "hidden_size", None, "no field hidden_size"),
    ],
)
def test_what_is_not_supported_is_named(name, field, value, tells):
    values = {k: v for k, v in (PUBLIC[name] | {field: value}).items() if v is not None}
    with pytest.raises(ValueError, match=tells.replace("\\\\", "\\")):
        from_public(values)


def test_older_and_newer_forms_of_positions_are_the_same():
    new = PUBLIC["deepseek_v3"]
    rope = dict(new["rope_parameters"])
    old = {k: v for k, v in new.items() if k != "rope_parameters"} | dict(rope_theta=rope.pop("rope_theta"))
    old["rope_scaling"] = dict(rope, type=rope.pop("rope_type"))
    assert from_public(old) == from_public(new)
    assert from_public(new | dict(model_type="kimi_k2")) == from_public(new)


def test_balance_coefficients_are_the_files_or_zero():
    given = PUBLIC["qwen3_moe"]
    without = {k: v for k, v in given.items() if k != "router_aux_loss_coef"}
    assert from_public(given).router.aux_coefficient == 0.001
    assert from_public(without).router.aux_coefficient == 0
    by_row = from_public(PUBLIC["deepseek_v3"] | dict(aux_loss_alpha=1e-4, seq_aux=True)).router
    assert (by_row.sequence_coefficient, by_row.aux_coefficient) == (1e-4, 0)


def test_what_no_family_can_say_is_told_family_by_family():
    odd = dataclasses.replace(PRESETS["tiny"]().model, latent_width=16)
    with pytest.raises(ValueError, match=r"qwen3_moe: .* no way to say latent_width=16"):
        to_public(odd)


@pytest.mark.parametrize("name", sorted({key.partition(".")[0] for key in POSITIONS}))
def test_rotation_by_value_at_positions_0_to_31(name):
    """Cosines, sines, and a pair of features turned by them, in the order of the family's pairs."""
    attention = from_public(PUBLIC[name]).attention
    rope, width = attention.rope, attention.rope_dim or attention.head_dim
    cos, sin = POSITIONS[f"{name}.cos"], POSITIONS[f"{name}.sin"]
    assert cos.shape == (32, width // 2)
    angles = np.arange(32)[:, None] * frequencies(width, rope).astype(np.float64)
    np.testing.assert_allclose(np.cos(angles) * feature_scale(rope), cos, atol=2e-6)
    np.testing.assert_allclose(np.sin(angles) * feature_scale(rope), sin, atol=2e-6)
    x = np.random.default_rng(0).normal(size=(1, 32, 2, attention.head_dim)).astype(np.float32)
    x = x[..., :width] if attention.kind == "mla" else x
    got = np.asarray(rotate(x, np.arange(32, dtype=np.int32)[None], rope, width=attention.rope_dim))
    a, b = (
        (x[..., 0:width:2], x[..., 1:width:2])
        if rope.interleaved
        else (x[..., : width // 2], x[..., width // 2 : width])
    )
    cos, sin = cos[None, :, None], sin[None, :, None]
    np.testing.assert_allclose(got[..., : width // 2], a * cos - b * sin, atol=1e-5)
    np.testing.assert_allclose(got[..., width // 2 : width], b * cos + a * sin, atol=1e-5)
    np.testing.assert_array_equal(got[..., width:], x[..., width:])


def test_softmax_scales_of_the_yarn_families():
    """DeepSeek multiplies logits by its squared correction; gpt-oss grows features and leaves the logits alone."""
    scale = lambda name, width: softmax_scale(width, from_public(PUBLIC[name]).attention.rope)
    growth = lambda factor, mscale: 0.1 * mscale * np.log(factor) + 1
    np.testing.assert_allclose(scale("deepseek_v3", 24), 24**-0.5 * growth(4, 1.0) ** 2)
    np.testing.assert_allclose(scale("deepseek_v2", 24), 24**-0.5 * growth(4, 0.707) ** 2)
    assert scale("gpt_oss", 16) == 0.25
    assert feature_scale(from_public(PUBLIC["gpt_oss"]).attention.rope) == pytest.approx(growth(32, 1.0))


def test_layers_are_cut_into_few_scans_of_few_layers():
    deepseek = kinds(PRESETS["deepseek_v3"]().model)
    assert [(len(s.period), s.repeats) for s in segments(deepseek)] == [(1, 3), (1, 58)]
    gpt_oss = kinds(PRESETS["gpt_oss_20b"]().model)
    assert [(len(s.period), s.repeats) for s in segments(gpt_oss)] == [(2, 12)]
    assert [kind.window for kind in gpt_oss[:3]] == [128, 0, 128]
    turns = kinds(ModelConfig(num_layers=6, num_dense_layers=0, moe_every=2))
    assert [(len(s.period), s.repeats) for s in segments(turns)] == [(2, 3)]
    odd = (Kind(True, 0), Kind(False, 0), Kind(True, 0), Kind(True, 4), Kind(True, 0))
    cut = segments(odd)
    assert tuple(kind for s in cut for _ in range(s.repeats) for kind in s.period) == odd


@every_family
def test_every_wrong_field_is_refused_or_of_its_type(name):
    """Whatever stands in a public file: a reason, or a configuration whose values are of their fields' types."""
    refused, usual = 0, flattened(ModelConfig())
    for path, new in changed(PUBLIC[name]):
        try:
            found = flattened(from_public(new))
        except ValueError:
            refused += 1
        else:
            assert all(type(found[key]) is type(value) for key, value in usual.items()), path
    assert refused > 100
