"""How the model lies over devices and how rows travel."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The two factorisations of the devices. dp and edp at 0 fill what the others leave."""

    pp: int = 1
    """Pipeline ranks, of both views: each runs a part of the layers for one micro-batch after the other."""
    virtual_pp: int = 1
    """Virtual stages of a pipeline rank: it runs this many parts of the layers that lie apart, so that it waits for others
    that many times less at a step's beginning and end (interleaved 1F1B)."""
    layout: str = ""
    """Layers of each stage as Megatron-Core writes them, stage = virtual stage x pp + rank: E embedding, t a layer, m a depth
    of multi-token prediction, L the loss, | ends a stage, x*n repeats (Et*3|(tt|)*29m|L). Empty: as equal as they divide."""
    dp: int = 0
    """Dense layers: data parallel."""
    cp: int = 1
    """Dense layers: context parallel."""
    tp: int = 1
    """Dense layers: tensor parallel with sequence parallelism."""
    context: Literal["gather", "ring", "ulysses", "hierarchical"] = "gather"
    """How context parallelism brings keys to queries: all-gather, a ring of blocks, all-to-all of heads, or all-to-all among
    neighbours and a ring over their groups."""
    ulysses: int = 1
    """hierarchical: neighbouring context-parallel ranks that trade heads, a divisor of cp between the two."""
    deal: Literal["row", "document"] = "row"
    """Context parallelism gives each rank an early and a late part of the whole row, or of every document in it: the same
    work for all where a row holds documents of unequal length."""
    cp_groups: tuple[int, ...] = ()
    """Dynamic context parallelism: over how many ranks of cp the documents of a micro-batch lie, one number for each equal
    share of a step's micro-batches, rising to cp (1 1 2 8). Short documents go where the ring is short. Empty: cp for all."""
    overlap: bool = False
    """Rows travel to experts and back beside computations of another micro-batch: each layer's forward pass runs with another
    layer's backward pass. Costs the memory of one more micro-batch a stage."""
    edp: int = 0
    """Experts: data parallel."""
    ep: int = 1
    """Experts: expert parallel."""
    etp: int = 1
    """Experts: tensor parallel."""
    zero: Literal[1, 3] = 1
    """Parameters are stored split over all devices that would repeat them; 1 gathers them once a step, 3 in each layer."""
    transport: Literal["local", "allgather", "alltoall", "ragged"] = "local"
    """How rows travel to their experts. local: nothing travels, every device holds all experts (ep = 1). allgather: every
    rank sees every token of its ep group. alltoall: static cells between every two ranks. ragged: exact sizes (GPUs)."""
    cell_factor: float = 0.0
    """alltoall: rows of a cell, in units of those of balanced routing; 0 takes the worst case, which cannot overflow."""
    spill_factor: float = 0.0
    """alltoall: rows that a device may send by way of others when cells are full, in units of balanced routing."""
    row_factor: float = 0.0
    """Rows of a device's expert buffer, in units of balanced routing; 0 takes the worst case, which cannot overflow."""
    waves: int = 1
    """Worst-case buffers are used for a device's tokens in this many parts one after another, and are as many times smaller:
    a last resort where the worst case of all tokens at once does not fit. Sums of weight gradients change in last bits."""
    echo_slots: int = 0
    """Spare expert slots of a device that hold clones of other devices' hot experts (ECHO); 0 leaves clones out."""
    echo: Literal["always", "retry", "report"] = "always"
    """ECHO: clone in every step, or only in steps that are run again after an overflow, or only say in the metrics what
    clones would do."""
    echo_cap: float = 1.1
    """ECHO: rows of a device from which on its hottest experts are cloned, in units of balanced routing."""
    echo_hot: int = 2
    """ECHO: experts of a device that may be cloned."""
    echo_wire: Literal["compute", "float8"] = "compute"
    """ECHO: clones' weights travel in the compute dtype, or as FP8 codes with a scale for each 128 x 128 block, which the
    clone then computes with; their gradients return in the compute dtype."""
    rungs: int = 3
    """Buffer sizes that are compiled when the factors are finite: those given, then growing ones, the last the worst case.
    A step that overflows one is run again with the next, and gives the bits it would have given there at once."""
    tail: float = 0.05
    """Share of steps that may overflow: a step starts with the smallest size that, by what the last steps needed, overflows
    no more often."""

    def groups_of(self, accumulation: int) -> tuple[int, ...]:
        """`cp_groups` of each micro-batch; all cp without any."""
        groups = self.cp_groups or (self.cp,)
        return tuple(group for group in groups for _ in range(accumulation // len(groups)))

    @property
    def bounded(self) -> bool:
        """Whether a buffer of dispatch may overflow."""
        return bool(self.cell_factor or self.row_factor)
