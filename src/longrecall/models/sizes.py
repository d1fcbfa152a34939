"""The sizes of a whole model: plain data, one description per layer, and what follows from them.

A checkpoint's config.json is read into a `PlainConfig`, which needs neither transformers nor torch. `RecurrentConfig`
(models/config.py) is the same for transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from longrecall.errors import UserError, did_you_mean
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, under
from longrecall.layers.descriptions.block import BlockConfig, NormConfig
from longrecall.layers.descriptions.mlp import MLPConfig
from longrecall.layers.mixers.registry import mixer_config
from longrecall.models.limits import check_count, check_mixers
from longrecall.models.value_checks import check_flag, check_mixer_values, check_number, check_whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ADDED = (
    *("embedding_multiplier", "embedding_norm", "final_norm", "logits_multiplier", "logits_soft_cap"),
    "memory_tokens",
)
"""Fields of a config.json that are written only where they are not at their default: most models have none."""

LAYER_KEYS = ("mixer", "mlp_size", "blocks")


@dataclass(frozen=True)
class LayerConfig:
    """One layer: residual blocks, one after the other.

    Most layers have two, a token mixer and a SwiGLU MLP, each after an RMS norm; their plain description is
    ``{"mixer": {...}, "mlp_size": N}`` (0 = no MLP). Any other is
    ``{"blocks": [{"name": ..., "module": {...}}, ...]}``.
    The state of the first block's module has its own names, that of another ``{block}.`` in front of them.
    """

    blocks: tuple[BlockConfig, ...]

    @classmethod
    def of(cls, mixer: MixerConfig, mlp_size: int = 0) -> Self:
        """The usual layer: a token mixer and, unless `mlp_size` is 0, a SwiGLU MLP of that inner width."""
        mlp = (BlockConfig("mlp", MLPConfig(mlp_size)),) if mlp_size else ()
        return cls((BlockConfig("mixer", mixer), *mlp))

    @classmethod
    def from_dict(cls, description: dict[str, Any], index: int) -> Self:
        """Checked construction; errors name the layer."""
        for key in description:
            if key not in LAYER_KEYS:
                raise UserError(f'layer {index} has no field "{key}".{did_you_mean(key, LAYER_KEYS)}')
        try:
            if "blocks" in description:
                return cls(_blocks(description))
            mixer, mlp_size = description.get("mixer", {}), description.get("mlp_size", 0)
            check_whole("mlp_size", mlp_size, least=0)
            check_mixer_values(mixer)
            return cls.of(mixer_config(mixer), mlp_size)
        except UserError as error:
            raise UserError(f"layer {index}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back."""
        if self == LayerConfig.of(self.mixer, self.mlp_size):
            return {"mixer": self.mixer.to_dict(), "mlp_size": self.mlp_size}
        return {"blocks": [block.to_dict() for block in self.blocks]}

    @property
    def mixer(self) -> MixerConfig:
        """The first block's module: the token mixer, where the layer has one."""
        return self.blocks[0].module

    @property
    def mlp_size(self) -> int:
        """The inner width of the MLP after the token mixer; 0 = it has none."""
        mlp = next((block.module for block in self.blocks[1:] if isinstance(block.module, MLPConfig)), None)
        return 0 if mlp is None else mlp.inner_size

    def parts(self) -> Iterator[tuple[str, MixerConfig]]:
        """Every block's module with what stands before the names of its state: nothing for the first one."""
        for index, block in enumerate(self.blocks):
            yield (f"{block.name}." if index else ""), block.module

    def state_shapes(self) -> StateShapes:
        """Shape of every state tensor of one sequence, without the batch dimension."""
        return {f"{path}{name}": shape for path, part in self.parts() for name, shape in part.state_shapes().items()}

    def state_size(self) -> int:
        """Numbers in the recurrent state of one sequence."""
        return sum(part.state_size() for _, part in self.parts())

    def caches(self) -> list[tuple[int, int | None]]:
        """Caches that grow with the context, as `MixerConfig.caches` has them."""
        return [cache for _, part in self.parts() for cache in part.caches()]

    def layer_type(self) -> str:
        """What transformers calls such a layer (`ALLOWED_LAYER_TYPES`).

        A layer with attention and a recurrence is "linear_attention" too, not "hybrid": sharding the tokens over
        processes is as wrong for it, and Accelerate refuses that by this name alone. So is one that shares keys.
        """
        kept = set(self.state_shapes())
        if any(getattr(module, "shared_keys", None) for _, part in self.parts() for module in part.with_inner()):
            return "linear_attention"
        if not kept:
            # The one name there for a layer without a token mixer, experts or not.
            return "moe"
        if kept - self.attention_caches():
            return "linear_attention"
        windows = [window for _, window in self.caches()]
        return "full_attention" if None in windows else "sliding_attention"

    def attention_caches(self) -> set[str]:
        """Names of the state's tensors that are caches of attention: those with the positions of their tokens."""
        shapes = self.state_shapes()
        # Those of memory tokens are there from the start, and stay.
        names = [name for name, shape in shapes.items() if not all(shape)]
        paths = {name.removesuffix("position") for name in names if name.rpartition(".")[2] == "position"}
        return {name for name in names if name.removesuffix(name.rpartition(".")[2]) in paths}

    def zero_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The state before the first token, as `MixerConfig.zero_state` has it."""
        parts = ((path, part.zero_state(batch, device, dtype)) for path, part in self.parts())
        return {f"{path}{name}": tensor for path, state in parts for name, tensor in state.items()}


def read_layers(layers: Sequence[dict[str, Any]]) -> list[LayerConfig]:
    """The checked descriptions of all layers. Equal ones, as most models have them, are looked at once."""
    known: dict[str, LayerConfig] = {}
    found = []
    for index, layer in enumerate(layers):
        text = repr(layer)
        if text not in known:
            known[text] = LayerConfig.from_dict(layer, index)
        found.append(known[text])
    return found


def mixer_of(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The plain description of a layer's first module, the token mixer where it has one."""
    found: dict[str, Any] = layer["blocks"][0]["module"] if "blocks" in layer else layer["mixer"]
    return found


