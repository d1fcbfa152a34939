"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2"; Kimi-Linear without positions): its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from longrecall.errors import UserError
from longrecall.layers.descriptions.attention import with_rope_scaling, without_rope_scaling_object
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, linear
from longrecall.layers.descriptions.rotary import RopeScaling, Rotation, rotation


@dataclass(frozen=True)
class MLAConfig(MixerConfig):
    """Sizes of a layer of multi-head latent attention. A query head has `nope_dim` + `rope_dim` channels."""

    type: ClassVar[str] = "mla"
    layer_class: ClassVar[str] = "longrecall.layers.mixers.mla:MLA"
    optional_fields: ClassVar[tuple[str, ...]] = ("rope_scaling", "scale")

    num_heads: int
    kv_rank: int
    """Channels of the latent from which keys and values of all heads are made: what is cached of a token."""
    nope_dim: int
    """Channels of a key head that are made from the latent, and never turned."""
    rope_dim: int
    """Channels of a key that all heads share, cached beside the latent; 0 = none."""
    value_dim: int
    """Channels of a value head."""
    q_rank: int | None = None
    """Inner width of a low-rank query projection with a norm inside; None = one matrix."""
    rotary: bool = True
    """Turn the shared channels by the position; false in Kimi-Linear."""
    interleaved: bool = True
    """The shared channels are stored in pairs (2 i, 2 i + 1); false = pairs (i, i + rope_dim / 2)."""
    rope_theta: float = 10000.0
    bias: bool = False
    """Of the projections into the latents and of the output's."""
    norm_eps: float = 1e-6
    rope_scaling: RopeScaling | None = None
    """How the angles are stretched to a longer context; None = they are not."""
    scale: float | None = None
    """What the products of queries and keys are multiplied by; None = (nope_dim + rope_dim) ** -0.5, and DeepSeek's
    factor where the angles are stretched."""

    def __post_init__(self) -> None:
        self._require_positive("num_heads", "kv_rank", "nope_dim", "value_dim")
        if self.q_rank is not None:
            self._require_positive("q_rank")
        if not isinstance(self.rope_dim, int) or isinstance(self.rope_dim, bool) or self.rope_dim < 0:
            raise UserError(f'mixer "{self.type}": rope_dim must be a whole number >= 0, got {self.rope_dim!r}')
        try:
            _ = self.rotation
        except UserError as error:
            raise UserError(f'mixer "{self.type}": {error}') from None

    @property
    def rotation(self) -> Rotation | None:
        """How the shared channels are turned; None = not at all."""
        return rotation(self.rope_dim, float(self.rotary), self.rope_theta, self.rope_scaling)

    @property
    def query_dim(self) -> int:
        """Channels of a query head."""
        return self.nope_dim + self.rope_dim

    @property
    def score_scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        if self.scale is not None:
            return self.scale
        stretched = self.rope_scaling.score_factor if self.rope_scaling is not None and self.rotary else 1.0
        return float(self.query_dim**-0.5 * stretched)

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> Self:
        return super().from_dict(with_rope_scaling(cls.type, description))

    def to_dict(self) -> dict[str, Any]:
        return without_rope_scaling_object(super().to_dict())

    def state_shapes(self) -> StateShapes:
        return {"latent": (0, self.kv_rank + self.rope_dim), "position": (0,)}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        queries = self.num_heads * self.query_dim
        if self.q_rank is None:
            shapes = linear("q_proj", queries, hidden_size)
        else:
            shapes = linear("q_a_proj", self.q_rank, hidden_size, bias=self.bias)
            shapes |= {"q_a_norm.weight": (self.q_rank,)} | linear("q_b_proj", queries, self.q_rank)
        shapes |= linear("kv_a_proj", self.kv_rank + self.rope_dim, hidden_size, bias=self.bias)
        shapes |= {"kv_a_norm.weight": (self.kv_rank,)}
        shapes |= linear("kv_b_proj", self.num_heads * (self.nope_dim + self.value_dim), self.kv_rank)
        return shapes | linear("o_proj", hidden_size, self.num_heads * self.value_dim, bias=self.bias)

    def why_no_room(self) -> str | None:
        return None

    def why_not_in_segments(self, length: int) -> str | None:
        return None
