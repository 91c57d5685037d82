"""Every setting of a run: frozen dataclasses, one a section. Defaults are those of a small model on one device.

Values are plain (numbers, strings, tuples), so a resolved configuration is a JSON file that can be loaded again.
"""

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
    sliding_window: int = 0
    """A token sees itself and this many minus one tokens before it; 0 sees the whole document."""
    q_latent_dim: int = 0
    """MLA: width of the query latent; 0 projects queries directly."""
    kv_latent_dim: int = 0
    """MLA: width of the key-value latent."""
    rope_dim: int = 0
    """MLA: width of the rotated part of a query, and of the one rotated key that all heads share."""
    value_dim: int = 0
    """MLA: width of a value head."""
    rope: RopeConfig = RopeConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder: dense layers first, then MoE layers."""

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
    dense_width: int = 512
    """Width of the dense MLP (its own F)."""
    expert_width: int = 128
    """Width of an expert (F)."""
    shared_width: int = 0
    """Width of the shared expert that every token passes; 0 has none."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of initial weights; projections back to the residual stream get it over sqrt(2 L)."""
    tie_embeddings: bool = False
    """Use the embedding as the head."""
    attention: AttentionConfig = AttentionConfig()
    router: RouterConfig = RouterConfig()

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The two factorisations of the devices. dp and edp at 0 fill what the others leave."""

    pp: int = 1
    """Pipeline stages, of both views."""
    dp: int = 0
    """Dense layers: data parallel."""
    cp: int = 1
    """Dense layers: context parallel."""
    tp: int = 1
    """Dense layers: tensor parallel with sequence parallelism."""
    context: Literal["gather", "ring", "ulysses"] = "gather"
    """How context parallelism brings keys to queries: all-gather, a ring of blocks, or all-to-all of heads."""
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

    @property
    def bounded(self) -> bool:
        """Whether a buffer of dispatch may overflow."""
        return bool(self.cell_factor or self.row_factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run's length and batch."""

    steps: int = 400
    """Optimizer steps."""
    batch_size: int = 16
    """Rows (sequences) of a step over all devices."""
    accumulation: int = 1
    """Micro-batches that a step's batch is cut into."""
    seq_len: int = 256
    """Tokens of a row (S)."""
    seed: int = 0
    """Of initial values and data order."""
    run_ahead: int = 1
    """Steps that are enqueued before the numbers of an earlier one are read."""
    loss_chunk_tokens: int = 2048
    """Logits are held for this many tokens of a device at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning rate, clipping (optax)."""

    name: Literal["adamw", "sgd"] = "adamw"
    peak_lr: float = 2e-3
    """Learning rate after warm-up."""
    final_lr: float = 2e-4
    """Learning rate at the last step."""
    warmup_steps: int = 40
    """Steps of linear warm-up from 0."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Way from the peak to the final rate after warm-up."""
    weight_decay: float = 0.1
    """AdamW's decoupled decay, of matrices only (not norms, biases)."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 doesn't clip."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Formats of compute. Parameters, optimizer, router, norms' statistics, loss and reductions are float32 always."""

    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of activations and weights in attention, MLP and experts."""
    experts: Literal["compute", "fp8_block"] = "compute"
    """Of experts' products, forward and both gradients: the compute dtype; or E4M3 with a power-of-two scale for 1 x 128 of
    activations and gradients and 128 x 128 of weights, sums in float32 (DeepSeek-V3)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What the backward pass computes again, and what it finds elsewhere than in buffers of each layer."""

    recompute: tuple[Literal["layer", "attention", "mlp", "moe", "experts"], ...] = ()
    """Modules that are computed again; `layer` is all of them at once. Rows in a stash are not."""
    stash: tuple[Literal["experts"], ...] = ()
    """Modules whose rows all layers keep in one stash, of the size that is used rather than the worst case of each layer."""
    stash_factor: float = 1.1
    """Rows of the stash, in units of what all layers use when routing is balanced; 0 takes the worst case. A step that needs
    more is run again with the next of `parallel.rungs` sizes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    corpus: Literal["stdlib"] = "stdlib"
    """stdlib: sources of Python's standard library as bytes, found on any machine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving by orbax into RUN/checkpoints."""

    every_steps: int = 200
    """A checkpoint every this many steps, and after the last one."""
    keep: int = 2
    """Newest checkpoints kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """What a person sees."""

    log_every: int = 10
    """Steps between lines where the output is no terminal."""
    record_routing_every: int = 0
    """Steps between recordings of every token's experts in RUN/routing, for `python -m moex.balance simulate`; 0 for none."""
    eval_every: int = 100
    """Steps between held-out losses; 0 for none, the last step always has one otherwise."""
    eval_rows: int = 128
    """Held-out rows an evaluation reads, at most."""
    sample_tokens: int = 200
    """Tokens generated after the last step; 0 for none."""
    sample_prompt: str = "def "
    """What generation starts from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run. Every field can be set on the command line as --section.field."""

    name: str = "custom"
    """Of the preset; the run folder is runs/NAME unless `folder` says otherwise."""
    folder: str = ""
    """The run folder; an existing one is continued."""
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def run_folder(self) -> str:
        return self.folder or f"runs/{self.name}"
