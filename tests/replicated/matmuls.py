"""Grouped matmuls that kernels or float8 codes make, inside the rules by which a layer differentiates them.

E experts, R rows of a device, W the width of everything.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from mesh.vma import unvary
from pallas_kernels import grouped_matmul, quantize, swiglu
from pallas_kernels import scaled_grouped_matmul as scaled
from tests.replicated import two_devices
from tests.replicated.check import Case
from tests.replicated.draw import normal, on_each_device, whole

E, R, W = 4, 10, 128
SIZES = np.array([[3, 0, 4, 1], [0, 5, 0, 5]], np.int32)  # rows of each expert on each device; two rows past the last


def by_hopper():
    """The kernels, interpreted. Whole numbers up to three are exact in every format, and so are their short sums."""
    inputs, weights = dict(x=whole(0, 2, R, W), sizes=SIZES), whole(1, E, W, W)
    config = grouped_matmul.HopperConfig(columns=128, stages=2, num_sms=1)

    def bfloat16(fold, w, inputs):
        options = dict(implementation="mosaic", config=config, preferred_element_type=jnp.float32)
        one = lambda i: grouped_matmul.grouped_matmul(
            i["x"].astype(jnp.bfloat16), w.astype(jnp.bfloat16), i["sizes"], **options
        )
        return on_each_device(one, inputs)

    yield "grouped matmul by mosaic", Case(bfloat16, weights, inputs, exact=True, within=two_devices.interpreted)


def of_float8():
    inputs, weights = dict(x=whole(0, 2, R, W), sizes=SIZES), whole(1, E, W, W)
    for name in ("mosaic", "xla", "reference"):
        product = float8_product(name)
        call = lambda fold, w, inputs, product=product: on_each_device(lambda i: product(i["x"], w, i["sizes"]), inputs)
        within = two_devices.interpreted if name == "mosaic" else contextlib.nullcontext
        yield f"scaled grouped matmul by {name}", Case(call, weights, inputs, exact=True, within=within)


def float8_product(name):
    """A layer's rule on the block-scaled product: float32 rows and weights, quantised with scales of one."""
    code = lambda x: x.astype(jnp.float8_e4m3fn)
    ones = lambda *shape: jnp.ones(shape, jnp.float32)
    small = dict(implementation=name, config=scaled.Config(columns=128, stages=2, num_sms=1), out_dtype=jnp.float32)

    @jax.custom_vjp
    def product(x, w, sizes):
        codes = code(w).swapaxes(1, 2)
        return scaled.scaled_grouped_matmul(code(x), ones(len(x), 1), codes, ones(E, 1, 1), sizes, **small)

    def backward(kept, g):
        x, w, sizes = kept
        weights = scaled.transposed(code(w).swapaxes(1, 2), ones(E, 1, 1))
        dx = scaled.dgrad(code(g), ones(len(g), 1), *weights, sizes, **small)
        rows = lambda x: code(jnp.pad(x, ((0, 128 - len(x)), (0, 0)))).T
        scales = ones(x.shape[1], 1)
        config = scaled.GradConfig(stages=2, num_sms=1)
        total = jnp.zeros(w.swapaxes(1, 2).shape, jnp.float32)
        dw = scaled.wgrad(rows(g), scales, rows(x), scales, sizes, total=total, implementation=name, config=config)
        return unvary(dx, x), unvary(dw.swapaxes(1, 2), w), None

    product.defvjp(lambda x, w, sizes: (product(x, w, sizes), (x, w, sizes)), backward)
    return product


def experts_of_float8():
    """A layer's rule on gate and up products with their activation: `swiglu.backward`, `dgrad` and `wgrad`."""
    inputs = dict(x=whole(0, 2, R, W), weights=np.abs(normal(2, 2, R)), sizes=SIZES)
    code = lambda x: jnp.pad(x, ((0, W - len(x)), (0, 0))).astype(jnp.float8_e4m3fn)
    ones = lambda *shape: jnp.ones(shape, jnp.float32)

    def forward(x, w, weights, sizes):
        weights = jnp.pad(weights, (0, W - len(weights)))
        codes = w.astype(jnp.float8_e4m3fn)
        return swiglu.gate_up(code(x), ones(W, 1), codes, ones(E, 2, 1, 1), weights, sizes), weights

    @jax.custom_vjp
    def expert(x, w, weights, sizes):
        return quantize.dequantize(forward(x, w, weights, sizes)[0].hidden)[: len(x)]

    def keep(x, w, weights, sizes):
        (hidden, gate, up), padded = forward(x, w, weights, sizes)
        return quantize.dequantize(hidden)[: len(x)], (x, w, weights, padded, sizes, gate, up)

    def backward(kept, g):
        x, w, weights, padded, sizes, gate, up = kept
        g = jnp.pad(g, ((0, W - len(g)), (0, 0))).astype(jnp.bfloat16)
        found = swiglu.backward(g, gate, up, padded, sizes)
        matrix = scaled.transposed(w.reshape(E, -1, W).astype(jnp.float8_e4m3fn), ones(E, 2, 1))
        dx = scaled.dgrad(found.rows.codes, found.rows.scales, *matrix, sizes, out_dtype=jnp.float32)[: len(x)]
        dw = scaled.wgrad(*found.columns[:2], code(x).T, ones(W, 1), sizes).reshape(w.shape)
        return unvary(dx, x), unvary(dw, w), unvary(found.weights_R[: len(x)], weights), None

    expert.defvjp(keep, backward)
    call = lambda fold, w, inputs: on_each_device(lambda i: expert(i["x"], w, i["weights"], i["sizes"]), inputs)
    yield "float8 experts", Case(call, whole(1, E, 2, W, W), inputs)
