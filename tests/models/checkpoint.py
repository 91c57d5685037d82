"""Reads a tiny public checkpoint: its configuration as moex's, its weights and their gradients as moex's parameter tree.

L layers of a stack, D model width, N query heads, K key-value heads, H head width, E experts, F expert width, V vocabulary.
Public matrices are [out, in]; moex's are [in, ...out...] with heads and gate/up as dims of their own.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from moex.config import ModelConfig, RopeConfig
from moex.models import families

FOLDER = Path(__file__).parents[1] / "goldens" / "hf"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Golden:
    """One reference model: `config`, `params`, `gradients`, `bias_LE` (or None), and the reference's results by name."""

    def __init__(self, name: str):
        self.name = name
        self.public = json.loads((FOLDER / name / "config.json").read_text())
        self.config = CONFIGS[name](self.public)
        weights = load_file(FOLDER / name / "model.safetensors")
        self.expected = load_file(FOLDER / name / "expected.safetensors")
        read = Reader(self.config, weights)
        self.params = tree(self.config, read)
        self.unread = set(weights) - read.used
        gradients = {k.removeprefix("grad."): v for k, v in self.expected.items() if k.startswith("grad.")}
        read = Reader(self.config, gradients)
        self.gradients = tree(self.config, read)
        self.unread_gradients = set(gradients) - read.used
        layers = range(self.config.num_dense_layers, self.config.num_layers)
        biases = [weights.get(f"model.layers.{i}.mlp.gate.e_score_correction_bias") for i in layers]
        self.bias_LE = None if biases[0] is None else np.stack(biases)


def mixtral(c: dict) -> ModelConfig:
    model = families.mixtral(
        vocab_size=c["vocab_size"],
        d_model=c["hidden_size"],
        num_layers=c["num_hidden_layers"],
        expert_width=c["intermediate_size"],
        num_heads=c["num_attention_heads"],
        num_kv_heads=c["num_key_value_heads"],
        head_dim=c["hidden_size"] // c["num_attention_heads"],
        num_experts=c["num_local_experts"],
        top_k=c["num_experts_per_tok"],
    )
    return same(model, c)


def qwen3_moe(c: dict) -> ModelConfig:
    model = families.qwen3_moe(
        vocab_size=c["vocab_size"],
        d_model=c["hidden_size"],
        num_layers=c["num_hidden_layers"],
        expert_width=c["moe_intermediate_size"],
        num_heads=c["num_attention_heads"],
        num_kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        num_experts=c["num_local_experts"],
        top_k=c["num_experts_per_tok"],
    )
    return same(model, c)


def deepseek_v3(c: dict) -> ModelConfig:
    rope = c["rope_parameters"]
    model = families.deepseek_v3(
        vocab_size=c["vocab_size"],
        d_model=c["hidden_size"],
        num_layers=c["num_hidden_layers"],
        num_dense_layers=c["first_k_dense_replace"],
        dense_width=c["intermediate_size"],
        expert_width=c["moe_intermediate_size"],
        shared_width=c["n_shared_experts"] * c["moe_intermediate_size"],
        num_heads=c["num_attention_heads"],
        nope_dim=c["qk_nope_head_dim"],
        rope_dim=c["qk_rope_head_dim"],
        value_dim=c["v_head_dim"],
        q_latent_dim=c["q_lora_rank"],
        kv_latent_dim=c["kv_lora_rank"],
        num_experts=c["n_routed_experts"],
        top_k=c["num_experts_per_tok"],
        num_groups=c["n_group"],
        top_groups=c["topk_group"],
        rope=RopeConfig(
            theta=rope["rope_theta"],
            interleaved=c["rope_interleave"],
            factor=rope["factor"],
            original_context=rope["original_max_position_embeddings"],
            beta_fast=rope["beta_fast"],
            beta_slow=rope["beta_slow"],
            mscale=rope["mscale"],
            mscale_all_dim=rope["mscale_all_dim"],
        ),
    )
    assert model.router.scaling_factor == c["routed_scaling_factor"]
    return same(model, c)


def same(model: ModelConfig, c: dict) -> ModelConfig:
    """The model with the file's rope base, which tiny checkpoints choose freely; what the family fixes must agree."""
    assert model.norm_eps == c["rms_norm_eps"]
    assert model.router.renormalize == c.get("norm_topk_prob", True)
    assert model.tie_embeddings == c["tie_word_embeddings"]
    rope = replace(model.attention.rope, theta=c["rope_parameters"]["rope_theta"])
    return replace(model, attention=replace(model.attention, rope=rope))


