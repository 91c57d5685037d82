"""A dense model's parameters as those of a Mixture-of-Experts model that computes the same (arXiv 2212.05055, 2410.07524).

L layers, D model width, E experts, F width of the dense MLP, f of an expert, G = F / f shares that an MLP is cut into.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from moex.config import ModelConfig


def granularity(dense: ModelConfig, model: ModelConfig) -> int:
    """Experts that one dense MLP is cut into.  Raises ValueError, with the numbers, when the models don't fit."""
    router, problems = model.router, []
    if dense.num_moe_layers:
        problems.append(f"the model to start from has {dense.num_moe_layers} layers with experts; it must be dense")
    if dense.dense_width % model.expert_width:
        problems.append(f"dense_width={dense.dense_width} doesn't divide into expert_width={model.expert_width}")
    shares = max(dense.dense_width // model.expert_width, 1)
    if router.num_experts % shares or router.top_k % shares:
        problems.append(
            f"router.num_experts={router.num_experts} and top_k={router.top_k} must be multiples of the {shares} experts "
            "that an MLP is cut into"
        )
    if not router.renormalize or router.num_groups > 1:
        problems.append(
            "router.renormalize must be on, and num_groups 1: the weights of a token's experts must sum to 1"
        )
    odd = [name for name in ("shared_width", "latent_width", "expert_bias", "swiglu_limit") if getattr(model, name)]
    if odd:
        problems.append(f"{', '.join(odd)} would add what the dense model hasn't: leave them out")
    same = ("vocab_size", "vocab_multiple", "d_model", "num_layers", "norm_eps", "tie_embeddings", "attention")
    if other := [name for name in same if getattr(dense, name) != getattr(model, name)]:
        problems.append(f"{', '.join(other)} must be those of the dense model")
    if problems:
        raise ValueError("upcycling: " + "; ".join(problems))
    return shares


def upcycled(dense: ModelConfig, model: ModelConfig, params: Mapping[str, Any], routers_LDE) -> dict[str, Any]:
    """The model's parameters, as a function of whole arrays that may be jitted with any shardings.

    Each layer's MLP is cut along its width into G experts and these are repeated E / G times. A router has E / G columns of
    its own, each for the G shares of one copy, so that a token's k experts are k / G whole copies. Shares are weighed by
    1 / G of their copy's weight, times the router's factor; up and down projections grow by the square root of what undoes
    that. The gate doesn't: its activation is not linear.

    Args:
      params: of the dense model.  routers_LDE: what routers would have been drawn as; their first E / G columns are used.
    """
    shares, experts = granularity(dense, model), model.router.num_experts
    copies, sparse = experts // shares, model.sparse_layers
    growth = (shares / model.router.scaling_factor) ** 0.5
    stack = params["dense_layers"]
    taken = lambda layers: jax.tree.map(lambda x: x[jnp.array(layers)], {k: v for k, v in stack.items() if k != "mlp"})
    gate_up, down = (stack["mlp"][name][jnp.array(sparse)] for name in ("gate_up", "down"))
    gate_up = jnp.stack([gate_up[:, :, 0], gate_up[:, :, 1] * growth], axis=2)
    num, d, _, width = gate_up.shape
    gate_up = gate_up.reshape(num, d, 2, shares, width // shares).transpose(0, 3, 1, 2, 4)
    down = (down * growth).reshape(num, shares, width // shares, d)
    repeated = lambda x: jnp.tile(x, (1, copies, *[1] * (x.ndim - 2)))
    moe = dict(
        router=dict(weight=jnp.repeat(routers_LDE[:, :, :copies], shares, axis=2)),
        experts=dict(gate_up=repeated(gate_up), down=repeated(down)),
    )
    tree = dict(ends=params["ends"], moe_layers=taken(sparse) | dict(moe=moe))
    if rest := [i for i in range(model.num_layers) if i not in sparse]:
        tree["dense_layers"] = jax.tree.map(lambda x: x[jnp.array(rest)], stack)
    return tree
