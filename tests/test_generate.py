"""`python -m moex.generate` on a run of three steps over eight devices."""

import jax
import jax.numpy as jnp
import pytest

from mesh import ALONE
from mesh.distributed import Start
from moex import generate, trainer
from moex.checkpoint import open_step
from moex.config import (
    AttentionConfig,
    ModelConfig,
    ObserveConfig,
    OptimizerConfig,
    PrecisionConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from moex.layers.tokens import unpacked
from moex.models.decoder import Decoder

pytestmark = pytest.mark.slow  # a training step compiled for eight devices, where no earlier run left it in the cache

SEQ_LEN = 16
MODEL = ModelConfig(
    d_model=32,
    num_layers=2,
    expert_width=32,
    init_std=0.2,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=16),
    router=RouterConfig(num_experts=4, bias_rate=0.01),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder as train.py leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "three"
    config = RunConfig(
        folder=str(folder),
        model=MODEL,
        train=TrainConfig(steps=3, batch_size=8, seq_len=SEQ_LEN),
        optimizer=OptimizerConfig(warmup_steps=1),
        precision=PrecisionConfig(compute_dtype="float32"),
        observe=ObserveConfig(eval_every=0, sample_tokens=0),
    )
    assert trainer.run(config, Start("one process", None, 1, 0)) == 0
    return folder


@pytest.fixture
def text_of(run, capsys):
    """The text that the command prints for more arguments."""

    def text(*arguments: str) -> str:
        assert generate.main([str(run), *arguments]) == 0
        return capsys.readouterr().out

    return text


def test_greedy_takes_the_likeliest_token_of_the_model(run, text_of):
    """Against the decoder called directly on the growing text, without mesh, window or padding."""
    saved, decoder = open_step(run), Decoder(MODEL)

    @jax.jit
    def scores(params, bias_LE, ids_BS):
        hidden, _ = decoder.hidden(params, bias_LE, ids_BS, unpacked(*ids_BS.shape), ALONE, jnp.float32)
        return hidden[0, -1] @ decoder.head(params)[: MODEL.vocab_size].T

    ids = list(b"import ")
    for _ in range(2):
        ids.append(int(scores(saved["params"], saved["router_bias"], jnp.array([ids])).argmax()))
    printed = text_of("--prompt", "import ", "--temperature", "0", "--num-tokens", "2")
    want = "".join(chr(i) if chr(i).isprintable() or chr(i) in "\n\t" else f"\\x{i:02x}" for i in ids if i < 128)
    assert printed.replace("\N{REPLACEMENT CHARACTER}", "").rstrip("\n") == want.rstrip("\n")


def test_greedy_is_deterministic_whatever_the_seed(text_of):
    """Also when the text outgrows the window."""
    options = ("--temperature", "0", "--num-tokens", str(2 * SEQ_LEN))
    first = text_of(*options, "--seed", "1")
    assert first == text_of(*options, "--seed", "2")
    assert first.startswith("def ")


def test_a_seed_names_a_text(text_of):
    options = ("--temperature", "1", "--num-tokens", "32")
    first = text_of(*options, "--seed", "1")
    assert first == text_of(*options, "--seed", "1")
    assert first != text_of(*options, "--seed", "2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-tokens", "0"), "num_tokens=0 must be at least 1"),
        (("--temperature", "-1"), "temperature=-1.0 at least 0"),
        (("--seed", "-1"), "seed=-1 in"),
        (("--prompt", "x" * (SEQ_LEN + 1)), f"the prompt has {SEQ_LEN + 1} tokens; it needs 1 to {SEQ_LEN}"),
        (("--prompt", ""), "the prompt has 0 tokens"),
        (("--step", "2"), "no checkpoint of step 2; it has [3]"),
    ],
)
def test_wrong_arguments_end_with_2_and_the_reason(run, capsys, arguments, message):
    assert generate.main([str(run), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_is_no_run_folder_is_named(tmp_path, capsys):
    assert generate.main([str(tmp_path / "missing")]) == 2
    assert f"{tmp_path / 'missing'} is no run folder: it has no config.json" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_named(run, tmp_path, capsys):
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    assert generate.main([str(tmp_path)]) == 2
    assert f"{tmp_path} has no folder `checkpoints`" in capsys.readouterr().err
