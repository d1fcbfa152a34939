"""What every description of a token mixer has: checked sizes, and the shapes of its state and of its tensors.

Descriptions are plain data and need no torch: what a checkpoint holds can be told from its config.json alone. The layer
that a description means is made by `build`, which imports it.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from longrecall.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

StateShapes = dict[str, tuple[int, ...]]
TensorShapes = dict[str, tuple[int, ...]]

CONV_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
"""What may follow a short convolution. Each is 0 at 0, with a slope: surgery relies on both."""

NO_ROOM = "keeps a cache that grows with the context"
"""Why a state cannot be given buffers of a fixed shape."""


@dataclass(frozen=True)
class MixerConfig:
    """Sizes of one token mixer. Subclasses add fields; every number is a count of channels, heads or taps."""

    type: ClassVar[str] = ""
    layer_class: ClassVar[str] = ""
    """The layer that this describes, as ``package.module:Class``; it is made from the description and the width d."""
    step_class: ClassVar[str] = ""
    """Its decoding step, in the same form, made from the description, the layer and `StepSettings`; empty = the layer
    says (layers/stepping/step.py)."""
    nested: ClassVar[tuple[str, ...]] = ()
    """Fields that are mixers themselves."""
    optional_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that `to_dict` leaves out at their default: descriptions from before there were such fields stay as they
    were, and with them the fingerprints of models."""
    positionwise: ClassVar[bool] = False
    """Whether every token is treated alone (MLPs, experts): no state, and a layer that is called with x alone."""
    takes: ClassVar[tuple[str, ...]] = ()
    """Values of the pass that the layer is called with beside the usual ones: what an earlier layer gives, or
    ``embedded``, the embeddings before the first layer."""
    gives: ClassVar[tuple[str, ...]] = ()
    """Values for later layers, which it returns in its state as ``carried.NAME``."""

    @property
    def reads_tokens(self) -> bool:
        """Whether the mixer (or one inside it) looks up tokens read before: it is called with ``context=`` too."""
        inner = (getattr(self, name) for name in self.nested)
        return any(config.reads_tokens for config in inner if config is not None)

    @property
    def lender(self) -> int | None:
        """The layer that has weights which this mixer uses, too; None = all are its own."""
        return None

    def lends_to(self, other: MixerConfig) -> bool:
        """Whether `other`, of a later layer, may use weights of this mixer."""
        return False

    def with_inner(self) -> Iterator[MixerConfig]:
        """This description and all those inside it."""
        yield self
        for name in self.nested:
            inner = getattr(self, name)
            if inner is not None:
                yield from inner.with_inner()

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> Self:
        """Build from plain data; raises UserError on an unknown key, a missing key or a value that cannot be."""
        given = {key: value for key, value in description.items() if key != "type"}
        known = {field.name for field in fields(cls)}
        for key in given:
            if key not in known:
                raise UserError(f'mixer "{cls.type}" has no field "{key}".{did_you_mean(key, known)}')
        try:
            return cls(**given)
        except TypeError as error:
            raise UserError(f'mixer "{cls.type}" is incomplete: {error}. Fields: {", ".join(sorted(known))}') from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back, with every default written out but those of `optional_fields`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        left_out = {f.name for f in fields(self) if f.name in self.optional_fields and values[f.name] == f.default}
        return {"type": self.type, **{name: value for name, value in values.items() if name not in left_out}}

    def state_shapes(self) -> StateShapes:
        """Shape of every state tensor of one sequence, without the batch dimension."""
        raise TypeError(f"{type(self).__name__} does not describe a state")

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        """Name under `mixer.` -> shape of every tensor in a checkpoint, in the order of the layer's ``state_dict``.

        A description that does not say them has them from its layer, which needs torch.

        Raises:
            UserError: the mixer does not fit a model of this width.
        """
        import torch

        with torch.device("meta"):
            layer = self.build(hidden_size)
        return {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}

    def active_tensor_shapes(self, hidden_size: int) -> TensorShapes:
        """The same of the tensors' parts that one token meets: fewer rows where it is sent to a few of many."""
        return self.tensor_shapes(hidden_size)

    def check_hidden_size(self, hidden_size: int) -> None:
        """Raise UserError where the mixer does not fit a model of this width."""

    def output_size(self, hidden_size: int) -> int:
        """Channels of what the layer returns: the model's width, but for parts of a `hymba` without a projection."""
        return hidden_size

    def build(self, hidden_size: int) -> nn.Module:
        """The layer, freshly initialised; raises UserError where it does not fit a model of this width."""
        self.check_hidden_size(hidden_size)
        layer: nn.Module = pkgutil.resolve_name(self.layer_class)(self, hidden_size)
        return layer

    @property
    def grows(self) -> bool:
        """Whether the state has no fixed shape: one of its tensors is empty before the first token."""
        return self.reads_tokens or any(0 in shape for shape in self.state_shapes().values())

    def why_no_room(self) -> str | None:
        """Why a step's buffers cannot hold a state that grows, in words; None = they can, or it does not grow."""
        return f"{self.type} {NO_ROOM}" if self.grows else None

    def parts(self) -> Iterator[tuple[str, MixerConfig]]:
        """The mixers inside it, if any, by the names of their fields."""
        inner = ((name, getattr(self, name)) for name in self.nested)
        return ((name, config) for name, config in inner if config is not None)

    def windows(self) -> dict[str, int]:
        """What stands before the names of a cache -> the tokens that its window reaches, for those that have one."""
        window = getattr(self, "window", None)
        inner = {f"{name}.{path}": size for name, part in self.parts() for path, size in part.windows().items()}
        return inner if window is None else {"": window, **inner}

    def why_not_in_segments(self, length: int) -> str | None:
        """Why a prompt is not read in segments of `length` tokens with buffers of fixed shapes; None = it is."""
        if self.nested:
            return next(filter(None, (part.why_not_in_segments(length) for _, part in self.parts())), None)
        return f"{self.type} {NO_ROOM}" if self.grows else None

    def state_size(self) -> int:
        """Numbers in the recurrent state of one sequence: the papers' state size, without convolutions and caches."""
        return sum(math.prod(shape) for name, shape in self.state_shapes().items() if name.endswith("recurrent"))

    def caches(self) -> list[tuple[int, int | None]]:
        """Caches that grow with the context: numbers kept of a token, and of how many tokens at most (None = of all).

        They are the state's tensors of no columns before the first token, those of nested mixers included.
        """
        inner = [getattr(self, name) for name in self.nested]
        if inner:
            return [cache for config in inner if config is not None for cache in config.caches()]
        shapes = [shape for shape in self.state_shapes().values() if len(shape) > 1 and shape[0] == 0]
        numbers = sum(math.prod(shape[1:]) for shape in shapes)
        return [(numbers, getattr(self, "window", None))] if numbers else []

    def zero_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The state before the first token: recurrent states in float32, the others in the model's dtype."""
        import torch

        wide = dtype if dtype == torch.float64 else torch.float32
        return {
            name: torch.zeros(
                (batch, *shape),
                device=device,
                dtype=torch.long if name.endswith("position") else wide if name.endswith("recurrent") else dtype,
            )
            for name, shape in self.state_shapes().items()
        }

    def _require_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f'mixer "{self.type}": {name} must be a positive whole number, got {value!r}')

    def _require_one_of(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise UserError(
                f'mixer "{self.type}": {name} must be one of {", ".join(choices)}, got {value!r}.'
                f"{did_you_mean(str(value), choices)}"
            )

    def _require_multiple(self, large: str, small: str) -> None:
        if getattr(self, large) % getattr(self, small):
            raise UserError(
                f'mixer "{self.type}": {small} ({getattr(self, small)}) must divide {large} ({getattr(self, large)})'
            )


def linear(name: str, rows: int, columns: int, *, bias: bool = False) -> TensorShapes:
    """Tensors of a linear map from `columns` to `rows` numbers."""
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def convolution(name: str, channels: int, width: int, *, bias: bool = False) -> TensorShapes:
    """Tensors of a short convolution; none for width 0, which is none."""
    return linear(name, channels, width, bias=bias) if width else {}


def implicit_filter(name: str, channels: int, width: int, depth: int, bands: int) -> TensorShapes:
    """Tensors of layers/implicit_filter.py: a sine network of `depth` inner layers of `width` units."""
    shapes: TensorShapes = {
        "in_weight": (width, 2 * bands + 1),
        "in_bias": (width,),
        "inner_weight": (depth, width, width),
        "inner_bias": (depth, width),
        "out_weight": (channels, width),
        "frequency": (width,),
    }
    return under(name, shapes)


def under(path: str, shapes: Mapping[str, tuple[int, ...]]) -> TensorShapes:
    """The same with ``path.`` before every name: the tensors of a part."""
    return {f"{path}.{name}": shape for name, shape in shapes.items()}
