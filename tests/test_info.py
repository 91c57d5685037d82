"""`python -m moex.info`: what it says must be what the code does."""

import json

import jax
import jax.numpy as jnp
import pytest

from moex import dispatch, info
from pallas_kernels.grouped_matmul import grouped_matmul


@pytest.fixture(scope="module")
def facts():
    return json.loads(json.dumps(info.collect()))


def test_json_is_what_collect_says(facts, capsys):
    assert info.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == facts


def test_devices_and_versions_are_those_of_this_process(facts):
    assert facts["backend"] == jax.default_backend()
    assert len(facts["devices"]) == jax.device_count()
    assert facts["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize(("num_devices", "count"), [(1, 1), (2, 9), (4, 36), (8, 100)])
def test_powers_of_two_fold_in_every_way(num_devices, count):
    """Each side has (m + 1)(m + 2) / 2 factorisations of 2^m, and powers of two always divide one another."""
    found = info.meshes(num_devices)
    assert len(found) == count
    assert len({tuple(m.items()) for m in found}) == count


def test_meshes_of_six_devices_leave_out_what_cannot_fold():
    found = info.meshes(6)
    assert dict(dp=3, cp=1, tp=2, edp=1, ep=3, etp=2) in found
    assert dict(dp=3, cp=1, tp=2, edp=1, ep=2, etp=3) not in found  # inside tp lie 2 devices, inside etp 3


def test_every_transport_is_told_with_its_reason(facts):
    assert facts["transports"].keys() == dispatch.TRANSPORTS.keys()
    assert facts["transports"]["local"] == ""
    if jax.default_backend() == "cpu":
        assert "ragged all-to-all" in facts["transports"]["ragged"]


def test_a_kernel_runs_exactly_where_it_says_so(facts):
    lhs, rhs, sizes = jnp.ones((4, 2)), jnp.ones((2, 2, 2)), jnp.array([1, 3], jnp.int32)
    for name, reason in facts["kernels"]["grouped_matmul"].items():
        if reason:
            with pytest.raises(NotImplementedError, match=name):
                grouped_matmul(lhs, rhs, sizes, implementation=name)
        else:
            assert (grouped_matmul(lhs, rhs, sizes, implementation=name) == 2).all()


@pytest.mark.parametrize(("preset", "billions", "active"), [("mixtral_8x7b", 46.7, 12.9), ("qwen3_235b_a22b", 235, 22)])
def test_presets_have_the_published_numbers_of_parameters(facts, preset, billions, active):
    numbers = facts["presets"][preset]
    assert numbers["parameters"] / 1e9 == pytest.approx(billions, rel=0.01)
    assert numbers["active_parameters"] / 1e9 == pytest.approx(active, rel=0.01)


def test_choices_are_those_of_the_configuration(facts):
    assert facts["routers"]["score_functions"] == ["softmax", "sigmoid", "sqrtsoftplus"]
    assert facts["compute_dtypes"] == ["float32", "bfloat16"]
    assert facts["zero"] == [1, 3]


def test_text_names_everything(facts, capsys):
    assert info.main([]) == 0
    printed = capsys.readouterr().out
    for name in (*facts["transports"], *facts["kernels"], *facts["presets"], *facts["versions"]):
        assert name in printed
    assert "ways to fold the devices here: 100" in printed
