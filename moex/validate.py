"""Checks of a whole configuration before anything is compiled: each problem names field, numbers and remedy."""

from mesh import Fold, fold
from moex.config import MemoryConfig, ParallelConfig, RouterConfig, RunConfig
from moex.dispatch import unavailable
from moex.layers.router import check_router

_LARGEST = 3e38
"""Numbers above are infinite in float32."""


class ConfigError(ValueError):
    """A configuration that cannot run. The message lists every problem found, one a line."""


def resolve_fold(parallel: ParallelConfig, num_devices: int) -> Fold:
    """The fold over `num_devices`, with dp and edp filled in where they are 0.  Raises ConfigError with the numbers."""
    sizes = {}
    for free, others in (("dp", ("pp", "cp", "tp")), ("edp", ("pp", "ep", "etp"))):
        given = {name: getattr(parallel, name) for name in others}
        if bad := {name: size for name, size in given.items() if size < 1}:
            raise ConfigError(f"parallel: sizes must be at least 1, got {bad}")
        product = 1
        for size in given.values():
            product *= size
        own = getattr(parallel, free)
        text = " x ".join(f"{n}={s}" for n, s in given.items())
        if own < 0:
            raise ConfigError(f"parallel.{free}={own} must be at least 1, or 0 to fill the devices")
        if not own and num_devices % product:
            raise ConfigError(
                f"parallel: {text} is {product}, which doesn't divide the {num_devices} devices; change one of them"
            )
        if own and own * product != num_devices:
            raise ConfigError(
                f"parallel: {free}={own} x {text} is {own * product} devices, but there are {num_devices}; "
                f"set parallel.{free} to 0 to fill the devices"
            )
        sizes |= given | {free: own or num_devices // product}
    pick = lambda *names: {name: sizes[name] for name in names}
    try:
        return fold(pick("pp", "dp", "cp", "tp"), pick("pp", "edp", "ep", "etp"))
    except ValueError as error:
        raise ConfigError(f"parallel: {error}") from error


def check(config: RunConfig) -> None:
    """Everything that can be known without devices.  Raises ConfigError."""
    _raise(_model_problems(config) + _train_problems(config) + _parallel_problems(config))


def check_on(config: RunConfig, folded: Fold, platform: str = "gpu") -> None:
    """How batch, sequence, heads and widths divide over the fold, and what runs on the platform.  Raises ConfigError."""
    model, train, attention = config.model, config.train, config.model.attention
    size = folded.size
    problems = [
        _divides("train.batch_size / train.accumulation", train.batch_size // train.accumulation, "dp", size("dp")),
        _divides("train.seq_len", train.seq_len, "cp x tp", size("cp") * size("tp")),
        _divides("train.seq_len", train.seq_len, "2 x cp", 2 * size("cp")) if size("cp") > 1 else "",
        _divides("model.attention.num_heads", attention.num_heads, "tp", size("tp")),
        _divides("padded vocabulary", model.padded_vocab_size, "tp", size("tp")),
        _divides("model.router.num_experts", model.router.num_experts, "ep", size("ep")),
        _divides("model.expert_width", model.expert_width, "etp", size("etp")),
        _divides("model.shared_width", model.shared_width, "tp", size("tp")),
    ]
    if config.precision.experts == "fp8_block" and model.num_moe_layers:
        widths = model.d_model, model.expert_width // size("etp")
        if any(width % 128 for width in widths):
            problems.append(
                f"precision.experts=fp8_block has blocks of 128: d_model={widths[0]} and expert_width / etp={widths[1]} "
                "must be multiples of 128; set it to compute"
            )
    waves, tokens = config.parallel.waves, train.batch_size // train.accumulation // size("dp") * train.seq_len
    if waves > 1:
        here = tokens // (size("cp") * size("tp"))
        problems.append(_divides("tokens of a device in a micro-batch", here, "parallel.waves", waves))
    if waves > 1 and model.router.pad_to_capacity:
        problems.append(f"parallel.waves={waves}: each wave would pad to the whole capacity; leave out pad_to_capacity")
    if config.parallel.echo_slots:
        part = model.d_model * model.expert_width // size("etp")
        problems.append(_divides("d_model x expert_width / etp, which clones are cut from,", part, "ep", size("ep")))
        widths = model.d_model, model.expert_width // size("etp")
        if config.parallel.echo_wire == "float8" and any(width % 128 for width in widths):
            problems.append(
                f"parallel.echo_wire=float8 has a scale for each 128 x 128 block: d_model={widths[0]} and expert_width / etp="
                f"{widths[1]} must be multiples of 128; set it to compute"
            )
    if model.num_dense_layers:
        problems.append(_divides("model.dense_width", model.dense_width, "tp", size("tp")))
    kv, tp = attention.num_kv_heads, size("tp")
    if attention.kind == "gqa" and kv % tp and tp % kv:
        problems.append(
            f"model.attention.num_kv_heads={kv} and tp={tp}: one must divide the other, so that every device holds whole "
            "key-value heads; change parallel.tp"
        )
    if reason := unavailable(config.parallel.transport, platform):
        problems.append(f"parallel.transport={config.parallel.transport}: {reason}; use alltoall or allgather")
    cp = size("cp")
    if config.parallel.context != "gather" and cp == 1:
        problems.append(
            f"parallel.context={config.parallel.context} has no effect with parallel.cp=1: set it to gather"
        )
    heads = max(kv // tp, 1) if attention.kind == "gqa" else attention.num_heads // tp
    if config.parallel.context == "ulysses" and heads % cp:
        problems.append(
            f"parallel.context=ulysses trades the {heads} key-value heads of a device for the sequence, and they don't "
            f"divide by parallel.cp={cp}: use ring or gather"
        )
    _raise(problems)


def _divides(name: str, number: int, view: str, size: int) -> str:
    remedy = f"choose a multiple of {size}, or another parallel size"
    return f"{name}={number} doesn't divide by {view}={size}: {remedy}" if number % size else ""


def _model_problems(config: RunConfig) -> list[str]:
    model, a = config.model, config.model.attention
    problems = []
    try:
        check_router(model.router)
    except ValueError as error:
        problems.append(f"model.router: {error}")
    positive = dict(
        vocab_size=model.vocab_size, vocab_multiple=model.vocab_multiple, d_model=model.d_model,
        num_layers=model.num_layers, expert_width=model.expert_width,
    )  # fmt: skip
    problems += [f"model.{name}={value} must be at least 1" for name, value in positive.items() if value < 1]
    problems += _not_above_zero("model", init_std=model.init_std) + _negative("model", norm_eps=model.norm_eps)
    problems += _negative("model", dense_width=model.dense_width, shared_width=model.shared_width)
    problems += _not_above_zero("model.attention", head_dim=a.head_dim) + _negative(
        "model.attention", sliding_window=a.sliding_window, q_latent_dim=a.q_latent_dim
    )
    problems += _not_above_zero("model.attention.rope", theta=a.rope.theta)
    if not a.rope.factor >= 1:
        problems.append(f"model.attention.rope.factor={a.rope.factor} must be at least 1, which leaves YaRN out")
    if not 0 <= model.num_dense_layers <= model.num_layers:
        problems.append(
            f"model.num_dense_layers={model.num_dense_layers} must lie between 0 and num_layers={model.num_layers}"
        )
    if a.num_heads < 1 or a.num_kv_heads < 1 or a.num_heads % a.num_kv_heads:
        problems.append(
            f"model.attention.num_heads={a.num_heads} must be a multiple of num_kv_heads={a.num_kv_heads}: every key-value "
            "head serves the same number of query heads"
        )
    latent = {name: getattr(a, name) for name in ("kv_latent_dim", "rope_dim", "value_dim")}
    if a.kind == "mla" and (missing := [name for name, value in latent.items() if value < 1]):
        problems.append(f"model.attention.kind=mla needs {missing} above 0")
    if a.kind == "mla" and (a.num_kv_heads != a.num_heads or a.value_dim > a.head_dim + a.rope_dim or a.qk_norm):
        problems.append(
            f"model.attention.kind=mla: num_kv_heads={a.num_kv_heads} must equal num_heads={a.num_heads}, value_dim="
            f"{a.value_dim} be at most head_dim + rope_dim={a.head_dim + a.rope_dim}, and qk_norm be off"
        )
    if a.kind == "gqa" and (extra := [n for n, v in latent.items() if v] + ["q_latent_dim"] * bool(a.q_latent_dim)):
        problems.append(f"model.attention: {extra} have no effect with kind=gqa; set them to 0 or kind to mla")
    rotated = a.rope_dim if a.kind == "mla" else a.head_dim
    if rotated % 2:
        problems.append(f"model.attention: the rotated width {rotated} must be even")
    router = model.router
    problems += _not_above_zero("model.router", scaling_factor=router.scaling_factor)
    problems += _negative(
        "model.router",
        aux_coefficient=router.aux_coefficient, sequence_coefficient=router.sequence_coefficient,
        global_coefficient=router.global_coefficient, z_coefficient=router.z_coefficient, bias_rate=router.bias_rate,
        capacity_factor=router.capacity_factor, forced_skew=router.forced_skew,
    )  # fmt: skip
    problems += _router_problems(router)
    if router.renormalize and router.top_k == 1 and router.score_function == "softmax" and model.num_moe_layers:
        problems.append(
            "model.router: top_k=1 with softmax and renormalize gives every token the weight 1, so the router learns "
            "nothing from the loss; set model.router.renormalize to False"
        )
    if model.num_moe_layers == 0 and model.shared_width:
        problems.append(f"model.shared_width={model.shared_width} has no effect without MoE layers; set it to 0")
    return problems


def _router_problems(router: RouterConfig) -> list[str]:
    """Settings of routing that contradict each other or have no effect."""
    problems, path = [], "model.router"
    if not 0 <= router.jitter < 1:
        problems.append(f"{path}.jitter={router.jitter} must be at least 0 and below 1: inputs are scaled by 1 -+ it")
    if not 0 <= router.quantile_decay < 1:
        problems.append(f"{path}.quantile_decay={router.quantile_decay} must be at least 0 and below 1")
    losses = dict(
        aux_coefficient=router.aux_coefficient, sequence_coefficient=router.sequence_coefficient,
        global_coefficient=router.global_coefficient,
    )  # fmt: skip
    if router.selection != "top_k" and (on := [name for name, value in losses.items() if value]):
        problems.append(
            f"{path}.selection={router.selection} balances by itself, but {on} are above 0: set them to 0, or selection "
            "to top_k"
        )
    if router.selection != "top_k" and router.bias_rate:
        problems.append(
            f"{path}.bias_rate={router.bias_rate} has no effect with selection={router.selection}: set it to 0"
        )
    if router.bias_centred and not router.bias_rate:
        problems.append(f"{path}.bias_centred has no effect with bias_rate=0")
    if router.pad_to_capacity and not router.capacity_factor:
        problems.append(f"{path}.pad_to_capacity needs a capacity: set capacity_factor above 0")
    needs = dict(
        quantile_decay=(router.selection == "quantile", "selection=quantile"),
        capacity_policy=(router.capacity_factor > 0, "capacity_factor above 0"),
        forced_skew=(router.forced == "skew", "forced=skew"),
        group_score_top=(router.num_groups > 1, "num_groups above 1"),
    )
    for name, (there, what) in needs.items():
        if (value := getattr(router, name)) != getattr(RouterConfig, name) and not there:
            problems.append(f"{path}.{name}={value} has no effect without {what}")
    if router.forced and router.jitter:
        problems.append(f"{path}.jitter={router.jitter} has no effect on forced={router.forced} logits: set it to 0")
    return problems


def _train_problems(config: RunConfig) -> list[str]:
    train, opt, problems = config.train, config.optimizer, []
    numbers = dict(
        steps=train.steps, batch_size=train.batch_size, accumulation=train.accumulation,
        loss_chunk_tokens=train.loss_chunk_tokens,
    )  # fmt: skip
    problems += [f"train.{name}={value} must be at least 1" for name, value in numbers.items() if value < 1]
    if train.run_ahead < 1:
        problems.append(f"train.run_ahead={train.run_ahead} must be at least 1")
    if train.seq_len < 2:
        problems.append(f"train.seq_len={train.seq_len} must be at least 2")
    if train.accumulation >= 1 and train.batch_size % train.accumulation:
        problems.append(
            f"train.batch_size={train.batch_size} rows don't divide into train.accumulation={train.accumulation} equal "
            "micro-batches"
        )
    if not 0 <= opt.warmup_steps < train.steps:
        problems.append(
            f"optimizer.warmup_steps={opt.warmup_steps} must lie between 0 and train.steps={train.steps} (not included)"
        )
    if not 0 <= train.seed < 2**32:
        problems.append(f"train.seed={train.seed} must lie between 0 and {2**32 - 1}")
    problems += _not_above_zero("optimizer", peak_lr=opt.peak_lr, eps=opt.eps)
    problems += _negative("optimizer", final_lr=opt.final_lr, weight_decay=opt.weight_decay, clip_norm=opt.clip_norm)
    for name in ("beta1", "beta2"):
        if not 0 <= (beta := getattr(opt, name)) < 1:
            problems.append(f"optimizer.{name}={beta} must be at least 0 and below 1")
    if opt.name == "sgd" and opt.weight_decay:
        problems.append(f"optimizer.weight_decay={opt.weight_decay} has no effect with sgd; set it to 0")
    if config.checkpoint.every_steps < 1 or config.checkpoint.keep < 1:
        problems.append("checkpoint.every_steps and checkpoint.keep must be at least 1")
    if config.data.corpus == "stdlib" and config.model.vocab_size < 256:
        problems.append(f"model.vocab_size={config.model.vocab_size} must be at least 256: the stdlib corpus is bytes")
    if min(config.observe.eval_every, config.observe.eval_rows, config.observe.sample_tokens) < 0:
        problems.append("observe.eval_every, eval_rows and sample_tokens must not be negative")
    if config.observe.record_routing_every < 0:
        problems.append(f"observe.record_routing_every={config.observe.record_routing_every} must not be negative")
    if config.observe.record_routing_every and not config.model.num_moe_layers:
        problems.append("observe.record_routing_every has no effect without MoE layers")
    if config.observe.sample_tokens and not config.observe.sample_prompt:
        problems.append(
            "observe.sample_prompt is empty: give generation a text to start from, or set sample_tokens to 0"
        )
    if config.observe.log_every < 1:
        problems.append(f"observe.log_every={config.observe.log_every} must be at least 1")
    return problems + _memory_problems(config)


def _memory_problems(config: RunConfig) -> list[str]:
    modules, model, memory, problems = set(config.memory.recompute), config.model, config.memory, []
    if "layer" in modules and len(modules) > 1:
        problems.append(f"memory.recompute: `layer` contains {sorted(modules - {'layer'})}; name one or the others")
    if "mlp" in modules and not model.num_dense_layers:
        problems.append("memory.recompute: `mlp` has no effect without dense layers")
    if modules & {"moe", "experts"} and not model.num_moe_layers:
        problems.append("memory.recompute: `moe` and `experts` have no effect without MoE layers")
    if config.precision.experts != "compute" and not model.num_moe_layers:
        problems.append(f"precision.experts={config.precision.experts} has no effect without MoE layers")
    if memory.stash and not model.num_moe_layers:
        problems.append("memory.stash has no effect without MoE layers")
    if set(memory.stash) & modules:
        problems.append("memory: `experts` are in stash and in recompute, but what a stash has isn't computed again")
    if memory.stash and config.parallel.waves > 1 and not config.parallel.bounded:
        problems.append("memory.stash has no effect on parallel.waves, of which no rows are kept: use one of the two")
    if memory.stash_factor and not 1 <= memory.stash_factor <= _LARGEST:
        problems.append(
            f"memory.stash_factor={memory.stash_factor} must be finite and at least 1, which is room for balanced routing, "
            "or 0 for the worst case"
        )
    if memory.stash_factor != MemoryConfig.stash_factor and not memory.stash:
        problems.append(f"memory.stash_factor={memory.stash_factor} has no effect without memory.stash")
    return problems


def _parallel_problems(config: RunConfig) -> list[str]:
    parallel, problems = config.parallel, []
    if parallel.pp != 1:
        problems.append(f"parallel.pp={parallel.pp}: pipeline parallelism isn't built yet, set it to 1")
    experts, ep = config.model.router.num_experts, parallel.ep
    if ep > 0 and experts % ep:
        problems.append(
            f"model.router.num_experts={experts} doesn't divide by parallel.ep={ep}: choose a divisor of {experts}"
        )
    if parallel.transport == "local" and ep > 1:
        problems.append(
            f"parallel.transport=local keeps all experts on every device, but parallel.ep={ep}: set the transport to "
            "alltoall or allgather, or ep to 1"
        )
    if parallel.transport != "local" and ep == 1:
        problems.append(f"parallel.transport={parallel.transport} moves nothing with parallel.ep=1: set it to local")
    if parallel.cell_factor and parallel.transport != "alltoall":
        problems.append(
            f"parallel.cell_factor={parallel.cell_factor} has no effect with transport {parallel.transport}"
        )
    if parallel.spill_factor and not parallel.cell_factor:
        problems.append(
            f"parallel.spill_factor={parallel.spill_factor} has no effect with cell_factor=0: worst-case cells never fill"
        )
    problems += _negative("parallel", spill_factor=parallel.spill_factor)
    if parallel.echo_slots < 0 or parallel.echo_hot < 1 or not 1 <= parallel.echo_cap < 1024:
        problems.append(
            f"parallel: echo_slots={parallel.echo_slots} must be at least 0, echo_hot={parallel.echo_hot} at least 1, "
            f"echo_cap={parallel.echo_cap} between 1 and 1024"
        )
    if parallel.echo_slots and ep == 1:
        problems.append(f"parallel.echo_slots={parallel.echo_slots} has no effect with parallel.ep=1: set it to 0")
    if parallel.echo_slots and config.model.router.capacity_factor:
        problems.append(
            f"parallel.echo_slots={parallel.echo_slots} clones hot experts, model.router.capacity_factor="
            f"{config.model.router.capacity_factor} drops what they can't take: use one of the two"
        )
    if not 2 <= parallel.rungs <= 8:
        problems.append(
            f"parallel.rungs={parallel.rungs} must lie between 2 (the sizes given, and the worst case) and 8: every size is "
            "compiled"
        )
    if not 0 <= parallel.tail < 1:
        problems.append(f"parallel.tail={parallel.tail} is a share of steps: at least 0 and below 1")
    if parallel.waves < 1:
        problems.append(f"parallel.waves={parallel.waves} must be at least 1, which leaves waves out")
    retrying = parallel.bounded or (config.memory.stash and config.memory.stash_factor)
    for name in ("rungs", "tail"):
        if (value := getattr(parallel, name)) != getattr(ParallelConfig, name) and not retrying:
            problems.append(f"parallel.{name}={value} has no effect without cell_factor, row_factor or a stash")
    if parallel.echo == "retry" and not retrying:
        problems.append("parallel.echo=retry has no effect without cell_factor or row_factor: no step is run again")
    for name in ("echo", "echo_hot", "echo_cap", "echo_wire"):
        if (value := getattr(parallel, name)) != getattr(ParallelConfig, name) and not parallel.echo_slots:
            problems.append(f"parallel.{name}={value} has no effect with echo_slots=0")
    for name in ("cell_factor", "row_factor"):
        if (factor := getattr(parallel, name)) and not 1 <= factor <= _LARGEST:
            problems.append(
                f"parallel.{name}={factor} must be finite and at least 1, which is room for balanced routing, or 0"
            )
    return problems


def _not_above_zero(section: str, **numbers: float) -> list[str]:
    finite = lambda x: 0 < x <= _LARGEST
    return [f"{section}.{name}={x} must be above 0 and finite" for name, x in numbers.items() if not finite(x)]


def _negative(section: str, **numbers: float) -> list[str]:
    finite = lambda x: 0 <= x <= _LARGEST
    return [f"{section}.{name}={x} must be at least 0 and finite" for name, x in numbers.items() if not finite(x)]


def _raise(problems: list[str]) -> None:
    if found := [p for p in problems if p]:
        raise ConfigError("\n".join(found))
