"""From the run of a dense model to a run of experts that computes the same."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from mesh import distributed
from moex import cli
from moex.checkpoint import save_weights, saved_arrays
from moex.config import RunConfig
from moex.hf.made import check_empty, whole_or_nothing
from moex.hf.params import nested, targets
from moex.layers import param
from moex.models.decoder import Decoder
from moex.models.upcycle import granularity, upcycled
from moex.train.program import build
from moex.validate import ConfigError, check, check_on, resolve_fold


def upcycle_run(source: Path, run: Path, flags: Sequence[str]) -> RunConfig:
    """Makes the new run folder `run` from the newest checkpoint of `source`; `flags` are those of train.py.

    Raises ValueError when the models or the folders don't fit, before an array is read.
    """
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source} is no run folder: it has no config.json")
    check_empty(run)
    dense = cli.load(source / "config.json")
    sparse = dataclasses.replace(dense.model, num_dense_layers=0)
    base = dataclasses.replace(dense, name=run.name, folder=str(run), model=sparse)
    config = cli.overridden(flags, base, "python -m moex.hf upcycle RUN NEW")
    shares = granularity(dense.model, config.model)
    check(config)
    distributed.initialise()
    fold = resolve_fold(config.parallel, jax.device_count())
    check_on(config, fold, jax.default_backend())
    program = build(config, fold)
    before = build(dataclasses.replace(config, model=dense.model), fold).state
    with saved_arrays(source) as read:
        arrays = {
            n: jax.device_put(read(f"params.{n}"), x.sharding) for n, x in targets(before).items() if n != "router_bias"
        }
    decoder, shardings = Decoder(config.model), jax.tree.map(lambda x: x.sharding, program.state)
    routers = decoder.declarations["moe_layers"]["moe"]["router"]
    name = "moe_layers.moe.router.weight"
    drawn = param.initial_values({name: routers["weight"]}, config.train.seed, config.model.init_std, 1)[name]
    make = jax.jit(
        lambda params, routers: upcycled(dense.model, config.model, params, routers), out_shardings=shardings.params
    )
    zeros = jax.jit(lambda: jax.numpy.zeros(program.state.router_bias.shape), out_shardings=shardings.router_bias)
    with whole_or_nothing(run, mine=jax.process_index() == 0):
        save_weights(run, make(nested(arrays), drawn), zeros(), fold.describe())
        if jax.process_index() == 0:
            (run / "config.json").write_text(cli.dump(config))
    if jax.process_index() == 0:
        print(f"each MLP became {shares} experts, repeated {config.model.router.num_experts // shares} times: {run}")
    return config
