"""The resolved recipes of a model as a table for a person: product, multiplication, operand, format, what is kept, bytes."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from moex.precision.recipes import Precision
from pallas_kernels.quantize import Format

KEPT_HIGH = ("router", "embedding", "head", "norms", "softmax", "loss", "sums over experts, tokens and devices")
"""What is float32 always."""
WITHOUT_RECIPE = ("latent experts' projections", "further tokens' projections")
"""What is in the compute dtype always."""


class Row(NamedTuple):
    """product: a kind of `moex.precision.recipes.KINDS`.  weights: numbers of all its weights.  kept: codes for the backward
    pass.  bytes_per_number: with the scales' share.
    """

    product: str
    weights: int
    recipe: str
    multiplication: str
    operand: str
    format: str
    kept: bool
    bytes_per_number: float


def bytes_per_number(format: Format) -> float:
    """Codes and scales; the one scale of a whole array counts nothing."""
    codes = 0.5 if format.kind == "nvfp4" else 1.0
    scale_bytes = dict(block=4, tensor=0, mx=1, nvfp4=1)[format.kind]
    return codes + scale_bytes / (format.rows * format.columns)


def describe(format: Format) -> str:
    """In a few words, such as "float8_e4m3fn 1x128, scales 2^n"."""
    names = dict(float8_e4m3fn="E4M3", float8_e5m2="E5M2", float4_e2m1fn="E2M1")
    tile = "whole array" if format.kind == "tensor" else f"{format.rows}x{format.columns}"
    scales = dict(
        block="2^n" if format.power_of_two else "float32", tensor="2^n" if format.power_of_two else "float32",
        mx="E8M0", nvfp4="E4M3 under float32",
    )  # fmt: skip
    more = [word for word, on in (("turned", format.hadamard), ("stochastic", format.stochastic)) if on]
    return ", ".join([f"{names[format.dtype.name]} {tile}", f"scales {scales[format.kind]}", *more])


def rows(precision: Precision, weights: Mapping[str, int], compute_dtype: str) -> Iterator[Row]:
    """A row for each operand of the three multiplications of each kind of product.

    weights: numbers in the weights of each kind that the model has.
    """
    for kind, number in weights.items():
        if recipe := precision.recipe(kind):
            for multiplication, operand, format, kept in recipe.rows_of_table():
                size = bytes_per_number(format)
                yield Row(kind, number, recipe.name, multiplication, operand, describe(format), kept, size)
        else:
            size = 4.0 if compute_dtype == "float32" else 2.0
            for multiplication, operands in (("forward", "xw"), ("dgrad", ("dy", "w")), ("wgrad", ("x", "dy"))):
                for operand in operands:
                    kept = (multiplication, operand) == ("wgrad", "x")
                    yield Row(kind, number, "compute", multiplication, operand, compute_dtype, kept, size)
