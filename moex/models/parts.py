"""Groups of public fields that don't map one to one to `ModelConfig`: positions, windows, groups, kinds of layers."""

from collections.abc import Mapping
from typing import Any

from moex.config import RopeConfig
from moex.layers.rope import feature_scale
from moex.models.public import Fields, Part

Values = Mapping[str, Any]

_YARN = dict(
    factor="factor", original_max_position_embeddings="original_context", beta_fast="beta_fast", beta_slow="beta_slow",
    mscale="mscale", mscale_all_dim="mscale_all_dim", truncate="truncate",
)  # fmt: skip


def _rope(*, softmax_corrected: bool = False, partial: bool = False) -> Part:
    """softmax_corrected: the family's attention has DeepSeek's correction.  partial: it may rotate a part of a head."""

    def read(fields: Fields) -> Values:
        scaling = dict(fields.take("rope_parameters", "rope_scaling", default={}))
        theta = scaling.pop("rope_theta", None) or fields.take("rope_theta", default=10_000.0)
        fields.seen.add("rope_theta")
        kind = scaling.pop("rope_type", None) or scaling.pop("type", "default")
        scaling.pop("type", None)
        share = scaling.pop("partial_rotary_factor", None) or fields.take(
            "partial_rotary_factor", default=0.5 if partial else 1.0
        )
        attention_factor = scaling.pop("attention_factor", None)
        if kind not in ("default", "yarn") or (share != 1 and not partial):
            raise ValueError(
                f"config.json: positions of rope_type={kind!r} with partial_rotary_factor={share} are not supported here; "
                "rope_type may be 'default' or 'yarn'"
            )
        if unknown := sorted(set(scaling) - (set(_YARN) if kind == "yarn" else set())):
            raise ValueError(f"config.json: rope_scaling of type {kind!r} has unknown fields {unknown}")
        rope = {ours: scaling[name] for name, ours in _YARN.items() if name in scaling}
        if kind == "yarn":
            if "original_context" not in rope:
                rope["original_context"] = fields.take("max_position_embeddings")
            config = RopeConfig(theta=float(theta), **rope)
            if config.mscale_all_dim and not softmax_corrected:
                raise ValueError(
                    f"config.json: mscale_all_dim={config.mscale_all_dim} has no place in this family's attention"
                )
            if attention_factor is not None and abs(attention_factor - feature_scale(config)) > 1e-6:
                raise ValueError(
                    f"config.json: attention_factor={attention_factor} is not supported, only the usual "
                    f"{feature_scale(config):.6g} of rope factor {config.factor}"
                )
        paths = {f"attention.rope.{name}": value for name, value in rope.items()} | {"attention.rope.theta": theta}
        if share != 1:
            head_dim = fields.take("head_dim")
            paths["attention.rope_dim"] = int(head_dim * share)
        return paths

    def write(flat: Values) -> Values:
        values: dict[str, Any] = dict(rope_theta=flat["attention.rope.theta"])
        if partial:
            values["partial_rotary_factor"] = (flat["attention.rope_dim"] or flat["attention.head_dim"]) / flat[
                "attention.head_dim"
            ]
        if flat["attention.rope.factor"] == 1:
            return values
        yarn = {name: flat[f"attention.rope.{ours}"] for name, ours in _YARN.items()}
        usual = dict(mscale=0.0, mscale_all_dim=0.0, truncate=True)
        yarn = {name: value for name, value in yarn.items() if usual.get(name) != value}
        longest = int(flat["attention.rope.factor"] * flat["attention.rope.original_context"])
        return values | dict(max_position_embeddings=longest, rope_scaling=dict(rope_type="yarn", **yarn))

    return Part(read, write)


ROPE, DEEPSEEK_ROPE, PARTIAL_ROPE = _rope(), _rope(softmax_corrected=True), _rope(partial=True)


