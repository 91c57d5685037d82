"""Ways to fold eight devices: sizes of dp, cp, tp, and of edp, ep, etp."""

FOLDINGS = [
    ((8, 1, 1), (1, 8, 1)),
    ((2, 2, 2), (2, 4, 1)),
    ((2, 2, 2), (1, 8, 1)),
    ((1, 4, 2), (2, 2, 2)),
    ((4, 1, 2), (1, 4, 2)),
    ((8, 1, 1), (4, 2, 1)),
    ((1, 1, 8), (1, 8, 1)),
    ((1, 8, 1), (1, 8, 1)),
    ((1, 2, 4), (1, 2, 4)),
    ((2, 1, 4), (1, 4, 2)),
]


def sizes(dense: tuple[int, int, int], expert: tuple[int, int, int]) -> tuple[dict[str, int], dict[str, int]]:
    """The same by name, as `mesh.fold` takes them."""
    return dict(zip(("dp", "cp", "tp"), dense, strict=True)), dict(zip(("edp", "ep", "etp"), expert, strict=True))