def module_at(layer: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The plain description of what keeps a layer's state under a path.

    "" is the first block's module, ``ssm`` a mixer inside it, ``second`` and ``second.new`` those of a later block.
    """
    names = path.split(".") if path else []
    later = {block["name"]: block["module"] for block in layer.get("blocks", ())[1:]}
    found: dict[str, Any] = later[names.pop(0)] if names and names[0] in later else mixer_of(layer)
    for name in names:
        found = found[name]
    return found


def with_mixer(layer: Mapping[str, Any], mixer: Mapping[str, Any]) -> dict[str, Any]:
    """The plain description of the layer with another first module."""
    if "blocks" not in layer:
        return {**layer, "mixer": dict(mixer)}
    first, *others = layer["blocks"]
    return {**layer, "blocks": [{**first, "module": dict(mixer)}, *others]}


def _blocks(description: Mapping[str, Any]) -> tuple[BlockConfig, ...]:
    given = description["blocks"]
    if len(description) > 1:
        raise UserError('a layer has either "blocks" or "mixer" and "mlp_size"')
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise UserError(f'"blocks" is {given!r}; it must be a list of blocks')
    blocks = []
    for block in given:
        module = block.get("module", {}) if isinstance(block, Mapping) else {}
        check_mixer_values(module)
        blocks.append(BlockConfig.from_dict(block, mixer_config(module)))
    names = [block.name for block in blocks]
    if len(set(names)) < len(names):
        raise UserError(f"two blocks have one name ({', '.join(names)})")
    return tuple(blocks)


def _check_lenders(layers: Sequence[LayerConfig]) -> None:
    """Raise UserError where a layer uses weights that no earlier layer has."""
    every = [[inner for _, part in layer.parts() for inner in part.with_inner()] for layer in layers]
    for index, parts in enumerate(every):
        for part in parts:
            if part.lender is None:
                continue
            earlier = every[part.lender] if part.lender < index else []
            if sum(other.lends_to(part) for other in earlier) != 1:
                raise UserError(
                    f'layer {index}: "weights_of" of its "{part.type}" is {part.lender}. It must be an earlier layer '
                    "with one such block of the same sizes, which has its own weights"
                )


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
    # Most models have the defaults; a config for transformers has these only where they differ.
    embedding_multiplier: float = 1.0
    embedding_norm: dict[str, Any] | None = None
    final_norm: dict[str, Any] | None = None
    logits_multiplier: float = 1.0
    logits_soft_cap: float | None = None
    memory_tokens: int = 0

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def layer_types(self) -> list[str]:
        """What transformers calls every layer; Accelerate and Trainer refuse by it what recurrences cannot do.

        It follows from the layers and is never written to a config.json.
        """
        return [layer.layer_type() for layer in self.layer_configs()]

    def layer_configs(self) -> list[LayerConfig]:
        """The checked description of every layer."""
        return read_layers(self.layers)

    def added(self) -> dict[str, Any]:
        """The fields of `ADDED` that are not at their default."""
        return {name: getattr(self, name) for name in ADDED if getattr(self, name) != getattr(ModelSizes, name)}

    def state_size(self) -> int:
        """Numbers in the recurrent state of one sequence, all layers together."""
        return sum(layer.state_size() for layer in self.layer_configs())

    def reads_tokens(self) -> bool:
        """Whether a layer looks up tokens that were read before, so that a state must keep their ids."""
        return any(part.reads_tokens for layer in self.layer_configs() for _, part in layer.parts())

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of a checkpoint, in the order of docs/reference/tensors.md."""
        d = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (self.vocab_size, d)}
        if self.memory_tokens:
            shapes = {"model.memory_tokens": (self.memory_tokens, d)} | shapes
        if self.embedding_norm is not None:
            shapes |= under("model.embedding_norm", norm_config(self.embedding_norm).tensor_shapes(d))
        # Equal layers have equal tensors.
        known: dict[MixerConfig, dict[str, tuple[int, ...]]] = {}
        for index, layer in enumerate(self.layer_configs()):
            for block in layer.blocks:
                if block.module not in known:
                    known[block.module] = block.module.tensor_shapes(d)
                shapes |= under(f"model.layers.{index}", block.tensor_shapes(d, known[block.module]))
        shapes |= under("model.norm", norm_config(self.final_norm).tensor_shapes(d))
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes


