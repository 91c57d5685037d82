"""A plan for a person at a terminal: verdict, memory, communication, compute, estimate, findings, one layer's schedule."""

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from moex.plan.memory import Part
from moex.plan.module import host_reads
from moex.plan.plan import Plan, by_scope, by_view
from moex.plan.remedies import Remedy
from moex.plan.schedule import layer_schedule
from moex.plan.search import Found
from moex.precision.recipes import resolve

GIB = 2**30
ASSUMED = (
    "Routing is taken to be balanced; kernels and collectives not to slow each other; the network to have one adapter a GPU, "
    "without contention. Times are a roofline of the compiled program, never a measurement."
)


def text(plan: Plan, *, remedies: Sequence[Remedy] = (), width: int = 120, colour: bool = False) -> str:
    """The whole report.  colour: with the terminal's escape codes."""
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, highlight=False)
    parts = (_head, _memory, lambda _: _remedies(plan, remedies), _communication, _compute, _estimate, _findings)
    for part in parts:
        for line in part(plan):
            console.print(line, soft_wrap=isinstance(line, str))
        console.print()
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def _head(plan: Plan) -> Iterable:
    config, train = plan.config, plan.config.train
    rows, recipe = train.batch_size // train.accumulation, resolve(config.precision).experts
    yield f"[bold]{config.name}[/] on {plan.target}"
    yield f"mesh  {plan.fold.describe()}; ZeRO-{config.parallel.zero}".replace("[", r"\[")
    again, format = (
        ", ".join(config.memory.recompute) or "nothing",
        recipe.name if recipe else config.precision.compute_dtype,
    )
    yield (
        f"step  {train.batch_size:,} rows of {train.seq_len:,} tokens in {train.accumulation} micro-batches of {rows:,}; "
        f"recompute {again}; to the host {', '.join(config.memory.offload) or 'nothing'}; experts in {format}"
    )
    colour = "green" if plan.fits else "red"
    yield f"[bold {colour}]{plan.verdict()}[/]  (compiled in {plan.step.compile_s:.0f} s)"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> Table:
    """words: leading columns that are text; the rest is flush right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < words else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _memory(plan: Plan) -> Iterable:
    step = plan.step
    arguments = f"arguments {step.argument_bytes / GIB:.2f}, temporaries {step.temporary_bytes / GIB:.2f}"
    yield (
        f"[bold]Memory of a GPU, GiB[/]  peak {step.peak_bytes / GIB:.2f} ({arguments}, host {step.host_bytes / GIB:.2f}); "
        f"usable {plan.target.usable_bytes / GIB:.2f}"
    )
    if reads := host_reads(step.text):
        yield f"of {len(reads)} arrays that a layer reads from the host, {sum(reads.values())} are asked for a layer ahead"
    yield _parts("by the compiler: what is alive at the peak", plan.live, about=False)
    yield _parts("by formula", plan.formula, about=True)
    total = sum(p.num_bytes for p in plan.formula)
    more = (step.peak_bytes - total) / GIB
    yield f"the compiler needs {more:+.2f} GiB beyond the formula's {total / GIB:.2f}: {difference(plan)}"


def difference(plan: Plan) -> str:
    """What the compiler holds that the formula doesn't know, largest first."""
    known = {p.name for p in plan.formula}
    extra = [p for p in plan.live if p.name in ("copies in another layout", "gaps") or p.name.startswith("carried")]
    named = [
        f"{p.name} {p.num_bytes / GIB:.2f}" for p in sorted(extra, key=lambda p: -p.num_bytes) if p.name not in known
    ]
    return ", ".join(named) or "nothing that stands out"


def _parts(title: str, parts: Sequence[Part], *, about: bool) -> Table:
    rows = [
        (f"  {p.name}", f"{p.num_bytes / GIB:.2f}", *([p.about] if about else [])) for p in parts if p.num_bytes > 1e6
    ]
    table = _table(f"  {title}", ["", "GiB", *([""] if about else [])], rows)
    if about:
        table.columns[2].justify = "left"
    return table


def _remedies(plan: Plan, remedies: Sequence[Remedy]) -> Iterable:
    if not remedies:
        return
    usable = plan.target.usable_bytes
    rows = []
    for r in remedies:
        told = r.error if r.peak_bytes is None else f"{r.peak_bytes / GIB:.2f}"
        fits = "" if r.peak_bytes is None else "fits" if r.peak_bytes <= usable else "does not fit"
        rows.append((f"  {r.flags}", r.about, told, fits))
    yield _table("Remedies, each compiled; GiB at the peak", ["", "", "GiB", ""], rows, words=2)
    fitting = [r for r in remedies if r.peak_bytes is not None and r.peak_bytes <= usable]
    if not plan.fits:
        yield f"proposed: {fitting[0].flags}" if fitting else "none of these is enough by itself"


