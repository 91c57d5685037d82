"""Every op of the step on replicated weights has the gradients of one device: inputs split, and inputs replicated too."""

import jax
import numpy as np
import pytest

from mesh import collectives
from mesh.vma import typed, unvary, vary, varying
from tests.dispatch.stand_in import ragged_on_cpus
from tests.replicated.check import check
from tests.replicated.table import CASES, host_matmul, kernel_case

__all__ = ["ragged_on_cpus"]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_device(name, ragged_on_cpus):
    check(CASES[name])


def forgets_the_sum(cotangent, primal):
    """One device's part, passed off as the gradient of all."""
    relabel = lambda x: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return cotangent if varying(primal) else relabel(cotangent)


def sums_twice(cotangent, primal):
    extra = tuple(varying(cotangent) - varying(primal))
    return collectives.psum(unvary(cotangent, primal), extra)


def satisfies_the_types(cotangent, primal):
    return vary(unvary(cotangent, primal), varying(primal))


KERNEL = typed(host_matmul)
FAULTS = {
    "an untyped kernel": kernel_case(host_matmul, KERNEL, satisfies_the_types),
    "a backward rule that forgets the sum": kernel_case(KERNEL, KERNEL, forgets_the_sum),
    "a backward rule that sums twice": kernel_case(KERNEL, KERNEL, sums_twice),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_silently_wrong_gradient_is_caught(fault):
    with pytest.raises(AssertionError, match=r"split, \[0\]"):
        check(FAULTS[fault])


def test_a_backward_rule_without_its_sum_is_refused_by_its_type():
    with pytest.raises(ValueError, match="manual axis types do not match"):
        check(kernel_case(KERNEL, KERNEL, lambda cotangent, primal: cotangent))
