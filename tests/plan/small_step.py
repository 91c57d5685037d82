"""A training step of a few lines, compiled for 16 H100s; what it must send and multiply can be counted by hand.

    .venv-aot/bin/python tests/plan/small_step.py tests/plan/texts/NAME [FAULT ...]

writes the scheduled module, the thunks and the live arrays there. L layers of a [D, D] matmul between two all-to-alls
over ep.
"""

import functools
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUM_LAYERS, ROWS, D = 3, 2048, 512
FAULTS = ("bfloat16", "donation", "while")


def step(params, x, *, faults=()):
    """Gradient descent on mean(y^2). Local: params [L, D, D] float32, x [ROWS, D] bfloat16."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def layer(x, w):
        with jax.named_scope("moe"):
            with jax.named_scope("dispatch"):
                x = lax.all_to_all(x, "ep", 0, 0, tiled=True)
            with jax.named_scope("experts"):
                x = jnp.tanh(x @ w.astype(jnp.bfloat16))
            with jax.named_scope("combine"):
                return lax.all_to_all(x, "ep", 0, 0, tiled=True), None

    def loss(params):
        y, _ = lax.scan(layer, x, params)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    params = lax.pcast(params, ("dp", "ep"), to="varying")
    total, grads = jax.value_and_grad(loss)(params)
    if "bfloat16" in faults:
        grads = grads.astype(jnp.bfloat16)
    with jax.named_scope("transpose(jvp(parameters))"):
        grads = lax.psum(grads, ("dp", "ep")).astype(jnp.float32)
    if "while" in faults:
        grads = lax.while_loop(lambda g: jnp.sum(g * g) > 1.0, lambda g: 0.5 * g, grads)
    return lax.psum(total, ("dp", "ep")), grads


def compile_text(folder: Path, out: Path, faults: list[str]) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    target = (ROOT / "moex/plan/targets/h100.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x2x8")
    mesh = topologies.make_mesh(topology, (2, 8), ("dp", "ep"))
    sharded = jax.shard_map(
        functools.partial(step, faults=faults), mesh=mesh, in_specs=(P(), P(("dp", "ep"))), out_specs=(P(), P())
    )

    def update(state, x):
        total, grads = sharded(state, x)
        return state - 0.1 * grads, total

    spec = lambda shape, dtype, p: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, p))
    arguments = spec((NUM_LAYERS, D, D), jnp.float32, P()), spec((16 * ROWS, D), jnp.bfloat16, P(("dp", "ep")))
    donate = () if "donation" in faults else (0,)
    compiled = jax.jit(update, donate_argnums=donate).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    dumped = lambda ending: max(folder.glob(f"*update*{ending}"), key=lambda p: p.stat().st_size).read_text()
    numbers = dict(
        argument_bytes=memory.argument_size_in_bytes, temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes, host_bytes=memory.host_temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes, compile_s=0.0, log="",
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "numbers.json").write_text(json.dumps(numbers) + "\n")
    (out / "text").write_text(compiled.as_text().replace(str(ROOT), "/moex"))
    (out / "thunks").write_text(dumped(".thunk_sequence_after_thunk_passes.txt"))
    (out / "live").write_text(dumped("-live-range.txt").partition("Stack trace breakdown")[2])


def load(name: str):
    """A committed compilation as a `CompiledStep`."""
    from moex.plan.compiled import CompiledStep

    folder = Path(__file__).parent / "texts" / name
    texts = {part: (folder / part).read_text() for part in ("text", "thunks", "live")}
    return CompiledStep(**json.loads((folder / "numbers.json").read_text()), **texts)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS=f"--xla_dump_to={name} --xla_dump_hlo_module_re=.*update.*")
        compile_text(Path(name), Path(sys.argv[1]), sys.argv[2:])
