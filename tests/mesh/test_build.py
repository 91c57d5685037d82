"""From a fold to a mesh: device order, abstract twin, refusals."""

import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mesh import abstract_mesh, build_mesh, fold
from mesh.build import device_order
from mesh.topology import ACCELERATORS, peak_flops


def test_mesh_and_abstract_mesh_agree(devices):
    folded = fold(dict(dp=2, cp=2, tp=2), dict(edp=2, ep=4))
    real, abstract = build_mesh(folded, devices), abstract_mesh(folded)
    assert real.axis_names == abstract.axis_names == folded.names
    assert real.devices.shape == tuple(abstract.shape.values()) == folded.shape
    assert set(abstract.axis_types) == set(real.axis_types) == {AxisType.Auto}
    assert [d.id for d in real.devices.reshape(-1)] == sorted(d.id for d in devices)


def test_an_abstract_mesh_needs_no_devices():
    folded = fold(dict(pp=4, dp=32, tp=8), dict(pp=4, ep=64, edp=4))
    spec = PartitionSpec(folded.expert.ep)
    shape = jax.ShapeDtypeStruct((256, 8), np.float32, sharding=NamedSharding(abstract_mesh(folded), spec))
    assert shape.sharding.shard_shape(shape.shape) == (4, 8)


@pytest.mark.parametrize("count", [4, 7])
def test_a_wrong_number_of_devices_is_refused_with_both_numbers(devices, count):
    with pytest.raises(ValueError, match=rf"needs 8 devices \(dense .*dp=8.*but {count} are visible.*dp and edp"):
        build_mesh(fold(dict(dp=8), dict(ep=8)), devices[:count])


def test_devices_stand_by_link_domain_then_process_then_number():
    device = lambda id, process, domain: types.SimpleNamespace(id=id, process_index=process, slice_index=domain)
    shuffled = [device(5, 1, 0), device(0, 0, 1), device(3, 0, 0), device(4, 0, None), device(1, 1, 1)]
    assert [d.id for d in device_order(shuffled)] == [3, 4, 5, 0, 1]


def test_peaks_by_device_kind():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("cpu") is None
    assert ACCELERATORS["NVIDIA H200"].memory_bytes_per_s == 4.8e12
    assert all(a.fp8_flops == 0 or 1.9 < a.fp8_flops / a.bf16_flops < 2.1 for a in ACCELERATORS.values())
