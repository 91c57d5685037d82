"""Which public tensor is which part of moex's parameters, and how the numbers of the one lie in the other.

L layers of a stack, E experts, D model width, F a width, N heads, H head width, V vocabulary. Public matrices are [out, in];
moex's are [in, ...out...], with heads, gate and up as dims of their own.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from moex.config import ModelConfig
from moex.models.pattern import kinds

ROUTER_BIAS = "router_bias"
"""Stands among the parameters' names for the balancing bias, float32 [L, E], which is state and no parameter."""


class Piece(NamedTuple):
    """A part of a public tensor and its place.

    tensor: public name.  index: numbers in its leading dims.  param: name of the parameter, a path joined by dots.  at: index
    into the whole parameter.  how: key into `LAYOUTS`.
    """

    tensor: str
    index: tuple[int, ...]
    param: str
    at: tuple[int | slice, ...]
    how: str


class Layout(NamedTuple):
    """public: piece -> public numbers.  own: (public numbers, shape of the piece) -> piece."""

    public: Callable[[np.ndarray], np.ndarray]
    own: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]


LAYOUTS = dict(
    same=Layout(lambda x: x, lambda x, shape: x),
    flat=Layout(lambda x: x.reshape(-1), lambda x, shape: x.reshape(shape)),
    row=Layout(lambda x: x[None], lambda x, shape: x.reshape(shape)),
    matrix=Layout(lambda x: x.reshape(x.shape[0], -1).T, lambda x, shape: x.T.reshape(shape)),
    back=Layout(lambda x: x.reshape(-1, x.shape[-1]).T, lambda x, shape: x.T.reshape(shape)),
    # gate and up in turns: [..., 2, F] and [..., F 2]
    turns=Layout(
        lambda x: x.swapaxes(-1, -2).reshape(*x.shape[:-2], -1),
        lambda x, shape: x.reshape(*shape[:-2], shape[-1], 2).swapaxes(-1, -2),
    ),
)


class Style(NamedTuple):
    """What differs between families in names. mlp: gate, up and down.  fused: experts' tensors hold all experts."""

    block: str = "mlp"
    router: str = "gate"
    mlp: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"
    fused: bool = False


_STYLES = dict(
    mixtral=Style(block="block_sparse_moe", mlp=("w1", "w3", "w2")),
    qwen2_moe=Style(shared="shared_expert"),
    gpt_oss=Style(router="router", fused=True),
)
_USUAL_MLP = Style().mlp


_WITH_FURTHER = ("deepseek_v3", "glm4_moe")
"""Families whose public files have layers that predict further tokens."""


def pieces(model: ModelConfig, family: str) -> list[Piece]:
    """Of every parameter, in the public order of layers; together they are all of the model.

    Raises ValueError when the model predicts further tokens and the family's files have no place for that.
    """
    if model.mtp_depth and family not in _WITH_FURTHER:
        raise ValueError(
            f"model.mtp_depth={model.mtp_depth}: public files of {family} have no layers that predict further tokens, only "
            f"those of {', '.join(_WITH_FURTHER)}"
        )
    style = _STYLES.get(family, Style())
    return list(_ends(model)) + list(_layers(model, style)) + list(_further(model, style))


def _ends(model: ModelConfig) -> Iterator[Piece]:
    real = (slice(0, model.vocab_size),)  # the rows past the vocabulary are not public
    yield Piece("model.embed_tokens.weight", (), "ends.embedding", real, "same")
    yield Piece("model.norm.weight", (), "ends.norm.weight", (), "same")
    if not model.tie_embeddings:
        yield Piece("lm_head.weight", (), "ends.head", real, "same")


def _layers(model: ModelConfig, style: Style) -> Iterator[Piece]:
    done = dict(dense_layers=0, moe_layers=0)
    for i, kind in enumerate(kinds(model)):
        at = done[kind.stack]
        yield from _one(_Layer(f"model.layers.{i}", kind.stack, at), model, style, at if kind.sparse else None)
        done[kind.stack] += 1


def _further(model: ModelConfig, style: Style) -> Iterator[Piece]:
    """Of layers past the last; the files repeat the embedding and the head in each of them."""
    for depth in range(model.mtp_depth):
        layer = _Layer(f"model.layers.{model.num_layers + depth}", "mtp", depth)
        yield layer.piece("enorm.weight", "ahead.embedding_norm.weight")
        yield layer.piece("hnorm.weight", "ahead.hidden_norm.weight")
        yield layer.piece("eh_proj.weight", "ahead.project", "matrix")
        yield layer.piece("shared_head.norm.weight", "ahead.norm.weight")
        real = (slice(0, model.vocab_size),)
        yield Piece(f"{layer.public}.embed_tokens.weight", (), "ends.embedding", real, "same")
        head = "ends.embedding" if model.tie_embeddings else "ends.head"
        yield Piece(f"{layer.public}.shared_head.head.weight", (), head, real, "same")
        yield from _one(layer._replace(inside="layer."), model, style, model.num_moe_layers + depth)


