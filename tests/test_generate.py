"""`python -m moex.generate` and `moex.evaluate` on a run of three steps over eight devices."""

import json
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh import ALONE
from mesh.distributed import Start
from moex import trainer
from moex.checkpoint import open_step
from moex.config import (
    AttentionConfig,
    ModelConfig,
    ObserveConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from moex.data import Windows, open_corpus
from moex.evaluate import __main__ as evaluate
from moex.evaluate.harness import harness_model
from moex.evaluate.score import score
from moex.generate import __main__ as generate
from moex.generate import nucleus
from moex.layers.tokens import Tokens, unpacked
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
        optimizer=OptimizerConfig(warmup_steps=1, ema_decay=0.5),
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
        (("--top-p", "0"), "top_p=0.0 above 0"),
        (("--devices", "9"), "devices=9: this machine has 8"),
        (("--devices", "8", "--parallel.ep", "8", "--parallel.transport", "alltoall"), "num_experts=4"),
        (("--step", "2"), "no checkpoint of step 2; it has [3]"),
    ],
)
def test_wrong_arguments_end_with_2_and_the_reason(run, capsys, arguments, message):
    assert generate.main([str(run), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_texts_at_once_on_a_mesh_are_those_of_each_alone_on_one_device(text_of):
    """Three prompts of different lengths over 8 devices, split three ways."""
    prompts, options = ("import ", "x", "def f(a, b):"), ("--temperature", "0", "--num-tokens", "6")
    alone = [text_of("--prompt", prompt, *options).removesuffix("\n") for prompt in prompts]
    for split in (
        ("--parallel.ep", "4", "--parallel.transport", "alltoall"),
        ("--parallel.tp", "2", "--parallel.cp", "2", "--parallel.ep", "2", "--parallel.transport", "alltoall"),
    ):
        together = text_of("--prompt", *prompts, *options, "--devices", "8", *split)
        assert together == "\n\n".join(alone) + "\n"


def test_average_of_the_parameters_writes_otherwise(text_of):
    options = ("--temperature", "1", "--num-tokens", "32")
    assert text_of(*options, "--weights", "ema") != text_of(*options)


def test_nucleus_keeps_the_likeliest_that_reach_the_share():
    scores = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25], [0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]]))
    kept = lambda top_p: jnp.isfinite(nucleus(scores, top_p))[0].astype(int).tolist()
    assert [kept(p) for p in (0.01, 0.5, 0.51, 0.75, 0.76, 0.91, 1.0)] == [
        [0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 1], [0, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1],
    ]  # fmt: skip
    assert jnp.isfinite(nucleus(scores, 0.5)).sum(axis=-1).tolist() == [1, 2, 1]


def test_a_narrow_nucleus_is_greedy_whatever_the_seed(text_of):
    greedy = text_of("--temperature", "0", "--num-tokens", "12")
    assert text_of("--temperature", "2", "--top-p", "1e-6", "--num-tokens", "12", "--seed", "7") == greedy


def test_evaluation_offline_is_exact_on_any_mesh(run, capsys):
    """Against the decoder called directly on the same rows, token by token."""
    results = []
    for split in (
        (),
        ("--devices", "8", "--parallel.tp", "2", "--parallel.ep", "4", "--parallel.transport", "alltoall"),
    ):
        assert evaluate.main([str(run), "--max-rows", "8", "--json", *split]) == 0
        results.append(json.loads(capsys.readouterr().out))
    one, other = results
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-6) and other["tokens"] == one["tokens"]
    saved, decoder, corpus = open_step(run), Decoder(MODEL), open_corpus("stdlib")
    rows = Windows(corpus.held_out.shards, SEQ_LEN).read(np.arange(8))
    tokens = Tokens(*(jnp.asarray(rows[name]) for name in ("segments", "positions")), unpacked(8, SEQ_LEN).index)
    hidden, _ = decoder.hidden(saved["params"], saved["router_bias"], rows["tokens"], tokens, ALONE, jnp.float32)
    scores = jax.nn.log_softmax(hidden @ decoder.head(saved["params"])[: MODEL.vocab_size].T)
    picked = jnp.take_along_axis(scores, rows["labels"][..., None], axis=-1)[..., 0]
    assert one["loss"] == pytest.approx(-float(picked[rows["mask"]].mean()), rel=1e-5)
    assert one["tokens"] == rows["mask"].sum()
    assert one["perplexity"] == pytest.approx(math.exp(one["loss"]))
    tokens_a_byte = corpus.held_out.num_tokens / corpus.held_out.num_bytes
    assert one["bits_per_byte"] == pytest.approx(one["loss"] / math.log(2) * tokens_a_byte)


