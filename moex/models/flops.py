"""Model FLOPs of training one token, and parameter counts: what MFU is measured with.

The formula is Megatron-Core's: 6 FLOPs (one multiply-add in the forward pass, two in the backward pass) for each weight
that a token meets in a matmul, and for each query-key and score-value product, of which causality needs half. Experts
count k times; the router, recompute, padding and dropped rows don't count.
"""

from moex.config import AttentionConfig, ModelConfig
from moex.layers import param


def train_flops_per_token(model: ModelConfig, seq_len: int, *, mtp_depth: int | None = None) -> float:
    """FLOPs of one token's forward and backward pass in rows of `seq_len` tokens.

    mtp_depth: multi-token-prediction layers (None: the model's), each one more MoE layer with two norms, a 2D x D
    projection and the head.
    """
    mtp_depth = model.mtp_depth if mtp_depth is None else mtp_depth
    d = model.d_model
    attention = _attention(model.attention, d, seq_len)
    dense = 3 * d * model.dense_width
    routed = 3 * model.expert_in_width * model.router.top_k * model.expert_width + 2 * d * model.latent_width
    sparse = routed + 3 * d * model.shared_width
    layers = model.num_layers * attention + model.num_mlp_layers * dense + model.num_moe_layers * sparse
    mtp = attention + sparse + 3 * d + 2 * d * d
    head = model.vocab_size * d * (1 + mtp_depth)
    return 6.0 * (layers + mtp_depth * mtp + head)


def _attention(attention: AttentionConfig, d: int, seq_len: int) -> float:
    a, n = attention, attention.num_heads
    if a.kind == "gqa":
        q, kv = n * a.head_dim, a.num_kv_heads * a.head_dim
        return d * (q + 2 * kv) + q * d + seq_len * q
    width = a.head_dim + a.rope_dim
    query = a.q_latent_dim * (d + n * width + 1) if a.q_latent_dim else d * n * width
    keys = a.kv_latent_dim * (d + n * (a.head_dim + a.value_dim) + 1) + d * a.rope_dim
    return query + keys + n * a.value_dim * d + seq_len * n * (width + a.value_dim) / 2


def mfu(flops_per_token: float, tokens_per_s: float, num_devices: int, peak_flops: float | None) -> float | None:
    """Share of the devices' BF16 peak that model FLOPs use; None without a listed peak."""
    return flops_per_token * tokens_per_s / (num_devices * peak_flops) if peak_flops else None


def num_parameters(declarations, model: ModelConfig) -> tuple[int, int]:
    """(all parameters, parameters that one token meets). Padding rows of the vocabulary aren't counted."""
    total = active = 0

    def add(name: str, d: param.Declaration) -> None:
        nonlocal total, active
        size = 1
        for n in d.full_shape:
            size *= n
        if d.valid_rows:
            size = size // d.shape[0] * d.valid_rows
        total += size
        active += size * model.router.top_k // model.router.num_experts if ".experts." in name else size

    param.named_map(add, declarations)
    return total, active
