"""What moex quantises inside rules of its own: experts in FP8, clones' weights that travel as codes.

E experts, R rows of a device, W the width of everything, S slots for clones.
"""

import jax.numpy as jnp
import numpy as np

from moex.balance import echo
from moex.layers import param
from moex.precision.experts import fp8_expert_mlp
from tests.replicated.check import Case
from tests.replicated.draw import normal, on_each_device, whole

E, R, W = 4, 10, 128
SIZES = np.array([[3, 0, 4, 1], [0, 5, 0, 5]], np.int32)  # rows of each expert on each device; two rows past the last
SLOTS = np.array([[2], [1]], np.int32)  # of the two devices, each a clone of one of the other's experts


def cases():
    """Tiles of tokens are a device's own here, so gradients agree up to sums of float32."""
    matrices = dict(gate_up=normal(0, E, W, 2 * W) / 11, down=normal(1, E, W, W) / 11)
    inputs = dict(x=normal(2, 2, R, W), weights=np.abs(normal(3, 2, R)), sizes=SIZES)

    def experts(fold, w, inputs):
        one = lambda i: fp8_expert_mlp(i["x"], i["weights"], i["sizes"], w["gate_up"], w["down"])
        return on_each_device(one, inputs)

    yield "experts in FP8", Case(experts, matrices, inputs)

    def fetched(fold, w, inputs):
        if fold.names:
            clones = echo.fetch_in_float8(w["w"], jnp.asarray(SLOTS), 1, fold.expert.ep)
        else:
            clones = w["w"][SLOTS[:, 0]]
        return clones * inputs["x"]

    declared = dict(w=param.Declaration(shape=(E, W, W), axes=("ep", None, None)))
    given = dict(declared=declared, expert=dict(ep=2), exact=True, communicates=True)
    yield "clones' weights in FP8", Case(fetched, dict(w=whole(4, E, W, W)), dict(x=whole(5, 2, W, W)), **given)
