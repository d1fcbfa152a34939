"""The configuration of a RecurrentLM, for transformers: the sizes of models/sizes.py in its config class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from longrecall.errors import UserError
from longrecall.models.sizes import ModelSizes, PlainConfig

FOLLOWING = ("num_hidden_layers", "layer_types")
"""What others write into a config.json and look for in a config; here it follows from the layers."""


class RecurrentConfig(ModelSizes, PreTrainedConfig):
    """Sizes of a RecurrentLM; `layers` holds one description per layer, and layers may differ.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width d of the residual stream.
        layers: ``{"mixer": {"type": ..., ...}, "mlp_size": ...}`` each, or ``{"blocks": [...]}``; see
            docs/reference/mixers.md.
        norm_eps: epsilon of the pre-norms and the final norm.
        tie_word_embeddings: the output head is the embedding.
        residual_in_fp32: keep the residual stream in float32 under lower-precision weights.
        context_length: tokens of the sequences the model was trained on; None = unknown.
        initializer_range: standard deviation of freshly initialised projections.
        embedding_multiplier: what the embeddings are multiplied by.
        embedding_norm: a norm of the embeddings, such as ``{"kind": "layer", "bias": true}``; None = none.
        final_norm: the norm before the head; None = an RMS norm.
        logits_multiplier: what the logits are multiplied by.
        logits_soft_cap: c of ``c * tanh(logits / c)``, after the multiplier; None = no cap.
        memory_tokens: learnt embeddings that are read before every text (meta tokens of Hymba); its attention layers
            name them too.

    Raises:
        UserError: an unknown mixer or key, or a value that cannot be, named with its layer.

    >>> mixer = {"type": "gla", "num_heads": 2, "key_dim": 8, "value_dim": 16}
    >>> config = RecurrentConfig(hidden_size=32, layers=[{"mixer": mixer, "mlp_size": 64}] * 2)
    >>> config.num_hidden_layers
    2
    """

    model_type = "longrecall"
    # A list: transformers' Trainer adds another one to it.
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "auxiliary_loss"]

    def __init__(
        self,
        vocab_size: int = 258,
        hidden_size: int = 64,
        layers: Sequence[dict[str, Any]] = (),
        norm_eps: float = 1e-5,
        tie_word_embeddings: bool = True,
        residual_in_fp32: bool = True,
        context_length: int | None = None,
        initializer_range: float = 0.02,
        embedding_multiplier: float = 1.0,
        embedding_norm: dict[str, Any] | None = None,
        final_norm: dict[str, Any] | None = None,
        logits_multiplier: float = 1.0,
        logits_soft_cap: float | None = None,
        memory_tokens: int = 0,
        **kwargs: Any,
    ) -> None:
        plain = PlainConfig(
            vocab_size,
            hidden_size,
            layers,
            norm_eps,
            tie_word_embeddings,
            residual_in_fp32,
            context_length,
            initializer_range,
            embedding_multiplier,
            embedding_norm,
            final_norm,
            logits_multiplier,
            logits_soft_cap,
            memory_tokens,
        )
        self.vocab_size = plain.vocab_size
        self.hidden_size = plain.hidden_size
        self.layers = plain.layers
        self.norm_eps = plain.norm_eps
        self.residual_in_fp32 = plain.residual_in_fp32
        self.context_length = plain.context_length
        self.initializer_range = plain.initializer_range
        for name, value in plain.added().items():
            setattr(self, name, value)
        for name in FOLLOWING:
            if kwargs.pop(name, own := getattr(self, name)) != own:
                raise UserError(f'"{name}" contradicts "layers", from which it follows; leave it out')
        PreTrainedConfig.__init__(self, **{"tie_word_embeddings": tie_word_embeddings, **kwargs})
