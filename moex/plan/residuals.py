"""What each named result of a layer weighs, and what it costs to compute it again or to send it to the host.

T tokens of a device between layers, A tokens that its heads see (tp x T), D width, N heads, H head width, R expert rows.
All figures are of one GPU, micro-batch and layer.
"""

from typing import NamedTuple

import jax.numpy as jnp

from mesh import Fold
from moex.config import ModelConfig, Residual, RunConfig
from moex.memory.residuals import MOE, RESIDUALS, places
from moex.plan.rates import DEFAULT, Shares
from moex.plan.sizes import Sizes, sizes
from moex.plan.target import Target
from moex.validate.memory import without


class Cost(NamedTuple):
    """layers: that have such a result.  num_bytes: kept of each.  flops: of its products, computed again.  sent_bytes: that
    this device gets from others again.  again_s: of the products at the assumed share of the peak.  host_s: one way to the
    host at the link's data-sheet rate.
    """

    name: Residual
    layers: int
    num_bytes: float
    flops: float
    sent_bytes: float
    again_s: float
    host_s: float


def costs(config: RunConfig, fold: Fold, target: Target, shares: Shares = DEFAULT) -> list[Cost]:
    """Of every name that the configuration can recompute or offload."""
    gpu, n, found = target.accelerator, sizes(config, fold), []
    for name in RESIDUALS:
        layers = _layers(name, config.model)
        if without(name, config) or not layers:
            continue
        per_kind = [layer_bytes(config, fold, n, sparse=sparse).get(name, 0.0) for sparse in (False, True)]
        kept = (per_kind[0] * config.model.num_mlp_layers + per_kind[1] * config.model.num_routers) / layers
        flops, sent = _again(config, fold, n).get(name, (0.0, 0.0))
        share = shares.kernel if name in ("expert_fc1", "latent_rows") else shares.matmul
        times = flops / (gpu.bf16_flops * share), kept / gpu.host_bytes_per_s
        found.append(Cost(name, layers, kept, flops, sent, *times))
    return found


def _layers(name: Residual, model: ModelConfig) -> int:
    every, sparse = model.num_layers + model.mtp_depth, model.num_routers
    if name == "mlp_fc1":
        return model.num_mlp_layers
    return sparse if name in MOE and name != "mlp_norm" else every


def kept_bytes(config: RunConfig, fold: Fold, *, on_host: bool = False) -> float:
    """Of all layers, what is kept under names on the device, or on the host."""
    model, memory, n = config.model, config.memory, sizes(config, fold)
    total = 0.0
    for sparse, layers in ((False, model.num_mlp_layers), (True, model.num_routers)):
        where = places(memory, sparse=sparse)
        held = layer_bytes(config, fold, n, sparse=sparse)
        total += layers * sum(held.get(name, 0.0) for name in RESIDUALS if (where[name] == "host") == on_host
                              and where[name] != "again")  # fmt: skip
    return total


def layer_bytes(config: RunConfig, fold: Fold, n: Sizes, *, sparse: bool) -> dict[Residual, float]:
    """What a layer keeps under each name when it keeps them all, in the compute dtype."""
    model, parallel, width = config.model, config.parallel, jnp.dtype(config.precision.compute_dtype).itemsize
    tp, etp, d = fold.size(fold.dense.tp), fold.size(fold.expert.etp), model.d_model
    between, seen = float(n.tokens * d * width), float(n.tokens * tp * width)
    found: dict[Residual, float] = dict(layer_input=between, attn_norm=seen * d, attn_proj=between)
    found |= _attention_bytes(config, fold, n.tokens * tp, width)
    if not sparse:
        found["mlp_norm"], found["mlp_fc1"] = seen * d, seen * 2 * model.dense_width / tp
        return found
    experts = model.router.num_experts
    rows = 0.0 if parallel.waves > 1 and not parallel.bounded else float(n.rows * width)
    if config.memory.stash:
        rows = float(n.used_rows * width * (config.memory.stash_factor or n.rows / n.used_rows))
    shared = bool(model.shared_width)
    of_experts: dict[Residual, float] = dict(
        mlp_norm=between + (seen * d if shared and tp > 1 else 0.0),
        router=4.0 * n.tokens * experts,
        expert_rows=rows * model.expert_in_width,
        expert_fc1=rows * 2 * model.expert_width / etp,
        shared_experts=seen * 2 * model.shared_width / tp + (between if model.shared_gate else 0.0),
        latent_rows=float(n.tokens * model.latent_width * width),
    )
    return found | of_experts


