"""Ops on quantised arrays inside the rules by which a layer differentiates them, for the table of ops.

E experts, K choices of each token.
"""

import contextlib
import dataclasses
import functools

import jax
import numpy as np

from mesh.vma import unvary
from pallas_kernels import combine, permute, quantize, vma
from pallas_kernels.quantize.rounding import random_bytes
from tests.replicated import two_devices
from tests.replicated.check import Case
from tests.replicated.draw import normal, on_each_device, signs, whole

E, K = 4, 2


def row_moves():
    """Rows to an expert-sorted buffer and back, as they are or in FP8; each device has its own choices."""
    width = 1024
    chosen = np.stack([np.random.default_rng(t).permutation(E + 1)[:K] for t in range(2 * 3)]).astype(np.int32)
    inputs = dict(x=whole(0, 2, 3, width), experts=chosen.reshape(2, 3, K), sizes=np.zeros((2, E), np.int32))
    for name in ("mosaic", "xla", "reference"):

        def call(fold, w, inputs, name=name):
            def one(i):
                maps = permute.sort_rows(i["experts"], E, 12, align=2)[:2]
                rows = permute.permute(i["x"] * w, *maps, implementation=name)
                in_codes = through_codes(i["x"] * w, *maps, name)
                return combine.combine((rows + 2 * in_codes) * w, *maps, implementation=name)

            return on_each_device(one, inputs)

        within = two_devices.interpreted if name == "mosaic" else contextlib.nullcontext
        yield f"permute and combine by {name}", Case(call, signs(1, 1, width), inputs, exact=True, within=within)


def through_codes(x, row_of_pair, token_of_row, name):
    """Rows quantised on their way, with the gradient of rows that are not. Whole numbers up to three are exact codes."""

    @jax.custom_vjp
    def send(x, row_of_pair, token_of_row):
        return quantize.dequantize(permute.quantize_and_permute(x, row_of_pair, token_of_row, implementation=name))

    def backward(maps, g):
        return combine.combine(g, *maps, implementation=name), None, None

    send.defvjp(lambda x, *maps: (send(x, *maps), maps), backward)
    return send(*vma.align(x, row_of_pair, token_of_row))


def products():
    """x w^T of quantised operands with a gradient of quantised operands: formats for x and its gradient, and for w."""
    turned = dataclasses.replace(quantize.FORMATS["nvfp4"], hadamard=True)
    random = dataclasses.replace(turned, hadamard=False, stochastic=True)
    drawn = np.asarray(random_bytes(jax.random.key(0), (6, 128)))
    inputs = dict(x=normal(0, 6, 128), bytes=drawn)
    pairs = {
        "FP8 blocks": ("e4m3_1x128", "e4m3_128x128"),
        "MXFP8": ("mx_e4m3", "mx_e5m2"),
        "NVFP4, turned": (turned, turned),
        "NVFP4, at random": (random, "nvfp4_16x16"),
    }
    for about, (rows, weights) in pairs.items():
        for name in ("mosaic", "xla", "reference"):
            if about != "FP8 blocks" and (name == "mosaic" or ("turned" in about and name == "reference")):
                continue  # the kernels have one format; the oracle's matrix takes long to compile
            call = functools.partial(product_in_codes, rows, weights, name)
            within = two_devices.interpreted if name == "mosaic" else contextlib.nullcontext
            yield f"product in {about} by {name}", Case(call, normal(1, 128, 128), inputs, within=within)


def product_in_codes(row_format, weight_format, name, fold, w, inputs):
    def codes(x, format, bytes_, **options):
        format = quantize.formats.as_format(format)
        outer = dict(outer_amax=8.0) if format.kind == "nvfp4" else {}  # a device's own would depend on its rows
        drawn = dict(random_bytes=bytes_) if format.stochastic else {}
        return quantize.quantize(x, format, implementation=name, **outer, **drawn, **options)

    @jax.custom_vjp
    def product(x, w, bytes_):
        of_w = quantize.quantize_both(w, weight_format, implementation=name)[0]
        return quantize.dequantize(codes(x, row_format, bytes_)) @ quantize.dequantize(of_w).T

    def backward(kept, g):
        x, w, bytes_ = kept
        of_w = codes(w, weight_format, None)
        square = quantize.formats.as_format(weight_format).square
        of_w = quantize.transposed(of_w) if square else codes(w, weight_format, None, transpose=True)
        of_g, of_x = (quantize.dequantize(codes(a, row_format, bytes_)) for a in (g, x))
        return unvary(of_g @ quantize.dequantize(of_w).T, x), unvary(of_g.T @ of_x, w), None

    product.defvjp(lambda x, w, bytes_: (product(x, w, bytes_), (x, w, bytes_)), backward)
    return product(*vma.align(inputs["x"], w, inputs["bytes"]))
