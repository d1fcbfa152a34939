"""transformers' Mamba-2 (``model_type: mamba2``): ``models/mamba2`` of transformers 5.23."""

from __future__ import annotations

from typing import Any

from longrecall.errors import UserError
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.mamba2_common import mamba2_layout
from longrecall.models.formats.stock import common_fields, expansion, first_module, json_number, merged
from longrecall.models.sizes import PlainConfig


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a Mamba2Config (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    fields = Fields(raw, where)
    hidden, heads, head_dim = (
        fields.integer("hidden_size", 4096),
        fields.integer("num_heads", 128),
        fields.integer("head_dim", 64),
    )
    inner = heads * head_dim
    expand = fields.number("expand", 2.0)
    if inner != round(expand * hidden):
        raise fields.fail("expand", f"times hidden_size ({hidden}) it must equal num_heads * head_dim ({inner})")
    fields.require("hidden_act", "silu", ["silu", "swish"], "the activation is a SiLU")
    norm_eps = fields.number("layer_norm_epsilon", 1e-5)
    mixer = {
        "inner_dim": inner,
        "head_dim": head_dim,
        "state_dim": fields.integer("state_size", 128),
        "groups": fields.integer("n_groups", 8),
        "conv_width": fields.integer("conv_kernel", 4),
        "conv_bias": fields.flag("use_conv_bias", True),
        "proj_bias": fields.flag("use_bias", False),
        "time_step_limit": fields.limits("time_step_limit"),
        "norm_eps": norm_eps,
    }
    # How weights were initialised and how fast the scan runs. norm_before_gate, rms_norm and intermediate_size stand in
    # published files, but transformers does not read them.
    fields.ignore("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual")
    fields.ignore("chunk_size", "norm_before_gate", "rms_norm", "intermediate_size")
    layers = fields.integer("num_hidden_layers", 64)
    config = {
        "vocab_size": fields.integer("vocab_size", 32768),
        "hidden_size": hidden,
        "norm_eps": norm_eps,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "residual_in_fp32": fields.flag("residual_in_fp32", True),
        "context_length": fields.optional_integer("max_position_embeddings"),
        **fields.token_ids(),
    }
    fields.finish()
    return mamba2_layout(config, mixer, layers)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the Mamba2Config of a native model as plain data; `kept` is the one that it was read from, or {}.

    Raises:
        UserError: a width that is no whole multiple of hidden_size, which Mamba2Config does not take.
    """
    mixer = first_module(plain, "mamba2")
    low, high = mixer["time_step_limit"]
    fields = {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        **common_fields(plain),
        "num_heads": mixer["inner_dim"] // mixer["head_dim"],
        "head_dim": mixer["head_dim"],
        "state_size": mixer["state_dim"],
        "n_groups": mixer["groups"],
        "expand": expansion(kept, "expand", mixer["inner_dim"], plain.hidden_size),
        "conv_kernel": mixer["conv_width"],
        "use_conv_bias": mixer["conv_bias"],
        "use_bias": mixer["proj_bias"],
        "time_step_limit": [low, json_number(high)],
        "layer_norm_epsilon": plain.norm_eps,
        "residual_in_fp32": plain.residual_in_fp32,
    }
    if mixer["inner_dim"] % plain.hidden_size:
        raise UserError(f"inner_dim is {mixer['inner_dim']}; Mamba2Config wants a multiple of {plain.hidden_size}")
    return merged(kept, fields)
