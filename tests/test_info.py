"""`python -m moex.info` tells what the code itself would accept or refuse."""

import json

import jax
import jax.numpy as jnp
import pytest

from moex import dispatch, info
from moex.config import ParallelConfig, RouterConfig
from moex.layers.router import check_router, scores
from pallas_kernels.grouped_matmul import grouped_matmul


def read_json(capsys) -> dict:
    assert info.main(["--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_names_this_back_end(capsys):
    found = read_json(capsys)
    assert found["versions"]["jax"] == jax.__version__
    assert found["platform"] == jax.default_backend()
    assert found["devices"] == [device.device_kind for device in jax.devices()]
    assert f"= {len(jax.devices())} devices" in found["meshes"]


def test_transports_are_all_there_with_the_reason_of_the_ones_that_cannot_run(capsys):
    found = read_json(capsys)["transports"]
    assert list(found) == list(dispatch.TRANSPORTS)
    if jax.default_backend() == "cpu":
        assert {name for name, reason in found.items() if reason} == {"ragged"}


def test_score_functions_and_fields_exist(capsys):
    router = read_json(capsys)["router"]
    for name in router["score_functions"]:
        config = RouterConfig(score_function=name)
        check_router(config)
        assert scores(jnp.zeros((1, 8)), config).shape == (1, 8)
    assert all(hasattr(RouterConfig(), field.rpartition(".")[2]) for field in router["balancing"].values())


def test_defaults_are_among_the_choices(capsys):
    found = read_json(capsys)
    assert ParallelConfig().context in found["context_parallel"]
    assert ParallelConfig().zero in found["zero"]


def test_kernels_run_or_are_refused_as_said(capsys):
    lhs, rhs, sizes = jnp.ones((3, 2)), jnp.ones((2, 2, 4)), jnp.array([1, 2])
    for name, reason in read_json(capsys)["kernels"]["grouped_matmul"].items():
        if reason:
            with pytest.raises(NotImplementedError, match=reason):
                grouped_matmul(lhs, rhs, sizes, implementation=name)
        else:
            assert grouped_matmul(lhs, rhs, sizes, implementation=name).tolist() == [[2.0] * 4] * 3


def test_text_says_the_same(capsys):
    assert info.main([]) == 0
    text = capsys.readouterr().out
    found = info.info()
    names = [*found["transports"], *found["context_parallel"], *found["router"]["score_functions"], *found["kernels"]]
    assert all(name in text for name in names)
    assert all(reason in text for reason in found["transports"].values())


def test_unknown_option_exits_2(capsys):
    with pytest.raises(SystemExit) as ended:
        info.main(["--jsno"])
    assert ended.value.code == 2
    assert "--jsno" in capsys.readouterr().err
