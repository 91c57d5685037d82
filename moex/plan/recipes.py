"""The memory recipes of a configuration as one table: what each named result weighs, and what it costs to do without it."""

import io

from rich.console import Console
from rich.table import Table

from moex.config import RunConfig
from moex.memory.residuals import places
from moex.models.flops import train_flops_per_token
from moex.plan.memory import moments_bytes
from moex.plan.rates import DEFAULT, Shares
from moex.plan.residuals import Cost, costs
from moex.plan.target import Target
from moex.validate import check, check_on, resolve_fold

_MIB, _GIB = 2.0**20, 2.0**30
_COLUMNS = (
    "", "now", "layers", "[bold]keep[/]\nMiB a layer", "\nGiB", "[bold]recompute[/]\nTFLOP a layer", "MiB sent", "\nms",
    "[bold]offload[/]\nGiB on host", "GiB saved", "ms each way",
)  # fmt: skip


def recipes_text(config: RunConfig, target: Target, *, shares: Shares = DEFAULT, width: int = 126) -> str:
    """The table by formula; nothing is compiled.  Raises ConfigError when the configuration doesn't fit the GPUs."""
    check(config)
    fold = resolve_fold(config.parallel, target.num_gpus)
    check_on(config, fold)
    table = Table(title=f"{config.name} on {target}: what a GPU keeps of a micro-batch, by name", title_justify="left",
                  title_style="bold", box=None, pad_edge=False)  # fmt: skip
    for i, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if i < 2 else "right", vertical="bottom")
    found = costs(config, fold, target, shares)
    for cost in found:
        table.add_row(*_row(cost, _now(cost, config)))
    total = sum(cost.layers * cost.num_bytes for cost in found)
    table.add_row("all", "", "", "", f"{total / _GIB:.2f}", "", "", "", "", "", "")
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(table)
    for line in _notes(config, target, shares, moments_bytes(config, fold)):
        console.print(line, soft_wrap=True)
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def _now(cost: Cost, config: RunConfig) -> str:
    """Where it stays as configured."""
    found = {places(config.memory, sparse=sparse)[cost.name] for sparse in (False, True)}
    words = dict(device="kept", again="recomputed", host="host")
    return " / ".join(words[place] for place in ("device", "again", "host") if place in found)


def _row(cost: Cost, now: str) -> list[str]:
    every = cost.layers * cost.num_bytes
    again = [f"{cost.flops / 1e12:.3f}", f"{cost.sent_bytes / _MIB:.0f}", f"{1e3 * cost.again_s:.2f}"]
    if cost.name == "layer_input":
        again = [""] * 3
    # Beside the layer that computes, another one's results are on their way.
    saved = max(0.0, every - 2 * cost.num_bytes)
    offload = [f"{every / _GIB:.2f}", f"{saved / _GIB:.2f}", f"{1e3 * cost.host_s:.2f}"]
    kept = [str(cost.layers), f"{cost.num_bytes / _MIB:.1f}", f"{every / _GIB:.2f}"]
    return [cost.name, now, *kept, *again, *offload]


def _notes(config: RunConfig, target: Target, shares: Shares, moments: float) -> list[str]:
    gpu, train, layers = target.accelerator, config.train, config.model.num_layers
    tokens = train.batch_size // train.accumulation * train.seq_len / target.num_gpus * config.parallel.pp
    forward = (
        train_flops_per_token(config.model, train.seq_len) / 3 / layers * tokens / (gpu.bf16_flops * shares.matmul)
    )
    both_ways = 2e3 * moments / gpu.host_bytes_per_s
    hidden = (
        f"A layer's products, forward, take about {1e3 * forward:.2f} ms: what leaves in less is hidden behind them, and "
        "behind those of a layer's backward pass what comes back in twice that."
    )
    rates = (
        f"Rates: products {shares.matmul:g} of the peak, grouped ones {shares.kernel:g}; the host's link "
        f"{gpu.host_bytes_per_s / 1e9:g} GB/s each way, its data sheet's. Sent bytes, over tp, cp or ep, are without time."
    )
    optimizer = (
        f"memory.optimizer=host: {moments / _GIB:.2f} GiB of moments on the host, {both_ways:.0f} ms a step both ways."
    )
    return [hidden, rates, optimizer]
