"""transformers' Mamba (``model_type: mamba``): ``models/mamba`` of transformers 5.23."""

from __future__ import annotations

from typing import Any

from longrecall.errors import UserError
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.mamba_common import mamba_layout, time_step_rank
from longrecall.models.formats.stock import common_fields, expansion, first_module, merged
from longrecall.models.sizes import PlainConfig


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a MambaConfig (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    hidden = Fields(raw, where).integer("hidden_size", 768)
    # The file is read with the rank that "auto" stands for, so that it is checked as any other whole number.
    fields = Fields({**raw, "time_step_rank": time_step_rank(raw.get("time_step_rank", "auto"), hidden)}, where)
    fields.integer("hidden_size", 768)
    fields.require("hidden_act", "silu", ["silu", "swish"], "the activation is a SiLU")
    mixer = {
        "inner_dim": int(fields.number("expand", 2.0) * hidden),
        "state_dim": fields.integer("state_size", 16),
        "dt_rank": fields.integer("time_step_rank"),
        "conv_width": fields.integer("conv_kernel", 4),
        "conv_bias": fields.flag("use_conv_bias", True),
        "proj_bias": fields.flag("use_bias", False),
    }
    # How weights were initialised and which code runs the scan. The others stand in published files, converted from
    # mamba_ssm's, but transformers does not read them.
    fields.ignore("time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor")
    fields.ignore("rescale_prenorm_residual", "use_mambapy", "use_associative_scan")
    fields.ignore("intermediate_size", "d_inner", "d_model", "n_layer", "fused_add_norm", "rms_norm", "ssm_cfg")
    fields.ignore("pad_vocab_size_multiple")
    layers = fields.integer("num_hidden_layers", 32)
    config = {
        "vocab_size": fields.integer("vocab_size", 50280),
        "hidden_size": hidden,
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        "residual_in_fp32": fields.flag("residual_in_fp32", True),
        "context_length": fields.optional_integer("max_position_embeddings"),
        **fields.token_ids(),
    }
    fields.finish()
    return mamba_layout(config, mixer, layers)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the MambaConfig of a native model as plain data; `kept` is the one that it was read from, or {}.

    Raises:
        UserError: a width that is no whole multiple of hidden_size, which MambaConfig does not take.
    """
    mixer = first_module(plain, "mamba")
    rank, width = mixer["dt_rank"], plain.hidden_size
    if mixer["inner_dim"] % width:
        raise UserError(f"inner_dim is {mixer['inner_dim']}; MambaConfig wants a multiple of {width}")
    said = time_step_rank(kept.get("time_step_rank", "auto"), width) == rank and bool(kept)
    fields = {
        "model_type": "mamba",
        "architectures": ["MambaForCausalLM"],
        **common_fields(plain),
        "state_size": mixer["state_dim"],
        "expand": expansion(kept, "expand", mixer["inner_dim"], width),
        **({} if said else {"time_step_rank": rank}),
        "conv_kernel": mixer["conv_width"],
        "use_conv_bias": mixer["conv_bias"],
        "use_bias": mixer["proj_bias"],
        "layer_norm_epsilon": plain.norm_eps,
        "residual_in_fp32": plain.residual_in_fp32,
    }
    return merged(kept, fields)
