"""What transformers asks of the classes of a model: how weights begin, and flags of what it can do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from longrecall.layers.experts import Experts
from longrecall.models.config import RecurrentConfig
from longrecall.models.quantising import check_not_quantised


class RecurrentPreTrainedModel(PreTrainedModel):
    """Initialisation and transformers' flags."""

    config: RecurrentConfig
    config_class = RecurrentConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RecurrentLayer"]  # noqa: RUF012 (transformers' own protocol)
    # No prefix of what was read can be taken back, as assisted generation would.
    _is_stateful = True
    # Layers are no functions of one shape: a state is a new value, and a padding mask is looked at.
    _can_compile_fullgraph = False
    # Attention here asks torch itself, with positions of its own: no implementation can be put in its place, and
    # Trainer and Accelerate, which shard a sequence through such an implementation, have to refuse.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = False
    _supports_context_parallel = False

    def save_pretrained(self, *args: Any, **options: Any) -> None:
        """As transformers'.

        Raises:
            UserError: the weights were quantised in memory, and nothing says so in the config.
        """
        if getattr(self, "hf_quantizer", None) is None:
            check_not_quantised(self, "saved")
        super().save_pretrained(*args, **options)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        *more: Any,
        **named: Any,
    ) -> None:
        """As transformers', but never reentrant: such checkpoints lose the gradients of states and auxiliary losses."""
        if getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant", False):
            gradient_checkpointing_func = partial(gradient_checkpointing_func, use_reentrant=False)
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, *more, **named)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Projections and embeddings normal(0, initializer_range), norms one; mixers reset what is theirs."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Experts):
            module.reset_parameters(std)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        elif (tokens := getattr(module, "memory_tokens", None)) is not None:
            nn.init.normal_(tokens, std=std)
