"""transformers' Qwen3.5 with experts (``qwen3_5_moe``, ``qwen3_5_moe_text``): as qwen3_5, of transformers 5.23."""

from __future__ import annotations

from typing import Any

from longrecall.models.formats.fields import Fields
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.qwen3_5 import read_text, text_config
from longrecall.models.formats.qwen_common import Defaults, expert_fields, read_experts
from longrecall.models.sizes import PlainConfig

_DEFAULTS = Defaults(vocab_size=248320, hidden_size=2048, num_hidden_layers=40, kv_heads=2)
_EXPERTS = {"num_experts": 256, "num_experts_per_tok": 8}


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a Qwen3_5MoeConfig or Qwen3_5MoeTextConfig (parsed; `where` names the file in errors).

    Raises:
        UserError: what cannot be reproduced.
    """
    return read_text(raw, where, _DEFAULTS, _read_mlp)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a native model as plain data; `kept` is the one that it was read from, or {}."""
    own = expert_fields(plain, kept.get("text_config", kept))
    return text_config(plain, kept, own, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM")


def _read_mlp(fields: Fields, layers: int) -> dict[str, Any]:
    # No layer has a plain MLP.
    fields.ignore("intermediate_size")
    fields.require("norm_topk_prob", True, [True], "the weights of a token's experts have the sum 1")
    fields.require("decoder_sparse_step", 1, [1], "every layer has experts")
    return read_experts(fields, _EXPERTS, layers, normalise=True)
