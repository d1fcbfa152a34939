"""The sizes of a whole model: plain data, one description per layer, and what follows from them.

A checkpoint's config.json is read into a `PlainConfig`, which needs neither transformers nor torch. `RecurrentConfig`
(models/config.py) is the same for transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from longrecall.errors import UserError, did_you_mean
from longrecall.layers.descriptions.base import MixerConfig
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.limits import check_count, check_mixers
from longrecall.models.value_checks import check_flag, check_mixer_values, check_number, check_whole

LAYER_KEYS = ("mixer", "mlp_size")


@dataclass(frozen=True)
class LayerConfig:
    """One layer: a token mixer and, unless `mlp_size` is 0, a SwiGLU MLP of that inner width."""

    mixer: MixerConfig
    mlp_size: int = 0

    @classmethod
    def from_dict(cls, description: dict[str, Any], index: int) -> LayerConfig:
        """Checked construction; errors name the layer."""
        for key in description:
            if key not in LAYER_KEYS:
                raise UserError(f'layer {index} has no field "{key}".{did_you_mean(key, LAYER_KEYS)}')
        mixer, mlp_size = description.get("mixer", {}), description.get("mlp_size", 0)
        try:
            check_whole("mlp_size", mlp_size, least=0)
            check_mixer_values(mixer)
            return cls(mixer_config(mixer), mlp_size)
        except UserError as error:
            raise UserError(f"layer {index}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back."""
        return {"mixer": self.mixer.to_dict(), "mlp_size": self.mlp_size}


class ModelSizes:
    """What `PlainConfig` and `RecurrentConfig` have in common: the fields that they share say it all."""

    vocab_size: int
    hidden_size: int
    layers: Sequence[dict[str, Any]]
    norm_eps: float
    tie_word_embeddings: bool
    residual_in_fp32: bool
    context_length: int | None
    initializer_range: float

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def layer_configs(self) -> list[LayerConfig]:
        """The checked description of every layer."""
        return [LayerConfig.from_dict(layer, index) for index, layer in enumerate(self.layers)]

    def state_size(self) -> int:
        """Numbers in the recurrent state of one sequence, all layers together."""
        return sum(layer.mixer.state_size() for layer in self.layer_configs())

    def reads_tokens(self) -> bool:
        """Whether a layer looks up tokens that were read before, so that a state must keep their ids."""
        return any(layer.mixer.reads_tokens for layer in self.layer_configs())

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of a checkpoint, in the order of docs/reference/tensors.md."""
        d = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (self.vocab_size, d)}
        # Equal layers have equal tensors.
        known: dict[MixerConfig, dict[str, tuple[int, ...]]] = {}
        for index, layer in enumerate(self.layer_configs()):
            prefix = f"model.layers.{index}."
            shapes[f"{prefix}mixer_norm.weight"] = (d,)
            if layer.mixer not in known:
                known[layer.mixer] = layer.mixer.tensor_shapes(d)
            for name, shape in known[layer.mixer].items():
                shapes[f"{prefix}mixer.{name}"] = shape
            if layer.mlp_size:
                shapes[f"{prefix}mlp_norm.weight"] = (d,)
                for name in ("gate", "up"):
                    shapes[f"{prefix}mlp.{name}_proj.weight"] = (layer.mlp_size, d)
                shapes[f"{prefix}mlp.down_proj.weight"] = (d, layer.mlp_size)
        shapes["model.norm.weight"] = (d,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes


@dataclass
class PlainConfig(ModelSizes):
    """A checked config.json. The fields are explained in `RecurrentConfig`.

    Raises:
        UserError: an unknown mixer or key, or a value that cannot be, named with its layer.
    """

    vocab_size: int = 258
    hidden_size: int = 64
    layers: Sequence[dict[str, Any]] = ()
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    residual_in_fp32: bool = True
    context_length: int | None = None
    initializer_range: float = 0.02
    more: Mapping[str, Any] = field(default_factory=dict)
    """What transformers alone reads, such as token ids."""

    def __post_init__(self) -> None:
        check_count("layers", len(self.layers))
        check_mixers(self.layers)
        check_whole("vocab_size", self.vocab_size)
        check_whole("hidden_size", self.hidden_size)
        check_number("norm_eps", self.norm_eps, positive=True)
        check_flag("tie_word_embeddings", self.tie_word_embeddings)
        check_flag("residual_in_fp32", self.residual_in_fp32)
        check_number("initializer_range", self.initializer_range)
        if self.initializer_range < 0:
            raise UserError(f'"initializer_range" is {self.initializer_range!r}; it must be 0 or more')
        if self.context_length is not None:
            check_whole("context_length", self.context_length)
        self.layers = [LayerConfig.from_dict(layer, index).to_dict() for index, layer in enumerate(self.layers)]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Read the keys of a config.json; those that are no sizes go to `more`."""
        known = cls.names()
        more = {key: value for key, value in raw.items() if key not in known}
        return cls(**{key: value for key, value in raw.items() if key in known}, more=more)

    @classmethod
    def names(cls) -> set[str]:
        """The keys of a config.json that say sizes."""
        return {entry.name for entry in fields(cls)} - {"more"}

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` and `RecurrentConfig.from_dict` read."""
        return {name: getattr(self, name) for name in self.names()} | dict(self.more)
