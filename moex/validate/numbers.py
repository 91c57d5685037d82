"""Problems of single numbers, as sentences."""

LARGEST = 3e38
"""Numbers above are infinite in float32."""


def not_above_zero(section: str, **numbers: float) -> list[str]:
    finite = lambda x: 0 < x <= LARGEST
    return [f"{section}.{name}={x} must be above 0 and finite" for name, x in numbers.items() if not finite(x)]


def negative(section: str, **numbers: float) -> list[str]:
    finite = lambda x: 0 <= x <= LARGEST
    return [f"{section}.{name}={x} must be at least 0 and finite" for name, x in numbers.items() if not finite(x)]


def divides(name: str, number: int, view: str, size: int) -> str:
    remedy = f"choose a multiple of {size}, or another parallel size"
    return f"{name}={number} doesn't divide by {view}={size}: {remedy}" if number % size else ""
