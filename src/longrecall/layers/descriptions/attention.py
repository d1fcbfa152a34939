"""Softmax attention with its options (rotation, norms, gate, window, soft cap): its sizes."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from longrecall.errors import UserError, did_you_mean
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, linear
from longrecall.layers.descriptions.rotary import RopeScaling, Rotation, rotation

if TYPE_CHECKING:
    from torch import nn

HEAD, FULL = "head", "full"
GIVE, TAKE = "give", "take"
SHARED = ("shared_key", "shared_value", "shared_position")
"""What a layer that gives its keys hands to later ones: the cache with the tokens of the pass, ``[B, S, ...]``."""
MEMORY = ("memory_key", "memory_value")
"""Keys and values of the model's memory tokens in the state ``[B, M, G, ...]``; to later layers ``shared_{name}``."""
QK_NORMS = (HEAD, FULL)


@dataclass(frozen=True)
class AttentionConfig(MixerConfig):
    """Sizes and options of a softmax-attention layer. Every option is off by default."""

    type: ClassVar[str] = "attention"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.attention:Attention"
    taking_class: ClassVar[str] = "longrecall.layers.mixers.taking_attention:TakingAttention"
    """The layer where it takes the keys of another."""

    optional_fields: ClassVar[tuple[str, ...]] = (
        *("meta_tokens", "rotary_share", "rope_scaling", "qk_norm", "qk_norm_offset", "qk_norm_eps", "output_gate"),
        *("scale", "key_multiplier", "soft_cap", "out_bias", "value_dim", "input_size"),
        *("out_proj", "memory_tokens", "shared_keys"),
    )

    num_heads: int
    head_dim: int
    kv_heads: int | None = None
    """Key-value heads, a divisor of num_heads; None = num_heads."""
    window: int | None = None
    """A token sees this many tokens, itself included; None = all before it."""
    rope_theta: float = 10000.0
    qkv_bias: bool = False
    meta_tokens: int = 0
    """Learned keys and values M that every token sees, whatever the window; 0 = none."""
    rotary_share: float = 1.0
    """Share of a head's channels that is turned by the position, the first ones; 0 = no positions at all."""
    rope_scaling: RopeScaling | None = None
    """How the angles are stretched to a longer context; None = they are not."""
    qk_norm: str | None = None
    """RMS norm of queries and keys before they are turned: "head" = of every head, with one weight for all of them;
    "full" = over the channels of all heads together; None = none."""
    qk_norm_offset: float = 0.0
    """1 where the norms' scale is 1 + weight."""
    qk_norm_eps: float = 1e-6
    output_gate: bool = False
    """Multiply what a head reads by the sigmoid of a gate. In the rows of `q_proj` a head's gate follows its query."""
    scale: float | None = None
    """What the products of queries and keys are multiplied by; None = head_dim ** -0.5."""
    key_multiplier: float = 1.0
    """Another factor of the scores. Where a model multiplies its keys, this is that number: the cache has them as
    projected."""
    soft_cap: float | None = None
    """Scores s become soft_cap * tanh(s / soft_cap); None = they stay."""
    out_bias: bool = False
    value_dim: int | None = None
    """Channels of a value head; None = head_dim."""
    input_size: int | None = None
    """Width of what the layer reads; None = the model's width, which is what it returns."""
    out_proj: bool = True
    """Whether what is read is projected to the model's width. Without, it is a branch of `hymba`, which projects."""
    memory_tokens: int = 0
    """The model's memory tokens, if it has any: every token sees them, whatever the window."""
    shared_keys: str | None = None
    """"give": later layers may read its keys and values; "take": it reads those of the last layer before it that gives
    them, and has none of its own; None = neither."""

    def __post_init__(self) -> None:
        self._require_positive("num_heads", "head_dim")
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.num_heads)
        given = [name for name in ("window", "value_dim", "input_size") if getattr(self, name) is not None]
        self._require_positive("kv_heads", *given)
        self._require_multiple("num_heads", "kv_heads")
        if not isinstance(self.meta_tokens, int) or isinstance(self.meta_tokens, bool) or self.meta_tokens < 0:
            raise UserError(f'mixer "{self.type}": meta_tokens must be a whole number >= 0, got {self.meta_tokens!r}')
        if self.qk_norm is not None and self.qk_norm not in QK_NORMS:
            hint = did_you_mean(str(self.qk_norm), QK_NORMS)
            raise UserError(f'mixer "{self.type}": qk_norm "{self.qk_norm}" is none of {", ".join(QK_NORMS)}.{hint}')
        if self.shared_keys not in (None, GIVE, TAKE):
            raise UserError(
                f'mixer "{self.type}": shared_keys must be {GIVE}, {TAKE} or null, got {self.shared_keys!r}'
            )
        if self.memory_tokens or self.shared_keys is not None:
            self._check_shared()
        if self.qk_norm_offset not in (0, 1):
            raise UserError(f'mixer "{self.type}": qk_norm_offset must be 0 or 1, got {self.qk_norm_offset!r}')
        if not 0 <= self.rotary_share <= 1:
            raise UserError(f'mixer "{self.type}": rotary_share must be from 0 to 1, got {self.rotary_share!r}')
        try:
            _ = self.rotation
        except UserError as error:
            raise UserError(f'mixer "{self.type}": {error}') from None

    def _check_shared(self) -> None:
        if self.memory_tokens:
            self._require_positive("memory_tokens")
        if self.meta_tokens:
            raise UserError(f'mixer "{self.type}": meta_tokens do not go with memory_tokens or shared_keys')
        if self.memory_tokens and self.rope_scaling is not None and self.rope_scaling.turned_by_position:
            raise UserError(
                f'mixer "{self.type}": memory_tokens stand before the text, which angles of rope_type '
                f'"{self.rope_scaling.rope_type}" do not know'
            )

    @property
    def _passed(self) -> tuple[str, ...]:
        """Names of the keys and values that layers share."""
        return SHARED + (tuple(f"shared_{name}" for name in MEMORY) if self.memory_tokens else ())

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Keys and values of an earlier layer, where it has none of its own."""
        return self._passed if self.shared_keys == TAKE else ()

    @property
    def gives(self) -> tuple[str, ...]:  # type: ignore[override]
        """Its keys and values, where later layers may read them."""
        return self._passed if self.shared_keys == GIVE else ()

    def output_size(self, hidden_size: int) -> int:
        return hidden_size if self.out_proj else self.num_heads * self.value_width

    @property
    def rotation(self) -> Rotation | None:
        """Which channels of a head are turned, and how far; None = none are."""
        return rotation(self.head_dim, self.rotary_share, self.rope_theta, self.rope_scaling)

    @property
    def value_width(self) -> int:
        """Channels of a value head."""
        return self.value_dim or self.head_dim

    @property
    def score_scale(self) -> float:
        """What the products of queries and cached keys are multiplied by."""
        return (self.head_dim**-0.5 if self.scale is None else self.scale) * self.key_multiplier

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> Self:
        return super().from_dict(with_rope_scaling(cls.type, description))

    def to_dict(self) -> dict[str, Any]:
        return without_rope_scaling_object(super().to_dict())

    def state_shapes(self) -> StateShapes:
        if self.shared_keys == TAKE:
            return {}
        heads = int(self.kv_heads or 0)
        shapes: StateShapes = {
            "key": (0, heads, self.head_dim),
            "value": (0, heads, self.value_width),
            "position": (0,),
        }
        if self.memory_tokens:
            widths = (self.head_dim, self.value_width)
            shapes |= {name: (self.memory_tokens, heads, wide) for name, wide in zip(MEMORY, widths, strict=True)}
        return shapes

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        heads, width, bias = int(self.kv_heads or 0), self.input_size or hidden_size, self.qkv_bias
        queries, keys, values = self.num_heads * self.head_dim, heads * self.head_dim, heads * self.value_width
        read = self.num_heads * self.value_width
        shapes: TensorShapes = {}
        if self.meta_tokens:
            shapes["meta_key"] = (self.meta_tokens, heads, self.head_dim)
            shapes["meta_value"] = (self.meta_tokens, heads, self.value_width)
        shapes |= linear("q_proj", queries + (read if self.output_gate else 0), width, bias=bias)
        if self.shared_keys != TAKE:
            shapes |= linear("k_proj", keys, width, bias=bias) | linear("v_proj", values, width, bias=bias)
        if self.out_proj:
            shapes |= linear("o_proj", hidden_size, read, bias=self.out_bias)
        if self.qk_norm:
            own = (self.head_dim,) * 2 if self.qk_norm == HEAD else (queries, keys)
            shapes |= {"q_norm.weight": (own[0],)}
            shapes |= {} if self.shared_keys == TAKE else {"k_norm.weight": (own[1],)}
        return shapes

    def build(self, hidden_size: int) -> nn.Module:
        if self.shared_keys != TAKE:
            return super().build(hidden_size)
        layer: nn.Module = pkgutil.resolve_name(self.taking_class)(self, hidden_size)
        return layer

    def why_no_room(self) -> str | None:
        return None

    def why_not_in_segments(self, length: int) -> str | None:
        return None


def with_rope_scaling(kind: str, description: dict[str, Any]) -> dict[str, Any]:
    """The description of a mixer with its `rope_scaling`, plain data, read; UserError on a value that cannot be."""
    given = description.get("rope_scaling")
    if given is None or isinstance(given, RopeScaling):
        return description
    try:
        return {**description, "rope_scaling": RopeScaling.from_dict(given)}
    except UserError as error:
        raise UserError(f'mixer "{kind}": {error}') from None


def without_rope_scaling_object(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a mixer with `rope_scaling` as plain data."""
    scaling = data.get("rope_scaling")
    return {**data, "rope_scaling": scaling.to_dict()} if isinstance(scaling, RopeScaling) else data
