"""A vocabulary that tensor parallelism doesn't divide: rows are added inside, and no public file ever sees them."""

import jax
import numpy as np
from safetensors.numpy import load_file

from mesh import fold
from moex import cli
from moex.checkpoint import open_step, save_weights
from moex.train.program import build

FLAGS = [
    "tiny", "--model.vocab-size=1003", "--model.vocab-multiple=8", "--model.num-layers=1", "--model.d-model=32",
    "--model.attention.head-dim=16", "--model.attention.num-heads=8", "--parallel.tp=8", "--parallel.dp=1",
    "--parallel.edp=8", "--train.seq-len=32",
]  # fmt: skip


def test_added_rows_stay_inside(public):
    config = cli.parse(FLAGS).config
    assert config.model.padded_vocab_size == 1008
    program = build(config, fold(dict(tp=8), dict(edp=8)), jax.devices()[:8])
    state = program.initial_state()
    source = public.tmp_path / "source"
    save_weights(source, state.params, state.router_bias)
    (source / "config.json").write_text(cli.dump(config))
    out = public.exported(source)
    tensors = load_file(out / "model.safetensors")
    assert tensors["lm_head.weight"].shape == tensors["model.embed_tokens.weight"].shape == (1003, 32)
    run = public.imported(out, *FLAGS[7:], "--model.vocab-multiple=8")
    again, before = open_step(run)["params"], jax.device_get(state.params)
    jax.tree.map(np.testing.assert_array_equal, again, before)
    np.testing.assert_array_equal(again["ends"]["head"][1003:], 0)
