"""GPUs as they are named on the command line, and their descriptions."""

import re

import pytest

from mesh.topology import ACCELERATORS
from moex.plan.target import KINDS, parse_target
from moex.validate import ConfigError


@pytest.mark.parametrize(
    "text, num_gpus, domain, gpus_per_host",
    [
        ("h100:1024", 1024, 8, 8),
        ("h100:4", 4, 4, 4),
        ("gb200:256", 256, 64, 4),
        ("gb200:72", 72, 72, 4),
        ("GB300:256:32", 256, 32, 4),
        ("a100:16:8", 16, 8, 8),
    ],
)
def test_counts_and_domains(text, num_gpus, domain, gpus_per_host):
    target = parse_target(text)
    assert (target.num_gpus, target.domain, target.gpus_per_host) == (num_gpus, domain, gpus_per_host)


@pytest.mark.parametrize(
    "text, told",
    [
        ("h200", "must read KIND:COUNT"),
        ("h100:none", "must read KIND:COUNT"),
        ("h100:0", "must read KIND:COUNT"),
        ("tpu:8", "no GPU 'tpu'; known are a100, h100"),
        ("h100:16:16", "16 GPUs in an NVLink domain, but H100 systems have 8"),
    ],
)
def test_what_makes_no_target(text, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        parse_target(text)


@pytest.mark.parametrize("name", KINDS)
def test_descriptions_agree_with_the_data_sheets(name):
    """XLA's own figures of bandwidth and memory, against those that plans count with."""
    target, listed = parse_target(f"{name}:8"), ACCELERATORS[KINDS[name]]
    number = lambda field: float(re.search(rf"{field}: ([\d.]+)", target.description)[1])
    assert number("memory_bandwidth") == pytest.approx(listed.memory_bytes_per_s, rel=0.05)
    assert 1.0 < number("device_memory_size") / target.usable_bytes < 1.08
