"""Bamba (``model_type: bamba``): ``models/bamba`` of transformers 5.23.

Mamba-2 layers, attention with rotary positions in a few (`attn_layer_indices`), and a gated MLP after each.
"""

from __future__ import annotations

from typing import Any

from longrecall.models.formats.fields import Fields
from longrecall.models.formats.hybrid_common import (
    Block,
    activation,
    attention_fields,
    decoder_layout,
    find_module,
    first_of,
    mamba2_fields,
    module_sources,
    rotation_fields,
    written_attention,
    written_mamba2,
    written_rope,
)
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.stock import common_fields, expansion, merged
from longrecall.models.sizes import PlainConfig

ROTARY_SHARE = 0.5
"""transformers has it fixed, unless `rope_parameters` say another."""


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a BambaConfig (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    fields = Fields(raw, where)
    hidden, norm_eps = fields.integer("hidden_size", 4096), fields.number("rms_norm_eps", 1e-5)
    mixers = {
        "mamba": mamba2_fields(fields, hidden, norm_eps),
        "self_attn": attention_fields(fields, hidden, kv_heads=8) | _rope(fields),
    }
    mlp = {
        "type": "mlp",
        "inner_size": fields.integer("intermediate_size", 14336),
        "activation": activation(fields, "hidden_act", "silu"),
        "bias": fields.flag("mlp_bias", False),
    }
    layers = fields.integer("num_hidden_layers", 32)
    attention_layers = _attention_layers(fields, layers)
    # One more loss while training; how many logits are returned.
    fields.require("z_loss_coefficient", 0.0, [0.0, 0, None], "this loss is missing")
    fields.ignore("num_logits_to_keep")
    config = {
        "vocab_size": fields.integer("vocab_size", 128000),
        "hidden_size": hidden,
        "norm_eps": norm_eps,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "residual_in_fp32": False,
        "context_length": fields.optional_integer("max_position_embeddings"),
        **fields.token_ids(),
    }
    fields.finish()

    def block(module: dict[str, Any], place: str, norm: str) -> Block:
        return Block(module, lambda ours, theirs: module_sources(module, hidden, ours, f"{theirs}{place}."), norm)

    second = block(mlp, "feed_forward", "pre_ff_layernorm")
    first = {place: block(module, place, "input_layernorm") for place, module in mixers.items()}
    places = ["self_attn" if index in attention_layers else "mamba" for index in range(layers)]
    return decoder_layout(config, [(first[place], second) for place in places], final_norm="final_layernorm")


def _attention_layers(fields: Fields, layers: int) -> list[int]:
    given = fields.get("attn_layer_indices") or []
    if not isinstance(given, list) or not all(type(index) is int and 0 <= index < layers for index in given):
        raise fields.fail("attn_layer_indices", f"it must be a list of layers, from 0 to {layers - 1}")
    return given


def _rope(fields: Fields) -> dict[str, Any]:
    # transformers sets it, whatever the file says at this place.
    fields.require("partial_rotary_factor", ROTARY_SHARE, [ROTARY_SHARE, None], "in this place it is fixed")
    return rotation_fields(fields, share=ROTARY_SHARE)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the BambaConfig of a native model as plain data; `kept` is the one that it was read from, or {}.

    Raises:
        UserError: there is no Mamba-2 layer, or no MLP.
    """
    mixer, mlp = first_of(plain, "mamba2"), first_of(plain, "mlp")
    attention, layers = find_module(plain, "attention"), plain.layer_configs()
    indices = [index for index, layer in enumerate(layers) if layer.mixer.type == "attention"]
    if attention is not None:
        rotation = written_rope(attention, kept, share=ROTARY_SHARE)
        if "rope_parameters" in rotation:
            rotation["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
        attention = written_attention(attention, plain.hidden_size, kept) | rotation
    fields = {
        "model_type": "bamba",
        "architectures": ["BambaForCausalLM"],
        **common_fields(plain),
        **written_mamba2(mixer, plain.hidden_size, kept),
        "mamba_expand": expansion(kept, "mamba_expand", mixer["inner_dim"], plain.hidden_size),
        **(attention or {}),
        "attn_layer_indices": indices or kept.get("attn_layer_indices"),
        "hidden_act": mlp.get("activation", "silu"),
        "intermediate_size": mlp["inner_size"],
        "mlp_bias": mlp.get("bias", False),
        "rms_norm_eps": plain.norm_eps,
    }
    return merged(kept, fields)
