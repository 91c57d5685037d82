"""A ring of tiles in shared memory, between the warpgroup that copies them in and those that multiply them.

The copying warpgroup runs ahead through all tiles' steps, over the borders of output tiles: while the others finish one
output tile, the next one's operands arrive. A step is a running number; its slot is the remainder by the ring's length.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Ring:
    """full, empty: barriers with `slots` members each; a slot is full when all its copies arrived."""

    full: Any
    empty: Any
    slots: int

    @staticmethod
    def scratch(slots: int, *, copies: int, readers: int) -> tuple:
        """Scratch types of (full, empty): `copies` a step, read by `readers` warpgroups."""
        return (
            plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
            plgpu.Barrier(num_arrivals=readers, num_barriers=slots),
        )

    def open(self) -> None:
        """Called once by every reader: all slots are free."""
        for slot in range(self.slots):
            plgpu.barrier_arrive(self.empty.at[slot])

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.slots))

    def next_free(self, step):
        """Waits for the step's slot; returns it with the barrier that its copies must signal."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.empty.at[slot])
        return slot, self.full.at[slot]

    def next_full(self, step):
        """Waits for the step's copies; returns their slot."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.full.at[slot])
        return slot

    def release(self, slot) -> None:
        """Called by every reader when it has read the slot for the last time."""
        plgpu.barrier_arrive(self.empty.at[slot])

    def drain(self, steps) -> None:
        """Called by the copying warpgroup at its end: waits until all slots were read, as barriers must end in rest."""

        def wait(i, _):
            plgpu.barrier_wait(self.empty.at[self.slot(steps + i)])

        lax.fori_loop(0, self.slots, wait, None)