def test_scores_are_the_decoders_log_probabilities(run):
    """Pairs of several lengths, one over the sequence length, on one device and on eight; a greedy one is known as such."""
    saved, decoder, text = open_step(run), Decoder(MODEL), list(b"import sys, os; def f(x): return x")

    @jax.jit
    def read(params, bias_LE, ids_BS):
        x, _ = decoder.hidden(params, bias_LE, ids_BS, unpacked(*ids_BS.shape), ALONE, jnp.float32)
        return jax.nn.log_softmax(x[0] @ decoder.head(params)[: MODEL.vocab_size].T)

    log_probabilities = lambda ids_BS: read(saved["params"], saved["router_bias"], ids_BS)

    pairs = [(text[:3], text[3:5]), (text[:1], text[1 : SEQ_LEN + 1]), (text[:20], text[20:25])]
    best = [int(log_probabilities(jnp.array([text[:6]]))[-1].argmax())]
    pairs.append((text[:6], best))
    wanted = []
    for context, continuation in pairs:
        ids = np.array([*context, *continuation][-(SEQ_LEN + 1) :])
        table = np.asarray(log_probabilities(jnp.asarray(ids[None, :-1])))
        wanted.append(table[np.arange(len(ids) - 1), ids[1:]][-len(continuation) :].sum())
    for devices, split in ((1, {}), (8, dict(cp=2, tp=2, ep=4, transport="alltoall"))):
        program = generate.program_of(run, devices, ParallelConfig(**split))
        found = score(program, generate.restored(program, run), pairs)
        np.testing.assert_allclose([one.logp for one in found], wanted, rtol=1e-5)
        assert found[-1].greedy and not found[1].greedy
    with pytest.raises(ValueError, match="a context of 0 and a continuation of 1 tokens"):
        score(program, program.state, [([], [1])])


def test_the_harness_gets_what_it_asks_for(run, monkeypatch):
    """With stand-ins for the two modules of lm-eval that the model is made of."""
    window = lambda ids, prefix_token, max_seq_len, context_len: [([prefix_token], ids[:4]), (ids[:4], ids[4:])]
    utils = types.SimpleNamespace(get_rolling_token_windows=window, make_disjoint_window=lambda pair: pair)
    stand_ins = {"": {}, ".api": {}, ".api.model": dict(TemplateLM=object), ".utils": vars(utils)}
    for name, content in stand_ins.items():
        monkeypatch.setitem(sys.modules, f"lm_eval{name}", types.SimpleNamespace(__path__=[], **content))
    program = generate.program_of(run)
    state, tokenizer = generate.restored(program, run), open_corpus("stdlib").tokenizer
    model = harness_model(program, state, tokenizer)
    assert model.eot_token_id == 0 and model.tok_encode("ab") == [97, 98]
    text = list(b"import")
    pairs = [([0], text[:4]), (text[:4], text[4:])]
    found = score(program, state, pairs)
    assert model._loglikelihood_tokens([("", *pair) for pair in pairs]) == [tuple(one) for one in found]
    request = lambda *args: types.SimpleNamespace(args=args)
    assert model.loglikelihood_rolling([request("import")]) == pytest.approx([sum(one.logp for one in found)])
    (plain,) = model.generate_until([request("import ", dict(max_gen_toks=6))])
    (cut,) = model.generate_until([request("import ", dict(max_gen_toks=6, until=plain[2]))])
    assert len(plain) > 2 and cut == plain.partition(plain[2])[0]


def test_a_missing_harness_is_named(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert evaluate.main([str(run), "--tasks", "x"]) == 2
    assert "--tasks needs lm-eval: install moex-jax[eval]" in capsys.readouterr().err


def test_what_cannot_be_evaluated_is_named(run, tmp_path, capsys):
    assert evaluate.main([str(run), "--limit", "3"]) == 2
    assert "limit and task_folder have no effect without --tasks" in capsys.readouterr().err
    assert evaluate.main([str(run), "--tasks", "x", "--max-rows", "3"]) == 2
    assert "have no effect with --tasks" in capsys.readouterr().err
    assert evaluate.main([str(run), "--max-rows", "-1"]) == 2
    assert "max_rows=-1 must not be negative" in capsys.readouterr().err
    assert evaluate.main([str(run), "--corpus", str(tmp_path)]) == 2
    assert "has no index.json" in capsys.readouterr().err


def test_what_is_no_run_folder_is_named(tmp_path, capsys):
    assert generate.main([str(tmp_path / "missing")]) == 2
    assert f"{tmp_path / 'missing'} is no run folder: it has no config.json" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_named(run, tmp_path, capsys):
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    assert generate.main([str(tmp_path)]) == 2
    assert f"{tmp_path} has no folder `checkpoints`" in capsys.readouterr().err
