"""FLOPs a token and numbers of parameters, against published figures, a count by hand and the compiler's."""

import jax
import jax.numpy as jnp
import pytest

from configs.mixtral import mixtral_8x7b
from configs.qwen3 import qwen3_30b_a3b, qwen3_235b_a22b
from mesh import ALONE
from moex.config import AttentionConfig, ModelConfig
from moex.layers import param
from moex.layers.tokens import unpacked
from moex.models import families
from moex.models.decoder import Decoder
from moex.models.flops import mfu, num_parameters, train_flops_per_token
from moex.train.loss import logits

DEEPSEEK_V3 = families.deepseek_v3(
    vocab_size=129_280,
    d_model=7168,
    num_layers=61,
    num_dense_layers=3,
    dense_width=18_432,
    expert_width=2048,
    shared_width=2048,
    num_heads=128,
    nope_dim=128,
    rope_dim=64,
    value_dim=128,
    q_latent_dim=1536,
    kv_latent_dim=512,
    num_experts=256,
    top_k=8,
    num_groups=8,
    top_groups=4,
)


@pytest.mark.parametrize(
    "model, mtp_depth, seq_len, giga",
    [
        (DEEPSEEK_V3, 0, 4096, 249.81),
        (DEEPSEEK_V3, 1, 4096, 259.99),
        (qwen3_235b_a22b().model, 0, 4096, 148.03),
        (qwen3_30b_a3b().model, 0, 4096, 23.006),
        (qwen3_235b_a22b().model, 0, 131_072, 734.7),
        (qwen3_235b_a22b().model, 0, 262_144, 1340.3),
    ],
)
def test_published_flops_of_a_token(model, mtp_depth, seq_len, giga):
    assert train_flops_per_token(model, seq_len, mtp_depth=mtp_depth) / 1e9 == pytest.approx(giga, rel=1e-3)


@pytest.mark.parametrize(
    "model, billions, active_billions",
    [
        (mixtral_8x7b().model, 46.7, 12.9),
        (qwen3_30b_a3b().model, 30.5, 3.3),
        (qwen3_235b_a22b().model, 235, 22),
        (DEEPSEEK_V3, 671, 37),
    ],
)
def test_published_numbers_of_parameters(model, billions, active_billions):
    total, active = num_parameters(Decoder(model).declarations, model)
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)
    assert active / 1e9 == pytest.approx(active_billions, rel=2e-2)


def test_padding_rows_of_the_vocabulary_are_no_parameters():
    model = ModelConfig(vocab_size=250, d_model=8, num_layers=1)
    total, _ = num_parameters(Decoder(model).declarations, model)
    padded = sum(x.size for x in jax.tree.leaves(param.abstract(Decoder(model).declarations)))
    assert padded - total == 2 * 6 * 8


DENSE = ModelConfig(
    vocab_size=128,
    d_model=64,
    num_layers=2,
    num_dense_layers=2,
    dense_width=160,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16),
)


def test_dense_model_by_hand():
    projections = 64 * 64 + 2 * 64 * 32 + 64 * 64
    attention = 2 * 4 * 16 * 32 / 2  # scores and values, half of 32 keys
    per_layer = projections + attention + 3 * 64 * 160
    assert train_flops_per_token(DENSE, 32) == 6 * (2 * per_layer + 64 * 128)


def test_dense_model_against_the_compilers_count():
    """XLA counts every key (a mask saves it nothing) and norms, rotation and softmax, too: a few per cent above."""
    one = ModelConfig(**{**vars(DENSE), "num_layers": 1, "num_dense_layers": 1})  # a scan's body is counted once
    decoder, seq_len = Decoder(one), 32
    ids = jnp.zeros((1, seq_len), jnp.int32)

    def forward(params):
        hidden, _ = decoder.hidden(params, None, ids, unpacked(1, seq_len), ALONE, jnp.float32)
        return logits(hidden[0], decoder.head(params), ALONE, vocab_size=DENSE.vocab_size)

    params = param.abstract(Decoder(one).declarations)
    cost = jax.jit(forward).lower(params).compile().cost_analysis()
    attention = 4 * 16 * seq_len  # the half that causality doesn't need
    want = (train_flops_per_token(one, seq_len) / 3 + 2 * attention) * seq_len
    assert 1.0 <= cost["flops"] / want < 1.06


def test_mfu():
    assert mfu(23.006e9, 16 * 5.2e4, 16, 989e12) == pytest.approx(23.006e9 * 5.2e4 / 989e12)
    assert mfu(1e9, 1e3, 1, None) is None