def _read_head_dim(fields: Fields) -> Values:
    width, heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    return {"attention.head_dim": fields.take("head_dim", default=width // heads)}


HEAD_DIM = Part(_read_head_dim, lambda flat: dict(head_dim=flat["attention.head_dim"]))
"""A head's width, by default the model's over the number of heads."""


def _read_wide_heads(fields: Fields) -> Values:
    width = fields.take("hidden_size") // fields.take("num_attention_heads")
    fields.only("head_dim", (width,))
    return {"attention.head_dim": width}


WIDE_HEADS = Part(_read_wide_heads, lambda flat: {})
"""All heads together are as wide as the model."""


def _read_latent_heads(fields: Fields) -> Values:
    rotated, plain = fields.take("qk_rope_head_dim"), fields.take("qk_nope_head_dim")
    fields.only("head_dim", (rotated, plain + rotated))
    return {"attention.q_latent_dim": fields.take("q_lora_rank", default=0)}


LATENT_HEADS = Part(_read_latent_heads, lambda flat: dict(q_lora_rank=flat["attention.q_latent_dim"] or None))
"""Queries come straight from the model's width where their latent is null."""

WINDOW = Part(
    lambda fields: {"attention.sliding_window": fields.take("sliding_window", default=0)},
    lambda flat: dict(sliding_window=flat["attention.sliding_window"] or None),
)


def _read_layer_types(fields: Fields) -> Values:
    count = fields.take("num_hidden_layers")
    names = fields.take("layer_types", default=(["sliding_attention", "full_attention"] * count)[:count])
    if len(names) != count or set(names) - {"sliding_attention", "full_attention"}:
        raise ValueError(
            f"config.json: layer_types must name sliding_attention or full_attention for {count} layers: {names}"
        )
    ones = tuple(int(name == "sliding_attention") for name in names)
    if 1 not in ones:
        return {}
    size = next(n for n in range(1, count + 1) if all(ones[i] == ones[i % n] for i in range(count)))
    fields.only("initial_context_length", (_original_context(fields),))
    fields.only("experts_per_token", (fields.take("num_experts_per_tok"),))
    return {"attention.sliding_window": fields.take("sliding_window"), "attention.window_pattern": ones[:size]}


def _original_context(fields: Fields) -> Any:
    return dict(fields.take("rope_parameters", "rope_scaling", default={})).get("original_max_position_embeddings")


def _write_layer_types(flat: Values) -> Values:
    pattern, count = flat["attention.window_pattern"] or (1,), flat["num_layers"]
    window = flat["attention.sliding_window"]
    names = ["sliding_attention" if window and pattern[i % len(pattern)] else "full_attention" for i in range(count)]
    return dict(layer_types=names, sliding_window=window)


LAYER_TYPES = Part(_read_layer_types, _write_layer_types)
"""Which layers have the window."""


def _read_qwen_layers(fields: Fields) -> Values:
    dense, step = list(fields.take("mlp_only_layers", default=[])), fields.take("decoder_sparse_step", default=1)
    if dense != list(range(len(dense))) or (dense and step != 1):
        raise ValueError(
            f"config.json: mlp_only_layers={dense} with decoder_sparse_step={step} is not supported; either the first "
            "layers are dense or every n-th has experts"
        )
    fields.only("use_sliding_window", (False,))
    fields.take("sliding_window", default=0)  # without effect then
    full = ["full_attention"] * fields.take("num_hidden_layers")
    fields.only("layer_types", (full,))
    return dict(num_dense_layers=len(dense), moe_every=step)


QWEN_LAYERS = Part(
    _read_qwen_layers,
    lambda flat: dict(mlp_only_layers=list(range(flat["num_dense_layers"])), decoder_sparse_step=flat["moe_every"]),
)


def _read_shared(fields: Fields) -> Values:
    return dict(shared_width=fields.take("n_shared_experts", default=0) * fields.take("moe_intermediate_size"))


def _write_shared(flat: Values) -> Values:
    return dict(n_shared_experts=flat["shared_width"] // flat["expert_width"])


SHARED_EXPERTS = Part(_read_shared, _write_shared)
"""Several shared experts are one of their joint width."""

V3_GROUPS = Part(
    lambda fields: {
        "router.num_groups": fields.take("n_group", default=1),
        "router.top_groups": fields.take("topk_group", default=1),
    },
    lambda flat: dict(n_group=flat["router.num_groups"], topk_group=flat["router.top_groups"]),
)


def _read_v2_groups(fields: Fields) -> Values:
    method = fields.take("topk_method", default="greedy")
    groups, top = fields.take("n_group", default=1), fields.take("topk_group", default=1)
    if method == "greedy" or groups == 1:
        return {}
    if method != "group_limited_greedy":
        raise ValueError(f"config.json: topk_method={method!r} must be 'greedy' or 'group_limited_greedy'")
    return {"router.num_groups": groups, "router.top_groups": top, "router.group_score_top": 1}


def _write_v2_groups(flat: Values) -> Values:
    groups = flat["router.num_groups"]
    if groups == 1:
        return dict(topk_method="greedy")
    return dict(topk_method="group_limited_greedy", n_group=groups, topk_group=flat["router.top_groups"])


V2_GROUPS = Part(_read_v2_groups, _write_v2_groups)
"""A group's rank is that of its best expert."""


def _read_sequence_aux(fields: Fields) -> Values:
    coefficient, by_sequence = fields.take("aux_loss_alpha", default=0.0), fields.take("seq_aux", default=True)
    kind = "sequence" if by_sequence else "aux"
    return {"router.aux_coefficient": 0.0, f"router.{kind}_coefficient": coefficient}


SEQUENCE_AUX = Part(_read_sequence_aux, lambda flat: {})
"""Weight of a balance loss in training; 0 where the file doesn't say."""