def _communication(plan: Plan) -> Iterable:
    rows = [r for r in by_view(plan) if r["bytes"] > 1e6]
    yield _table(
        "Communication of a GPU and step",
        ["phase", "scope", "collective", "over", "GPUs", "NVLink GB", "network GB", "takes s", "exposed s"],
        [
            (
                r["phase"], r["scope"], f"{r['kind']} {'+'.join(r['dtypes'])}", r["view"],
                f"{r['gpus']}" + (f" in {r['domains']}" if r["domains"] > 1 else ""),
                f"{r['nvlink_bytes'] / 1e9:,.1f}", f"{r['network_bytes'] / 1e9:,.1f}",
                f"{r['seconds']:.3f}", f"{r['exposed_s']:.3f}",
            )
            for r in rows[:24]
        ],
        words=4,
    )  # fmt: skip
    total = lambda name: sum(r[name] for r in rows)
    hidden = 1 - total("exposed_s") / total("seconds") if total("seconds") else 1.0
    yield (
        f"all: {total('nvlink_bytes') / 1e9:,.1f} GB over NVLink, {total('network_bytes') / 1e9:,.1f} GB over the network; "
        f"{max(hidden, 0):.0%} of their time hidden. `16 in 2`: groups of 16 GPUs that touch 2 NVLink domains."
    )


def _compute(plan: Plan) -> Iterable:
    e = plan.estimate
    yield _table(
        "Kernels of a GPU and step",
        ["phase", "scope", "TFLOP", "GB", "s"],
        [
            (r["phase"], r["scope"], f"{r['flops'] / 1e12:,.1f}", f"{r['bytes'] / 1e9:,.0f}", f"{r['seconds']:.3f}")
            for r in by_scope(plan)
            if r["seconds"] > 0.002 * e.step_s
        ],
        words=2,
    )
    host = plan.launches
    yield (
        f"the host launches {host.by_host:,} times a step: {host.alone:,} kernels, copies and collectives one by one, and "
        f"{host.graphs:,} CUDA graphs with {host.inside:,} of them "
        f"(compiler.command_buffers={plan.config.compiler.command_buffers})"
    )
    executed = sum(e.executed_flops.values())
    formats = ", ".join(f"{name} {flops / 1e12:,.1f}" for name, flops in sorted(e.executed_flops.items()))
    again = sum(r["flops"] for r in by_scope(plan) if r["phase"] == "recompute")
    yield (
        f"TFLOP: model {e.model_flops / 1e12:,.1f}, executed {executed / 1e12:,.1f} ({formats}); "
        f"of these {again / 1e12:,.1f} recompute; {executed / e.model_flops:.2f} executed for each of the model's"
    )


def _estimate(plan: Plan) -> Iterable:
    e, s = plan.estimate, plan.shares
    yield (
        f"[bold]Estimate[/]  step {e.step_s:.3f} s = kernels {e.compute_s:.3f} + waits for collectives {e.exposed_s:.3f} "
        f"(+ {e.hidden_s:.3f} hidden)"
    )
    yield (
        f"{e.tokens_per_s:,.0f} tokens/s a GPU; {e.model_flops_per_s / 1e12:,.1f} model TFLOP/s a GPU; "
        f"MFU {e.mfu:.1%} of the BF16 peak"
    )
    yield (
        f"shares of peak taken: products {s.matmul:.2f}, grouped kernels {s.kernel:.2f}, HBM {s.memory:.2f}, NVLink "
        f"{s.nvlink:.2f}, network {s.network:.2f}; {s.launch_s * 1e6:.0f} us a kernel"
    )
    yield ASSUMED


def _findings(plan: Plan) -> Iterable:
    faults = sum(f.level == "fault" for f in plan.findings)
    yield f"[bold]Audit[/]  {faults} faults, {len(plan.findings) - faults} notes"
    for f in plan.findings:
        colour = "red" if f.level == "fault" else "yellow"
        yield f"  [{colour}]{f.level}[/] {f.kind}: {_plain(f.text)}"
        if f.where:
            yield f"        {_plain(f.where)}"


def _plain(line: str) -> str:
    return line.replace("[", r"\[")


def schedule_text(plan: Plan) -> str:
    """One layer, forward and backward, as scheduled: each line a kernel or a collective with its time, beside what."""
    return "\n".join(layer_schedule(plan.timeline)) + "\n"


def search_text(found: Found, *, width: int = 140) -> str:
    """Compiled layouts, fastest that fits first, and a line for each family that was left."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    rows = []
    for p in found.plans:
        parallel, train = p.config.parallel, p.config.train
        rows.append(
            (
                f"tp {parallel.tp} cp {parallel.cp} ep {parallel.ep} etp {parallel.etp}", f"ZeRO-{parallel.zero}",
                p.config.precision.recipe,
                ", ".join(p.config.memory.recompute) or "nothing", f"{train.batch_size // train.accumulation}",
                f"{p.step.peak_bytes / 1e9:.1f}" + ("" if p.fits else " !"), f"{p.estimate.step_s:.2f}",
                f"{p.estimate.tokens_per_s:,.0f}", f"{p.estimate.mfu:.1%}",
            )
        )  # fmt: skip
    columns = ["layout", "", "products in", "recompute", "rows at a time", "GB", "s a step", "tokens/s a GPU", "MFU"]
    console.print(
        _table(f"Compiled, of {found.tried} layouts that fit by formula (! does not fit)", columns, rows, words=4)
    )
    console.print()
    for family, reason in found.rejected:
        console.print(f"left: {family}: {_plain(reason)}", soft_wrap=True)
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()
