"""Public configurations (`config.json`) to and from `ModelConfig`, by a family's table of fields.

Nothing is passed over: a field is in the family's table, known to leave the mathematics alone, or an error.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moex.config import AttentionConfig, ModelConfig, RopeConfig, RouterConfig

NEUTRAL: frozenset[str] = frozenset((
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "ep_size", "max_position_embeddings",
    "max_window_layers", "model_type", "num_mtp_layers", "num_nextn_predict_layers", "output_router_logits",
    "pad_token_id", "qk_head_dim", "quantization_config", "sep_token_id", "torch_dtype", "transformers_version",
    "unk_token_id", "use_cache", "_name_or_path",
))  # fmt: skip
"""Fields that say nothing of the mathematics, or that the reader of weights looks at."""

TRAINING_ONLY: frozenset[str] = frozenset((
    "init_std", "vocab_multiple", "mtp_depth", "mtp_coefficient", "router.aux_coefficient",
    "router.sequence_coefficient", "router.global_coefficient", "router.z_coefficient", "router.bias_rate",
    "router.bias_centred", "router.quantile_decay", "router.capacity_factor", "router.capacity_policy",
    "router.pad_to_capacity", "router.jitter", "router.forced", "router.forced_skew",
))  # fmt: skip
"""Paths of `ModelConfig` that no public configuration has to express: a trained model's outputs don't depend on them."""

_MISSING = object()


class Fields:
    """A public configuration that remembers which fields were read."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values
        self.seen: set[str] = set(NEUTRAL)

    def take(self, *names: str, default: Any = _MISSING) -> Any:
        """The value under the first of the names that is there; null counts as absent where there is a default."""
        self.seen.update(names)
        for name in names:
            value = self.values.get(name, _MISSING)
            if value is not _MISSING and not (value is None and default is not _MISSING):
                return value
        if default is _MISSING:
            raise ValueError(f"config.json has no field {' or '.join(names)}, and the family has no usual value for it")
        return default

    def only(self, name: str, allowed: tuple) -> None:
        """Raises ValueError when the field has a value that isn't allowed; absent or null is."""
        value = self.take(name, default=None)
        if value is not None and value not in allowed:
            raise ValueError(
                f"config.json: {name}={value!r} is not supported here; it may be {' or '.join(map(repr, allowed))}"
            )

    def finish(self) -> None:
        """Raises ValueError when a field was never looked at."""
        if unknown := sorted(set(self.values) - self.seen):
            shown = ", ".join(f"{name}={self.values[name]!r}" for name in unknown)
            raise ValueError(f"config.json has fields that may change the mathematics and are not known here: {shown}")


class Part(NamedTuple):
    """Fields that don't map one to one. read: Fields -> model paths with values.  write: model paths -> public fields."""

    read: Callable[[Fields], Mapping[str, Any]]
    write: Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One family. architecture: the public class that loads it.

    fields: public name -> path in `ModelConfig`, equal values.  usual: what absent fields mean.  fixed: paths whose value the
    family has without a field.  only: fields that must have one of the values; the first is written.
    """

    architecture: str
    fields: Mapping[str, str]
    usual: Mapping[str, Any]
    fixed: Mapping[str, Any]
    only: Mapping[str, tuple]
    parts: tuple[Part, ...]


def read(family: Family, values: Mapping[str, Any]) -> ModelConfig:
    """The configuration that a public one describes.  Raises ValueError, naming the field, for what is not known here."""
    fields = Fields(values)
    flat = dict(family.fixed)
    for name, path in family.fields.items():
        names = EXPERT_COUNTS if name in EXPERT_COUNTS else (name,)
        flat[path] = fields.take(*names, default=family.usual.get(name, _MISSING))
    for name, allowed in family.only.items():
        fields.only(name, allowed)
    for part in family.parts:
        flat |= part.read(fields)
    fields.finish()
    return unflattened(flat)


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names under which families, or versions of the library that wrote a file, have the number of experts."""


def write(family: Family, model_type: str, model: ModelConfig) -> dict[str, Any]:
    """A public configuration that `read` takes back to the same model.

    Raises ValueError, with the values, for what the family cannot express; training-only settings are left out.
    """
    flat = flattened(model)
    values = dict(architectures=[family.architecture], model_type=model_type)
    values |= {name: flat[path] for name, path in family.fields.items()}
    values |= {name: allowed[0] for name, allowed in family.only.items() if allowed[0] is not None}
    for part in family.parts:
        values |= part.write(flat)
    again = flattened(read(family, values))
    lost = {path: value for path, value in flat.items() if again[path] != value and path not in TRAINING_ONLY}
    if lost:
        shown = ", ".join(f"{path}={value!r} (would be {again[path]!r})" for path, value in lost.items())
        raise ValueError(f"the family {model_type} has no way to say {shown}")
    return values


def flattened(model: Any, prefix: str = "") -> dict[str, Any]:
    """Values by dotted path."""
    flat = {}
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        inner = dataclasses.is_dataclass(value)
        flat |= flattened(value, f"{prefix}{field.name}.") if inner else {prefix + field.name: value}
    return flat


def unflattened(flat: Mapping[str, Any]) -> ModelConfig:
    """The configuration with these values, defaults elsewhere; a whole number becomes a float where the field is one.

    Raises ValueError for a value that is not of its field's type.
    """
    usual = flattened(ModelConfig())
    flat = {path: _of_type(path, value, usual[path]) for path, value in flat.items()}
    inside = lambda prefix: {
        path.removeprefix(prefix): value
        for path, value in flat.items()
        if path.startswith(prefix) and "." not in path.removeprefix(prefix)
    }
    attention = AttentionConfig(rope=RopeConfig(**inside("attention.rope.")), **inside("attention."))
    return ModelConfig(attention=attention, router=RouterConfig(**inside("router.")), **inside(""))


def _of_type(path: str, value: Any, usual: Any) -> Any:
    is_whole = lambda x: isinstance(x, int) and not isinstance(x, bool) and abs(x) < 2**53
    if isinstance(usual, float):
        if is_whole(value) or (isinstance(value, float) and math.isfinite(value)):
            return float(value)
        wanted = "a finite number"
    elif isinstance(usual, tuple):
        if isinstance(value, tuple) and all(map(is_whole, value)):
            return value
        wanted = "whole numbers"
    else:
        kind = type(usual)
        if is_whole(value) if kind is int else type(value) is kind:
            return value
        wanted = {bool: "true or false", int: "a whole number"}.get(kind, "text")
    raise ValueError(f"config.json: {str(value)[:60]!r} stands for model.{path}, which is {wanted}")
