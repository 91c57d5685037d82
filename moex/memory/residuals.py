"""What a layer keeps for its backward pass, by name: on the device, on the host, or not at all, to be computed again.

A layer marks with `named` what its backward pass may need: results of products, of attention and of communication. One
`jax.checkpoint` policy over the layer then says of each name where it stays. Other arrays follow from those in a few
elementwise operations, and are made again wherever there is such a policy. Names stand in `moex.config.Residual`.
"""

import functools
from collections.abc import Callable
from typing import Literal, get_args

import jax
from jax.ad_checkpoint import checkpoint_name

from moex.config import MemoryConfig, Module, Residual

Place = Literal["device", "again", "host"]

KEPT = "routing"
"""Name of what is always kept: a router's choice of experts, and the whole numbers that say where rows go."""
SMALL = ":small"
"""Ends the names of what stays on the device where the rest of its name goes to the host: it isn't worth a transfer."""

MODULES: tuple[Module, ...] = get_args(Module)
RESIDUALS: tuple[Residual, ...] = get_args(Residual)
ATTENTION: tuple[Residual, ...] = ("attn_norm", "qkv", "mla_down_proj", "mla_up_proj", "context", "core_attn")
MLP: tuple[Residual, ...] = ("mlp_norm", "mlp_fc1")
EXPERTS: tuple[Residual, ...] = ("expert_fc1",)
MOE: tuple[Residual, ...] = ("mlp_norm", "router", "expert_rows", "expert_fc1", "shared_experts", "latent_rows")


def members(module: Module, *, sparse: bool) -> tuple[Residual, ...]:
    """The names that a module stands for in a layer with experts (sparse) or with an MLP."""
    if module == "layer":
        return tuple(name for name in RESIDUALS if name != "layer_input")
    if module == "attention":
        return ATTENTION
    if sparse:
        return MOE if module == "moe" else EXPERTS if module == "experts" else ()
    return MLP if module == "mlp" else ()


def places(memory: MemoryConfig, *, sparse: bool) -> dict[Residual, Place]:
    """Where each name stays in such a layer. A name in `offload` goes to the host even if its module is computed again."""
    again = {m for name in memory.recompute for m in (members(name, sparse=sparse) if name in MODULES else (name,))}
    of = lambda name: "host" if name in memory.offload else "again" if name in again else "device"
    return {name: of(name) for name in RESIDUALS}


def kept(numbers):
    """The arrays of a tree, none of which is computed again: sorting a second time costs more than their few bytes a row."""
    return jax.tree.map(lambda x: checkpoint_name(x, KEPT), numbers)


def named(name: Residual, tree, *, small: bool = False):
    """A tree with its arrays under the name.  small: they never go to the host."""
    return jax.tree.map(lambda x: checkpoint_name(x, name + SMALL * small), tree)


def by_name(
    memory: MemoryConfig, *, sparse: bool, barrier: bool = False, gathers: bool = False
) -> Callable[[Callable], Callable]:
    """A wrapper for what computes a layer, or a part of it, that keeps what the configuration says.

    The function itself, with all that autodiff keeps, where nothing of such a layer is computed again or goes to the host.
    A function may close over arrays that need gradients.

    barrier: nothing is computed again before the gradient is there: for functions in no loop, whose two passes XLA would
    join, and for those whose backward pass has its place beside something. In a loop it would only have a layer wait for
    the last byte that comes from the host.
    gathers: it gathers its weights, which are then gathered again, too: all layers' together are what ZeRO-3 has no room for.
    """
    where = places(memory, sparse=sparse)
    if set(where.values()) == {"device"} and not gathers:
        return lambda function: function
    of = lambda place: [name for name in RESIDUALS if where[name] == place]
    stay = [KEPT, *of("device"), *(name + SMALL for name in RESIDUALS if where[name] != "again")]
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=stay, names_which_can_be_offloaded=of("host"),
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    return functools.partial(jax.checkpoint, policy=policy, prevent_cse=barrier)
