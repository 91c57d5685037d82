"""Checks of a whole configuration before anything is compiled: each problem names field, numbers and remedy."""

from mesh import Fold, fold
from moex.config import ParallelConfig, RunConfig
from moex.dispatch import unavailable
from moex.validate.context import context_problems, context_problems_on
from moex.validate.memory import memory_problems
from moex.validate.model import model_problems
from moex.validate.numbers import divides
from moex.validate.parallel import parallel_problems
from moex.validate.pipeline import layout_problems, pipeline_problems
from moex.validate.precision import precision_problems, precision_problems_on
from moex.validate.training import pattern_problems, training_problems

_SECTIONS = (
    model_problems, training_problems, memory_problems, precision_problems, parallel_problems, context_problems,
    pipeline_problems,
)  # fmt: skip


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
    _raise([p for problems in _SECTIONS for p in problems(config)])
    _raise(pattern_problems(config) + layout_problems(config))


def check_on(config: RunConfig, folded: Fold, platform: str = "gpu", device_kind: str = "") -> None:
    """How batch, sequence, heads and widths divide over the fold, and what runs on the platform and its kind of device.

    Raises ConfigError.
    """
    model, train, attention = config.model, config.train, config.model.attention
    size = folded.size
    problems = [
        divides("train.batch_size / train.accumulation", train.batch_size // train.accumulation, "dp", size("dp")),
        divides("train.seq_len", train.seq_len, "cp x tp", size("cp") * size("tp")),
        divides("train.seq_len", train.seq_len, "2 x cp", 2 * size("cp")) if size("cp") > 1 else "",
        divides("model.attention.num_heads", attention.num_heads, "tp", size("tp")),
        divides("padded vocabulary", model.padded_vocab_size, "tp x pp", size("tp") * size("pp")),
        divides("model.router.num_experts", model.router.num_experts, "ep", size("ep")),
        divides("model.expert_width", model.expert_width, "etp", size("etp")),
        divides("model.shared_width", model.shared_width, "tp", size("tp")),
    ]
    problems += precision_problems_on(config, folded, device_kind)
    waves, tokens = config.parallel.waves, train.batch_size // train.accumulation // size("dp") * train.seq_len
    if waves > 1:
        here = tokens // (size("cp") * size("tp"))
        problems.append(divides("tokens of a device in a micro-batch", here, "parallel.waves", waves))
    if waves > 1 and model.router.pad_to_capacity:
        problems.append(f"parallel.waves={waves}: each wave would pad to the whole capacity; leave out pad_to_capacity")
    if config.parallel.echo_slots:
        part = model.expert_in_width * model.expert_width // size("etp")
        problems.append(divides("width x expert_width / etp, which clones are cut from,", part, "ep", size("ep")))
        widths = model.expert_in_width, model.expert_width // size("etp")
        if config.parallel.echo_wire == "float8" and any(width % 128 for width in widths):
            problems.append(
                f"parallel.echo_wire=float8 has a scale for each 128 x 128 block: d_model={widths[0]} (or latent_width) and "
                f"expert_width / etp={widths[1]} must be multiples of 128; set it to compute"
            )
        if model.expert_bias:
            problems += [divides("a bias of experts", w, "ep", size("ep")) for w in (widths[0], 2 * widths[1])]
    if model.num_mlp_layers:
        problems.append(divides("model.dense_width", model.dense_width, "tp", size("tp")))
    kv, tp = attention.num_kv_heads, size("tp")
    if attention.kind == "gqa" and kv % tp and tp % kv:
        problems.append(
            f"model.attention.num_kv_heads={kv} and tp={tp}: one must divide the other, so that every device holds whole "
            "key-value heads; change parallel.tp"
        )
    if reason := unavailable(config.parallel.transport, platform):
        problems.append(f"parallel.transport={config.parallel.transport}: {reason}; use alltoall or allgather")
    problems += context_problems_on(config, folded)
    _raise(problems)


def _raise(problems: list[str]) -> None:
    if found := [p for p in problems if p]:
        raise ConfigError("\n".join(found))
