"""Falcon-H1 (``model_type: falcon_h1``): ``models/falcon_h1`` of transformers 5.23.

Attention and Mamba-2 side by side in every layer, and a gated MLP; factors at every place where there is a product.
"""

from __future__ import annotations

from typing import Any

from longrecall.errors import UserError
from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.hybrid_common import (
    Block,
    activation,
    attention_fields,
    decoder_layout,
    first_of,
    mamba2_fields,
    module_sources,
    rotation_fields,
    written_attention,
    written_mamba2,
    written_rope,
)
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.stock import common_fields, merged
from longrecall.models.sizes import PlainConfig

_FACTORS = {
    "attention_in_multiplier": "attention_input_multiplier",
    "attention_out_multiplier": "attention_output_multiplier",
    "ssm_in_multiplier": "ssm_input_multiplier",
    "ssm_out_multiplier": "ssm_output_multiplier",
}
"""The branches' factors: theirs and ours."""


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a FalconH1Config (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    fields = Fields(raw, where)
    hidden, norm_eps = fields.integer("hidden_size", 4096), fields.number("rms_norm_eps", 1e-5)
    # In the class its default is a number: only null stands for mamba_expand.
    fields = Fields({"mamba_d_ssm": 1024, **raw}, where)
    fields.ignore("hidden_size", "rms_norm_eps")
    attention: dict[str, Any] = {
        **attention_fields(fields, hidden, kv_heads=8),
        **rotation_fields(fields, plain_share=False),
        "key_multiplier": fields.number("key_multiplier", 1.0),
    }
    gate_factor, down_factor = _numbers(fields, "mlp_multipliers", 2)
    mlp = {
        "type": "mlp",
        "inner_size": fields.integer("intermediate_size", 14336),
        "activation": activation(fields, "hidden_act", "silu"),
        "bias": fields.flag("mlp_bias", False),
        "gate_multiplier": gate_factor,
        "output_multiplier": down_factor,
    }
    ssm = _mamba2(fields, hidden, norm_eps)
    mixer = {
        "type": "parallel",
        "attention": attention,
        "ssm": ssm,
        **{ours: fields.number(theirs, 1.0) for theirs, ours in _FACTORS.items()},
    }
    layers = fields.integer("num_hidden_layers", 32)
    _left_aside(fields)
    config = {
        "vocab_size": fields.integer("vocab_size", 128000),
        "hidden_size": hidden,
        "norm_eps": norm_eps,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "residual_in_fp32": False,
        "context_length": fields.optional_integer("max_position_embeddings"),
        "embedding_multiplier": fields.number("embedding_multiplier", 1.0),
        "logits_multiplier": fields.number("lm_head_multiplier", 1.0),
        **fields.token_ids(),
    }
    fields.finish()

    def mixer_sources(ours: str, theirs: str) -> dict[str, Source]:
        found = module_sources(attention, hidden, f"{ours}attention.", f"{theirs}self_attn.")
        return found | module_sources(ssm, hidden, f"{ours}ssm.", f"{theirs}mamba.")

    def mlp_sources(ours: str, theirs: str) -> dict[str, Source]:
        return module_sources(mlp, hidden, ours, f"{theirs}feed_forward.")

    both = (Block(mixer, mixer_sources, "input_layernorm"), Block(mlp, mlp_sources, "pre_ff_layernorm"))
    return decoder_layout(config, [both] * layers, final_norm="final_layernorm")


def _mamba2(fields: Fields, hidden: int, norm_eps: float) -> dict[str, Any]:
    before, normed = fields.flag("mamba_norm_before_gate", True), fields.flag("mamba_rms_norm", False)
    return {
        **mamba2_fields(fields, hidden, norm_eps),
        "out_bias": fields.flag("projectors_bias", False),
        "gated_norm": "none" if not normed else "before_gate" if before else "after_gate",
        "part_multipliers": _numbers(fields, "ssm_multipliers", 5),
    }


def _numbers(fields: Fields, name: str, count: int) -> list[float]:
    """A list of factors; absent or null = all are 1."""
    given = fields.get(name)
    if given is None:
        return [1.0] * count
    if not isinstance(given, list | tuple) or len(given) != count:
        raise fields.fail(name, f"it must be {count} numbers")
    each = Fields({f"{name}[{index}]": value for index, value in enumerate(given)}, fields.where)
    return [each.number(key, 1.0) for key in each.raw]


def _left_aside(fields: Fields) -> None:
    """Mark what changes no output."""
    fields.require("mamba_use_mlp", True, [True], "every layer has an MLP")
    fields.require("attn_layer_indices", None, [None], "every layer has attention")
    # How many logits are returned; the width where mamba_d_ssm says it.
    fields.ignore("num_logits_to_keep", "mamba_expand")


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the FalconH1Config of a native model as plain data; `kept` is the one that it was read from, or {}.

    Raises:
        UserError: there is no layer of parallel branches, or no MLP.
    """
    mixer, mlp = first_of(plain, "parallel"), first_of(plain, "mlp")
    attention, ssm = mixer["attention"], mixer["ssm"]
    if attention["type"] != "attention" or ssm["type"] != "mamba2":
        raise UserError(f"branches of falcon_h1 are attention and mamba2, not {attention['type']} and {ssm['type']}")
    norm = ssm.get("gated_norm", "after_gate")
    # null stands for mamba_expand times the width, where that still says the same.
    expanded = "mamba_d_ssm" in kept and kept["mamba_d_ssm"] is None
    said = expanded and kept.get("mamba_expand", 2) * plain.hidden_size == ssm["inner_dim"]
    fields = {
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        **common_fields(plain),
        **written_mamba2(ssm, plain.hidden_size, kept),
        **({} if said else {"mamba_d_ssm": ssm["inner_dim"]}),
        "mamba_rms_norm": norm != "none",
        **({} if norm == "none" else {"mamba_norm_before_gate": norm == "before_gate"}),
        "projectors_bias": ssm["proj_bias"] if ssm.get("out_bias") is None else ssm["out_bias"],
        "ssm_multipliers": _written_numbers(kept, "ssm_multipliers", ssm.get("part_multipliers", [1.0] * 5)),
        **{theirs: mixer.get(ours, 1.0) for theirs, ours in _FACTORS.items()},
        **written_attention(attention, plain.hidden_size, kept),
        **written_rope(attention, kept, plain_share=False),
        "key_multiplier": attention.get("key_multiplier", 1.0),
        "hidden_act": mlp.get("activation", "silu"),
        "intermediate_size": mlp["inner_size"],
        "mlp_bias": mlp.get("bias", False),
        "mlp_multipliers": _written_numbers(
            kept, "mlp_multipliers", [mlp.get("gate_multiplier", 1.0), mlp.get("output_multiplier", 1.0)]
        ),
        "rms_norm_eps": plain.norm_eps,
        "embedding_multiplier": plain.embedding_multiplier,
        "lm_head_multiplier": plain.logits_multiplier,
    }
    return merged(kept, fields)


def _written_numbers(kept: dict[str, Any], name: str, values: Any) -> list[float] | None:
    """Factors as a list; where they are all 1 and the file had none, none."""
    plain = [float(value) for value in values]
    return None if kept and kept.get(name) is None and set(plain) == {1.0} else plain
