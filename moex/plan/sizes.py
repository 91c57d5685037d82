"""How many tokens and rows one GPU has in a micro-batch.

T tokens of a device between layers, R rows of its experts' buffer.
"""

from typing import NamedTuple

from mesh import Fold
from moex import dispatch
from moex.config import RunConfig
from moex.precision.recipes import resolve


class Sizes(NamedTuple):
    """tokens: T.  rows: R, of the expert buffer.  used_rows: of it when routing is balanced.  slots: rows that a device
    sends in a dispatch, with its spill.
    """

    tokens: int
    rows: int
    used_rows: int
    slots: int

    @property
    def row_share(self) -> float:
        return min(1.0, self.used_rows / self.rows) if self.rows else 1.0


def sizes(config: RunConfig, fold: Fold) -> Sizes:
    """Of one device and micro-batch."""
    train, router, p = config.train, config.model.router, config.parallel
    tokens = train.batch_size // train.accumulation * train.seq_len // fold.size(fold.dense.tokens)
    if not config.model.num_moe_layers:
        return Sizes(tokens, 0, 0, 0)
    etp = fold.size(fold.expert.etp)
    align = resolve(config.precision).align
    wave = tokens // (p.waves if not p.bounded else 1)
    budget = dispatch.sizes(
        wave, router.top_k, router.num_experts, fold, cell_factor=p.cell_factor, spill_factor=p.spill_factor,
        row_factor=p.row_factor, align=align,
    )  # fmt: skip
    slots = 0
    if p.transport == "alltoall":
        ranks = fold.size(fold.expert.ep)
        slots = ranks * (budget.cell_rows + -(-budget.spill_rows // ranks))
    return Sizes(tokens, budget.rows, min(budget.rows, wave * etp * router.top_k), slots)
