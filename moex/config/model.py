"""What is trained: router, positions, attention and the decoder around them."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Which experts a token goes to, how they are weighed and how their load is balanced. All of it in float32."""

    num_experts: int = 8
    """Routed experts of a layer (E)."""
    top_k: int = 2
    """Experts a token is sent to (k)."""
    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Scores of the experts: softmax over all experts, or each expert's own sigmoid or sqrt(softplus)."""
    logit_bias: bool = False
    """Add a learned number to each expert's logit (GPT-OSS); not the balancing bias, which no gradient moves."""
    renormalize: bool = True
    """Scale the chosen scores to sum 1. softmax with it is Megatron's post-softmax, without it pre-softmax."""
    scaling_factor: float = 1.0
    """Factor on the weights, once, after renormalising (DeepSeek-V3: 2.5)."""
    num_groups: int = 1
    """Experts stand in this many equal groups; 1 leaves groups out."""
    top_groups: int = 1
    """Groups a token may choose from."""
    group_score_top: int = 2
    """A group's score is the sum of its best this many biased scores (DeepSeek-V3: 2; 1 is the maximum, DeepSeek-V2)."""
    selection: Literal["top_k", "sinkhorn", "quantile"] = "top_k"
    """How experts are picked: the k highest biased scores; in training those of a matrix that Sinkhorn's iteration made
    even; or the k highest of logits from which each expert's own quantile was taken (quantile balancing)."""
    aux_coefficient: float = 0.01
    """Weight of the balance loss of a micro-batch; 0 leaves it out."""
    sequence_coefficient: float = 0.0
    """Weight of the balance loss of each document by itself; 0 leaves it out."""
    global_coefficient: float = 0.0
    """Weight of the balance loss with the choices of the step's earlier micro-batches counted in; 0 leaves it out."""
    z_coefficient: float = 0.0
    """Weight of the z-loss on router logits; 0 leaves it out."""
    bias_rate: float = 0.0
    """Step of the balancing bias once a training step (DeepSeek-V3: 1e-3); 0 leaves the bias as it is."""
    bias_centred: bool = False
    """Take the mean over experts off the bias after each update; choices don't change by it."""
    quantile_decay: float = 0.9
    """quantile: share of the old thresholds in the new ones, each step."""
    capacity_factor: float = 0.0
    """Rows of a sequence that an expert takes in training, in units of balanced routing; the rest are dropped. 0 drops
    none."""
    capacity_policy: Literal["probability", "position"] = "probability"
    """Which rows are kept: the highest weights, or the first of the sequence."""
    pad_to_capacity: bool = False
    """Give every expert exactly its capacity, with empty rows where tokens lack: all sizes are static."""
    jitter: float = 0.0
    """Router inputs are multiplied by a random number between 1 minus and 1 plus this in training."""
    forced: Literal["", "balance", "skew"] = ""
    """For benchmarks: random logits in training in place of the router's, balanced, or the same experts hot everywhere."""
    forced_skew: float = 1.0
    """skew: standard deviation over experts of what is added to the random logits."""

    @property
    def noisy(self) -> bool:
        """Whether training draws random numbers for routing."""
        return self.jitter > 0 or self.forced != ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions; with factor above 1, stretched by YaRN."""

    theta: float = 10_000.0
    """Base of the frequencies."""
    interleaved: bool = False
    """Neighbouring features form a pair (DeepSeek), in place of the two halves of a head."""
    factor: float = 1.0
    """YaRN: how much longer contexts are than those the model was first trained on; 1 leaves YaRN out."""
    original_context: int = 4096
    """YaRN: the context length of first training."""
    beta_fast: float = 32.0
    """YaRN: features that turn more often than this within the original context are left alone."""
    beta_slow: float = 1.0
    """YaRN: features that turn less often than this are slowed by the whole factor."""
    mscale: float = 0.0
    """YaRN (DeepSeek): correction of the rotated features' size; 0 with `mscale_all_dim` 0 is the standard one."""
    mscale_all_dim: float = 0.0
    """YaRN (DeepSeek): correction of the softmax scale."""
    truncate: bool = True
    """YaRN: the ramp between kept and slowed features begins and ends at whole features (GPT-OSS: it doesn't)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention of every layer."""

    kind: Literal["gqa", "mla"] = "gqa"
    """Grouped-query attention, or DeepSeek's multi-head latent attention."""
    num_heads: int = 4
    """Query heads (N)."""
    num_kv_heads: int = 2
    """Key and value heads (K); MLA has as many as query heads."""
    head_dim: int = 32
    """Width of a head (H). For MLA: the part of a query or key without position."""
    qk_norm: bool = False
    """RMSNorm of each query and key head before rotation (Qwen3)."""
    qk_norm_joint: bool = False
    """qk_norm takes its mean over the features of all heads together (OLMoE), in place of each head's own."""
    bias: bool = False
    """Biases of the query, key and value projections (Qwen2-MoE, GLM-4.5, GPT-OSS)."""
    out_bias: bool = False
    """Bias of the output projection (GPT-OSS)."""
    sinks: bool = False
    """A learned logit for each head that takes part in its softmax and brings no value (GPT-OSS)."""
    soft_cap: float = 0.0
    """Attention logits x become soft_cap tanh(x / soft_cap); 0 leaves them."""
    sliding_window: int = 0
    """A token sees itself and this many minus one tokens before it; 0 sees the whole document."""
    window_pattern: tuple[int, ...] = ()
    """Which layers have the window, repeated over the layers: 1 has it, 0 sees the whole document. Empty: all have it."""
    q_latent_dim: int = 0
    """MLA: width of the query latent; 0 projects queries directly."""
    kv_latent_dim: int = 0
    """MLA: width of the key-value latent."""
    rope_dim: int = 0
    """MLA: width of the rotated part of a query, and of the one rotated key that all heads share. gqa: only the first this
    many features of a head are rotated (GLM-4.5); 0 rotates all."""
    value_dim: int = 0
    """MLA: width of a value head."""
    rope: RopeConfig = RopeConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder: layers with a dense MLP, layers with experts."""

    vocab_size: int = 256
    """Token ids are below this (V)."""
    vocab_multiple: int = 128
    """Embedding and head have rows up to the next multiple of this; the added ones never win and never learn."""
    d_model: int = 128
    """Width of the residual stream (D)."""
    num_layers: int = 4
    """All layers (L)."""
    num_dense_layers: int = 0
    """The first this many layers have a dense MLP in place of experts."""
    moe_every: int = 1
    """Of the layers after those, every this many-th has experts, the others a dense MLP."""
    dense_width: int = 512
    """Width of the dense MLP (its own F)."""
    expert_width: int = 128
    """Width of an expert (F)."""
    shared_width: int = 0
    """Width of the shared expert that every token passes; 0 has none."""
    shared_gate: bool = False
    """The shared expert's result is weighed by a sigmoid of the token (Qwen2-MoE)."""
    expert_bias: bool = False
    """Biases of the experts' projections (GPT-OSS)."""
    swiglu_limit: float = 0.0
    """Experts clamp gate and up to this, and multiply up + 1 by gate sigmoid(swiglu_alpha gate) (GPT-OSS: 7); 0 is plain
    SwiGLU."""
    swiglu_alpha: float = 1.702
    """swiglu_limit: steepness of the sigmoid."""
    latent_width: int = 0
    """Latent MoE: tokens are projected to this width before they are sent, and back after they are summed; router and
    shared expert see d_model. 0 sends tokens as they are."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of initial weights; projections back to the residual stream get it over sqrt(2 L)."""
    tie_embeddings: bool = False
    """Use the embedding as the head."""
    mtp_depth: int = 0
    """Multi-token prediction in training: layers with experts after the last, each of which predicts one token further."""
    mtp_coefficient: float = 0.1
    """Weight of the mean of their losses."""
    attention: AttentionConfig = AttentionConfig()
    router: RouterConfig = RouterConfig()

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts."""
        every = max(self.moe_every, 1)  # a wrong one is told by validation
        return tuple(range(self.num_dense_layers + every - 1, self.num_layers, every))

    @property
    def num_moe_layers(self) -> int:
        return len(self.sparse_layers)

    @property
    def num_routers(self) -> int:
        """Layers with experts, those of multi-token prediction with them, which come last wherever routers are counted."""
        return self.num_moe_layers + self.mtp_depth

    @property
    def num_mlp_layers(self) -> int:
        """Layers with a dense MLP: the first ones, and those between MoE layers."""
        return self.num_layers - self.num_moe_layers

    @property
    def expert_in_width(self) -> int:
        """Width of the rows that experts take and give."""
        return self.latent_width or self.d_model

    def window(self, layer: int) -> int:
        """Sliding window of a layer, 0 where it sees the whole document."""
        pattern = self.attention.window_pattern
        return self.attention.sliding_window if not pattern or pattern[layer % len(pattern)] else 0

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