def _attention_bytes(config: RunConfig, fold: Fold, tokens: int, width: int) -> dict[Residual, float]:
    """What context parallelism has brought together needs no keeping where it came from, unless a norm follows there."""
    a, tp, cp = config.model.attention, fold.size(fold.dense.tp), fold.size(fold.dense.cp)
    method = config.parallel.context if cp > 1 else "none"
    gathered, traded, token = method == "gather", method == "ulysses", float(tokens * width)
    latent, heads = a.kind == "mla", a.num_heads / tp
    keys = heads if latent else max(a.num_kv_heads / tp, 1)
    head = a.head_dim + (a.rope_dim if latent else 0)
    q, k = heads * head, keys * head
    brought = cp * 2 * k if gathered else 2 * q + 2 * k if traded else 0.0
    found: dict[Residual, float] = dict(context=token * brought)
    found["core_attn"] = tokens * q * (4 if method == "ring" else width)
    if latent:
        up = (0.0 if traded else q) + (0.0 if gathered or traded else heads * (a.head_dim + a.value_dim))
        found["mla_down_proj"] = token * (a.q_latent_dim + a.kv_latent_dim + a.rope_dim)
        found["mla_up_proj"] = token * up
        return found
    normed = a.qk_norm or a.qk_norm_joint
    there = (q if normed or not traded else 0.0) + (k if normed or method in ("none", "ring") else 0.0)
    found["qkv"] = token * (there + (0.0 if gathered or traded else k))
    return found


def _again(config: RunConfig, fold: Fold, n: Sizes) -> dict[Residual, tuple[float, float]]:
    """(FLOPs, bytes from other devices) of making each name from those before it."""
    model, a, d = config.model, config.model.attention, config.model.d_model
    width = jnp.dtype(config.precision.compute_dtype).itemsize
    tp, cp, etp = (fold.size(axes) for axes in (fold.dense.tp, fold.dense.cp, fold.expert.etp))
    seen, heads = float(n.tokens * tp), a.num_heads / tp
    head = a.head_dim + (a.rope_dim if a.kind == "mla" else 0)
    value = a.value_dim if a.kind == "mla" else a.head_dim
    over_tp = (tp - 1) * n.tokens * d * float(width)
    context = _attention_bytes(config, fold, n.tokens * tp, width)["context"] * (cp - 1) / cp
    used, inner = float(n.used_rows), model.expert_width / etp
    travels = (
        (n.slots or (n.rows if config.parallel.transport != "local" else 0)) * model.expert_in_width * float(width)
    )
    queries = a.q_latent_dim or d
    return dict(
        attn_norm=(0.0, over_tp),
        qkv=(2 * seen * d * (heads + 2 * max(a.num_kv_heads / tp, 1)) * a.head_dim, 0.0),
        mla_down_proj=(2 * seen * d * (a.q_latent_dim + a.kv_latent_dim + a.rope_dim), 0.0),
        mla_up_proj=(2 * seen * heads * (queries * head + a.kv_latent_dim * (a.head_dim + a.value_dim)), 0.0),
        context=(0.0, context),
        core_attn=(seen * config.train.seq_len * heads * (head + value), 0.0),
        attn_proj=(2 * seen * heads * value * d, over_tp),
        mlp_norm=(0.0, over_tp if model.num_mlp_layers or model.shared_width else 0.0),
        mlp_fc1=(2 * seen * d * 2 * model.dense_width / tp, 0.0),
        router=(2.0 * n.tokens * d * model.router.num_experts, 0.0),
        expert_rows=(0.0, travels),
        expert_fc1=(2 * used * model.expert_in_width * 2 * inner, 0.0),
        shared_experts=(2 * seen * d * 2 * model.shared_width / tp, 0.0),
        latent_rows=(2 * used * model.expert_in_width * inner, travels),
    )
