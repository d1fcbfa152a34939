"""transformers' Qwen3-Next (``model_type: qwen3_next``): ``models/qwen3_next`` of transformers 5.23.

The rows of ``in_proj_qkvz`` and ``in_proj_ba`` lie key head by key head: ``[q0 k0 v0 z0 | q1 k1 v1 z1 | ...]``, where v
and z are those of all value heads that share a key head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.qwen_common import (
    Defaults,
    body_fields,
    delta_sources,
    expert_fields,
    read_body,
    read_experts,
    text_layout,
)
from longrecall.models.formats.sources import split
from longrecall.models.formats.stock import common_fields, first_module, merged, modules
from longrecall.models.sizes import PlainConfig

_DEFAULTS = Defaults(vocab_size=151936, hidden_size=2048, num_hidden_layers=48, kv_heads=2)
_EXPERTS = {"num_experts": 512, "num_experts_per_tok": 10}


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a Qwen3NextConfig (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    fields = Fields(raw, where)
    body = read_body(fields, _DEFAULTS)
    dense = {"type": "mlp", "inner_size": fields.integer("intermediate_size", 5632)}
    sparse = _sparse_layers(fields, len(body.mixers))
    normalise = fields.flag("norm_topk_prob", True)
    experts = read_experts(fields, _EXPERTS, sum(sparse), normalise=normalise) if any(sparse) else {}
    if not experts:
        fields.ignore("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
        fields.ignore("router_aux_loss_coef", "output_router_logits")
    # Attention never has a window.
    fields.require("use_sliding_window", False, [False], "attention sees everything before a token")
    fields.finish()
    mlps = [experts if there else dense for there in sparse]
    return text_layout(body, mlps, _delta_sources, ["model."], ("mtp.",))


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the Qwen3NextConfig of a native model as plain data; `kept` is the one that it was read from, or {}."""
    own = {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        **common_fields(plain),
        **body_fields(plain, kept),
        **_mlp_fields(plain, kept),
    }
    return merged(kept, own)


def _delta_sources(mixer: Mapping[str, Any]) -> dict[str, Source]:
    keys, shared = mixer["num_heads"], mixer["value_heads"] // mixer["num_heads"]
    d_k, d_v = mixer["key_dim"], shared * mixer["value_dim"]
    sources = delta_sources(mixer)
    together = split("in_proj_qkvz.weight", (d_k, d_k, d_v, d_v), blocks=keys)
    gates = split("in_proj_ba.weight", (shared, shared), blocks=keys)
    for name, source in zip("qkvgba", together + gates, strict=True):
        sources[f"{name}_proj.weight"] = source
    return sources


def _sparse_layers(fields: Fields, count: int) -> list[bool]:
    """Which layers have experts in the place of an MLP."""
    step, experts = fields.integer("decoder_sparse_step", 1), fields.get("num_experts", _EXPERTS["num_experts"])
    dense = fields.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
        raise fields.fail("mlp_only_layers", "it must be a list of indices of layers")
    return [bool(experts) and index not in dense and (index + 1) % step == 0 for index in range(count)]


def _mlp_fields(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    kinds = [modules(layer)[-1]["type"] for layer in plain.layers]
    sparse = [kind == "moe" for kind in kinds]
    found: dict[str, Any] = {}
    if "mlp" in kinds:
        found["intermediate_size"] = first_module(plain, "mlp")["inner_size"]
    if any(sparse):
        found |= {**expert_fields(plain, kept), "norm_topk_prob": first_module(plain, "moe")["normalise"]}
    if not kept or _sparse_layers(Fields(kept, ""), len(kinds)) != sparse:
        found["mlp_only_layers"] = [index for index, there in enumerate(sparse) if not there]
        found["decoder_sparse_step"] = 1
    return found
