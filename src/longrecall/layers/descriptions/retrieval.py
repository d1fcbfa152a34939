"""Retrieval inside a layer (RESONA): its sizes."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from longrecall.errors import UserError
from longrecall.layers.descriptions.base import MixerConfig, StateShapes, TensorShapes, linear, under

if TYPE_CHECKING:
    from torch import nn

SELECTORS = ("weighted", "hard")
BLENDS = ("fixed", "learned", "input")

RUNNERS_UP = 4
"""Chunks that are scored against the chosen ones and not read."""


@dataclass(frozen=True)
class RetrievalConfig(MixerConfig):
    """A mixer and, beside it, cross-attention to chosen chunks of the token embeddings; or that attention alone."""

    type: ClassVar[str] = "retrieval"
    layer_class: ClassVar[str] = "longrecall.layers.retrieval.module:Retrieval"
    step_class: ClassVar[str] = "longrecall.layers.retrieval.step:RetrievalStep"
    nested: ClassVar[tuple[str, ...]] = ("base",)
    optional_fields: ClassVar[tuple[str, ...]] = ("base", "output_dim")

    base: MixerConfig | None = None
    """None = retrieval alone, in the place of a branch of `hymba`: zeros where no chunk has ended."""
    chunk: int = 64
    """U, tokens of a chunk."""
    top_k: int = 4
    """k, chunks that a token reads; all of them where there are fewer."""
    selector: str = "weighted"
    """`weighted`: a chunk's score is a logit of its tokens too, so that the encoders learn; `hard` (the paper's
    algorithm 2): it only selects, and the encoders stay as they are."""
    encoder_dim: int = 64
    """E, width of the chunk vectors."""
    num_heads: int = 8
    head_dim: int = 64
    kv_heads: int = 1
    """Key-value heads, a divisor of num_heads; num_heads is the paper's multi-head attention."""
    alpha: float = 0.5
    """Share of the mixer in the output, with `learned` and `input` before training."""
    output_dim: int | None = None
    """Channels that retrieval without a base returns; None = the model's width."""
    blend: str = "fixed"
    """`fixed`: alpha everywhere; `learned`: one number a channel; `input`: a linear function of the input a channel."""

    def __post_init__(self) -> None:
        self._require_positive("chunk", "top_k", "encoder_dim", "num_heads", "head_dim", "kv_heads")
        self._require_multiple("num_heads", "kv_heads")
        for name, choices in (("selector", SELECTORS), ("blend", BLENDS)):
            if getattr(self, name) not in choices:
                raise UserError(
                    f'mixer "retrieval": {name} must be one of {", ".join(choices)}, got {getattr(self, name)!r}'
                )
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not 0 <= self.alpha <= 1:
            raise UserError(f'mixer "retrieval": alpha must be a number from 0 to 1, got {self.alpha!r}')
        if self.output_dim is not None:
            self._require_positive("output_dim")
        if self.base is None:
            self._check_alone()
            return
        if self.output_dim is not None:
            raise UserError('mixer "retrieval": output_dim is for retrieval without a base')
        if not isinstance(self.base, MixerConfig):
            raise UserError(f'mixer "retrieval": base must be a mixer description, got {self.base!r}')
        if self.base.reads_tokens:
            raise UserError(
                'mixer "retrieval": base already has a retrieval layer, and a layer can have only one (raise its '
                "top_k instead)"
            )

    def _check_alone(self) -> None:
        if self.blend != "fixed":
            raise UserError('mixer "retrieval": without a base there is nothing to blend with; blend must be fixed')
        object.__setattr__(self, "alpha", 0.0)

    @property
    def reads_tokens(self) -> bool:
        return True

    def output_size(self, hidden_size: int) -> int:
        return self.output_dim or hidden_size

    @property
    def candidates(self) -> int:
        """Chunks that a token scores: those it reads and, with `weighted`, some runners-up."""
        return self.top_k + (RUNNERS_UP if self.selector == "weighted" else 0)

    def to_dict(self) -> dict[str, Any]:
        found = super().to_dict()
        return found if self.base is None else found | {"base": self.base.to_dict()}

    def state_shapes(self) -> StateShapes:
        inner = {} if self.base is None else self.base.state_shapes()
        base = {f"base.{name}": shape for name, shape in inner.items()}
        return base | {"chunk": (0, self.encoder_dim)}

    def tensor_shapes(self, hidden_size: int) -> TensorShapes:
        queries, keys = self.num_heads * self.head_dim, self.kv_heads * self.head_dim
        blend: TensorShapes = {} if self.blend == "fixed" else {"blend.bias": (hidden_size,)}
        blend |= {"blend.weight": (hidden_size, hidden_size)} if self.blend == "input" else {}
        return {
            **({"temperature": (1,)} if self.selector == "weighted" else {}),
            **({} if self.base is None else under("base", self.base.tensor_shapes(hidden_size))),
            **linear("chunk_encoder", self.encoder_dim, hidden_size),
            **linear("query_encoder", self.encoder_dim, hidden_size),
            **linear("q_proj", queries, hidden_size),
            **linear("k_proj", keys, hidden_size),
            **linear("v_proj", keys, hidden_size),
            **linear("o_proj", self.output_size(hidden_size), queries),
            **blend,
        }

    def build(self, hidden_size: int) -> nn.Module:
        base = None if self.base is None else self.base.build(hidden_size)
        layer: nn.Module = pkgutil.resolve_name(self.layer_class)(self, hidden_size, base)
        return layer

    def why_no_room(self) -> str | None:
        return None if self.base is None else self.base.why_no_room()

    def why_not_in_segments(self, length: int) -> str | None:
        if length % self.chunk:
            return f"chunks of {self.chunk} tokens do not fill segments of {length}"
        return None if self.base is None else self.base.why_not_in_segments(length)
