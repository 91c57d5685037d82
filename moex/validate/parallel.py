"""What of the parallel sizes, transports and buffers contradicts itself or has no effect."""

from moex.config import ParallelConfig, RunConfig
from moex.validate.numbers import LARGEST, negative


def parallel_problems(config: RunConfig) -> list[str]:
    parallel, problems = config.parallel, []
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
    problems += negative("parallel", spill_factor=parallel.spill_factor)
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
        if (factor := getattr(parallel, name)) and not 1 <= factor <= LARGEST:
            problems.append(
                f"parallel.{name}={factor} must be finite and at least 1, which is room for balanced routing, or 0"
            )
    return problems