def _one(layer: "_Layer", model: ModelConfig, style: Style, router: int | None) -> Iterator[Piece]:
    """router: number of its router among all, None for a dense layer."""
    yield layer.piece("input_layernorm.weight", "attention_norm.weight")
    yield from layer.all(_latent(model) if model.attention.kind == "mla" else _grouped(model), "self_attn", "attention")
    yield layer.piece("post_attention_layernorm.weight", "ffn_norm.weight")
    if router is None:
        yield from layer.mlp("mlp", "mlp", _USUAL_MLP)
        return
    yield layer.piece(f"{style.block}.{style.router}.weight", "moe.router.weight", "matrix")
    if model.router.logit_bias:
        yield layer.piece(f"{style.block}.{style.router}.bias", "moe.router.bias")
    if model.router.score_function == "sigmoid":
        name = f"{layer.public}.{style.block}.gate.e_score_correction_bias"
        yield Piece(name, (), ROUTER_BIAS, (router,), "same")
    yield from _experts(layer, model, style)
    if model.shared_width:
        yield from layer.mlp(f"{style.block}.{style.shared}", "moe.shared", _USUAL_MLP)
    if model.shared_gate:
        yield layer.piece(f"{style.block}.shared_expert_gate.weight", "moe.shared_gate", "row")


class _Layer(NamedTuple):
    """One layer: its public name, its stack, its number there, and what stands before its parameters' names."""

    public: str
    stack: str
    number: int
    inside: str = ""

    def piece(self, public: str, own: str, how: str = "same", *at: int | slice, index: tuple[int, ...] = ()) -> Piece:
        return Piece(f"{self.public}.{public}", index, f"{self.stack}.{self.inside}{own}", (self.number, *at), how)

    def all(self, names: Mapping[str, tuple[str, str]], public: str, own: str) -> Iterator[Piece]:
        for name, (path, how) in names.items():
            yield self.piece(f"{public}.{name}", f"{own}.{path}", how)

    def mlp(self, public: str, own: str, names: tuple[str, str, str], *expert: int) -> Iterator[Piece]:
        gate, up, down = names
        every = slice(None)
        yield self.piece(f"{public}.{gate}.weight", f"{own}.gate_up", "matrix", *expert, every, 0)
        yield self.piece(f"{public}.{up}.weight", f"{own}.gate_up", "matrix", *expert, every, 1)
        yield self.piece(f"{public}.{down}.weight", f"{own}.down", "matrix", *expert)


def _experts(layer: _Layer, model: ModelConfig, style: Style) -> Iterator[Piece]:
    public, own = f"{style.block}.experts", "moe.experts"
    for e in range(model.router.num_experts):
        if not style.fused:
            yield from layer.mlp(f"{public}.{e}", own, style.mlp, e)
            continue
        fused = dict(gate_up_proj=("gate_up", "turns"), down_proj=("down", "same"))
        fused |= dict(gate_up_proj_bias=("gate_up_bias", "turns"), down_proj_bias=("down_bias", "same"))
        for name, (path, how) in fused.items():
            yield layer.piece(f"{public}.{name}", f"{own}.{path}", how, e, index=(e,))


def _grouped(model: ModelConfig) -> dict[str, tuple[str, str]]:
    a, names = model.attention, dict(q="query", k="key", v="value")
    found = {f"{name}_proj.weight": (path, "matrix") for name, path in names.items()}
    found["o_proj.weight"] = ("out", "back")
    if a.bias:
        found |= {f"{name}_proj.bias": (f"{path}_bias", "flat") for name, path in names.items()}
    if a.out_bias:
        found["o_proj.bias"] = ("out_bias", "same")
    if a.sinks:
        found["sinks"] = ("sinks", "same")
    if a.qk_norm:
        end, how = ("s", "flat") if a.qk_norm_joint else (".weight", "same")
        found |= {f"{name}_norm.weight": (f"{names[name]}_norm{end}", how) for name in "qk"}
    return found


def _latent(model: ModelConfig) -> dict[str, tuple[str, str]]:
    found = {
        "q_a_proj.weight": ("query_down", "matrix"),
        "q_a_layernorm.weight": ("query_norm.weight", "same"),
        "q_b_proj.weight": ("query_up", "matrix"),
    }
    if not model.attention.q_latent_dim:
        found = {"q_proj.weight": ("query_up", "matrix")}
    return found | {
        "kv_a_proj_with_mqa.weight": ("kv_down", "matrix"),
        "kv_a_layernorm.weight": ("kv_norm.weight", "same"),
        "kv_b_proj.weight": ("kv_up", "matrix"),
        "o_proj.weight": ("out", "back"),
    }