CONFIGS: dict[str, Callable[[dict], ModelConfig]] = dict(mixtral=mixtral, qwen3_moe=qwen3_moe, deepseek_v3=deepseek_v3)


class Reader:
    """Public tensors by name, remembering which were used."""

    def __init__(self, config: ModelConfig, tensors: dict[str, np.ndarray]):
        self.config, self.tensors, self.used = config, tensors, set()

    def __call__(self, name: str) -> np.ndarray:
        self.used.add(name)
        return self.tensors[name]

    def t(self, name: str, *out: int) -> np.ndarray:
        """[out, in] -> [in, *out]."""
        weight = self(name).T
        return weight.reshape(weight.shape[0], *out) if out else weight

    def has(self, name: str) -> bool:
        return name in self.tensors


def tree(config: ModelConfig, read: Reader) -> dict:
    ends = dict(
        embedding=padded(read("model.embed_tokens.weight"), config),
        norm=dict(weight=read("model.norm.weight")),
        head=padded(read("lm_head.weight"), config),
    )
    layers = [layer(config, read, i) for i in range(config.num_layers)]
    dense, sparse = layers[: config.num_dense_layers], layers[config.num_dense_layers :]
    stacks = dict(dense_layers=dense, moe_layers=sparse)
    return dict(ends=ends) | {name: stacked(trees) for name, trees in stacks.items() if trees}


def padded(weight_VD: np.ndarray, config: ModelConfig) -> np.ndarray:
    return np.pad(weight_VD, ((0, config.padded_vocab_size - config.vocab_size), (0, 0)))


def stacked(trees):
    if isinstance(trees[0], dict):
        return {key: stacked([tree[key] for tree in trees]) for key in trees[0]}
    return np.stack(trees)


def layer(config: ModelConfig, read: Reader, i: int) -> dict:
    at = f"model.layers.{i}"
    common = dict(
        attention_norm=dict(weight=read(f"{at}.input_layernorm.weight")),
        attention=dict(gqa=grouped, mla=latent)[config.attention.kind](config, read, f"{at}.self_attn"),
        ffn_norm=dict(weight=read(f"{at}.post_attention_layernorm.weight")),
    )
    if i < config.num_dense_layers:
        return common | dict(mlp=mlp(read, f"{at}.mlp", "gate_proj", "up_proj", "down_proj"))
    mixtral_style = read.has(f"{at}.block_sparse_moe.gate.weight")
    block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral_style else ("mlp", PROJECTIONS)
    experts = range(config.router.num_experts)
    moe = dict(
        router=dict(weight=read.t(f"{at}.{block}.gate.weight")),
        experts=stacked([mlp(read, f"{at}.{block}.experts.{e}", *names) for e in experts]),
    )
    if config.shared_width:
        moe["shared"] = mlp(read, f"{at}.{block}.shared_experts", *PROJECTIONS)
    return common | dict(moe=moe)


def mlp(read: Reader, at: str, gate: str, up: str, down: str) -> dict:
    both = [read.t(f"{at}.{name}.weight") for name in (gate, up)]
    return dict(gate_up=np.stack(both, axis=1), down=read.t(f"{at}.{down}.weight"))


def grouped(config: ModelConfig, read: Reader, at: str) -> dict:
    a = config.attention
    weights = dict(
        query=read.t(f"{at}.q_proj.weight", a.num_heads, a.head_dim),
        key=read.t(f"{at}.k_proj.weight", a.num_kv_heads, a.head_dim),
        value=read.t(f"{at}.v_proj.weight", a.num_kv_heads, a.head_dim),
        out=read.t(f"{at}.o_proj.weight").reshape(a.num_heads, a.head_dim, config.d_model),
    )
    if a.qk_norm:
        weights["query_norm"] = dict(weight=read(f"{at}.q_norm.weight"))
        weights["key_norm"] = dict(weight=read(f"{at}.k_norm.weight"))
    return weights


def latent(config: ModelConfig, read: Reader, at: str) -> dict:
    a = config.attention
    return dict(
        query_down=read.t(f"{at}.q_a_proj.weight"),
        query_norm=dict(weight=read(f"{at}.q_a_layernorm.weight")),
        query_up=read.t(f"{at}.q_b_proj.weight", a.num_heads, a.head_dim + a.rope_dim),
        kv_down=read.t(f"{at}.kv_a_proj_with_mqa.weight"),
        kv_norm=dict(weight=read(f"{at}.kv_a_layernorm.weight")),
        kv_up=read.t(f"{at}.kv_b_proj.weight", a.num_heads, a.head_dim + a.value_dim),
        out=read.t(f"{at}.o_proj.weight").reshape(a.num_heads, a.value_dim, config.d_model),
    )