def norm_config(description: Mapping[str, Any] | None) -> NormConfig:
    """The checked norm of a plain description; None = an RMS norm."""
    return NormConfig.from_dict({} if description is None else description)


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
    embedding_multiplier: float = 1.0
    embedding_norm: dict[str, Any] | None = None
    final_norm: dict[str, Any] | None = None
    logits_multiplier: float = 1.0
    logits_soft_cap: float | None = None
    memory_tokens: int = 0
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
        check_number("embedding_multiplier", self.embedding_multiplier)
        check_number("logits_multiplier", self.logits_multiplier)
        if self.logits_soft_cap is not None:
            check_number("logits_soft_cap", self.logits_soft_cap, positive=True)
        for name in ("embedding_norm", "final_norm"):
            self._check_norm(name)
        check_whole("memory_tokens", self.memory_tokens, least=0)
        layers = self.layer_configs()
        _check_lenders(layers)
        for index, layer in enumerate(layers):
            self._check_layer(index, layer)
        self.layers = [layer.to_dict() for layer in layers]

    def _check_layer(self, index: int, layer: LayerConfig) -> None:
        """What a layer alone cannot know: widths of parts, and the model's memory tokens."""
        for block in layer.blocks:
            if block.module.output_size(self.hidden_size) != self.hidden_size:
                raise UserError(f'layer {index}: a "{block.module.type}" without out_proj is for a branch of hymba')
            for module in block.module.with_inner():
                self._check_module(index, module)

    def _check_module(self, index: int, module: MixerConfig) -> None:
        for name, inner in module.parts():
            if module.type != "hymba" and inner.output_size(self.hidden_size) != self.hidden_size:
                raise UserError(f'layer {index}: {name} of "{module.type}" needs its out_proj')
        # Who keeps a cache with positions has to keep the memory tokens apart, which have none.
        if module.type == "attention" or (not module.nested and "position" in module.state_shapes()):
            own = getattr(module, "memory_tokens", 0)
            if own != self.memory_tokens:
                raise UserError(
                    f'layer {index}: a "{module.type}" with memory_tokens {own} is in a model with {self.memory_tokens}'
                )

    def _check_norm(self, name: str) -> None:
        given = getattr(self, name)
        if given is not None:
            try:
                plain = NormConfig.from_dict(given).to_dict()
            except UserError as error:
                raise UserError(f'"{name}": {error}') from None
            # An RMS norm without anything special is what `final_norm` is anyway.
            setattr(self, name, plain if plain or name == "embedding_norm" else None)

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
        return {name: getattr(self, name) for name in self.names() - set(ADDED)} | self.added() | dict(self.more)
