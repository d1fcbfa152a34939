"""mamba_ssm's own Mamba and Mamba-2 checkpoints: a config.json (MambaConfig) with ``ssm_cfg`` and no model_type."""

from __future__ import annotations

import math
from typing import Any

from longrecall.models.formats.fields import Fields
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.mamba2_common import mamba2_layout
from longrecall.models.formats.mamba_common import mamba_layout, time_step_rank
from longrecall.models.formats.stock import expansion, first_module, merged, modules
from longrecall.models.sizes import PlainConfig

# Both norms are built without an epsilon from the config, so every checkpoint has this one.
NORM_EPS = 1e-5


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a MambaConfig (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    fields = Fields(raw, where)
    hidden, layers = fields.integer("d_model", 2560), fields.integer("n_layer", 64)
    given = fields.section("ssm_cfg").raw
    first = given.get("layer", "Mamba1") == "Mamba1"
    mixer = (_mamba if first else _mamba2)(given, f'{where}: "ssm_cfg"', hidden)
    fields.require("d_intermediate", 0, [0, None], "Mamba blocks have no MLP here")
    fields.require("attn_layer_idx", [], [[], None], "hybrid attention layers of mamba_ssm are not read")
    fields.require("rms_norm", True, [True], "layers are normalised by their root mean square")
    fields.ignore("attn_cfg", "fused_add_norm")
    multiple = fields.integer("pad_vocab_size_multiple", 8)
    config = {
        "vocab_size": -(-fields.integer("vocab_size", 50277) // multiple) * multiple,
        "hidden_size": hidden,
        "norm_eps": NORM_EPS,
        "tie_word_embeddings": fields.flag("tie_embeddings", True),
        "residual_in_fp32": fields.flag("residual_in_fp32", True),
        **fields.token_ids(),
    }
    fields.finish()
    return (mamba_layout if first else mamba2_layout)(config, mixer, layers, of_mamba_ssm=True)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the MambaConfig of mamba_ssm for a native model; `kept` is the one that it was read from, or {}."""
    first = any(module["type"] == "mamba" for layer in plain.layers for module in modules(layer))
    mixer = first_module(plain, "mamba" if first else "mamba2")
    old, width = kept.get("ssm_cfg", {}), plain.hidden_size
    multiple = kept.get("pad_vocab_size_multiple", 8 if plain.vocab_size % 8 == 0 else 1)
    said = kept and -(-kept.get("vocab_size", 50277) // multiple) * multiple == plain.vocab_size
    own = {
        "expand": expansion(old, "expand", mixer["inner_dim"], width),
        "d_state": mixer["state_dim"],
        "d_conv": mixer["conv_width"],
        "conv_bias": mixer["conv_bias"],
        "bias": mixer["proj_bias"],
    }
    if first:
        # Versions from before Mamba-2 know no "layer".
        rank = old.get("dt_rank", "auto")
        own |= {} if time_step_rank(rank, width) == mixer["dt_rank"] else {"dt_rank": mixer["dt_rank"]}
    else:
        low, high = mixer["time_step_limit"]
        own |= {"layer": "Mamba2", "headdim": mixer["head_dim"], "ngroups": mixer["groups"]}
        if "dt_limit" in old or (low, high) != (0.0, None):
            own["dt_limit"] = [low, math.inf if high is None else high]
    fields = {
        "d_model": width,
        "n_layer": len(plain.layers),
        **({} if said else {"vocab_size": plain.vocab_size, "pad_vocab_size_multiple": multiple}),
        "ssm_cfg": merged(old, own),
        "rms_norm": True,
        "residual_in_fp32": plain.residual_in_fp32,
        "tie_embeddings": plain.tie_word_embeddings,
    }
    return merged(kept, fields)


def _mamba(given: dict[str, Any], where: str, hidden: int) -> dict[str, Any]:
    fields = Fields({**given, "dt_rank": time_step_rank(given.get("dt_rank", "auto"), hidden)}, where)
    fields.get("layer")
    mixer = {
        "inner_dim": int(fields.number("expand", 2.0) * hidden),
        "state_dim": fields.integer("d_state", 16),
        "dt_rank": fields.integer("dt_rank"),
        "conv_width": fields.integer("d_conv", 4),
        "conv_bias": fields.flag("conv_bias", True),
        "proj_bias": fields.flag("bias", False),
    }
    fields.ignore("dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "use_fast_path")
    fields.finish()
    return mixer


def _mamba2(given: dict[str, Any], where: str, hidden: int) -> dict[str, Any]:
    fields = Fields(given, where)
    fields.require("layer", "Mamba1", ["Mamba1", "Mamba2"], "Mamba-3 is another recurrence")
    inner = fields.integer("expand", 2) * hidden
    fields.require("d_ssm", None, [None, inner], "a part of the width that bypasses the recurrence is not implemented")
    fields.require("D_has_hdim", False, [False], "D has one value per head")
    fields.require("rmsnorm", True, [True], "the output is normalised after the gate")
    fields.require("norm_before_gate", False, [False], "the output is normalised after the gate")
    mixer = {
        "inner_dim": inner,
        "head_dim": fields.integer("headdim", 64),
        "state_dim": fields.integer("d_state", 128),
        "groups": fields.integer("ngroups", 1),
        "conv_width": fields.integer("d_conv", 4),
        "conv_bias": fields.flag("conv_bias", True),
        "proj_bias": fields.flag("bias", False),
        "time_step_limit": fields.limits("dt_limit"),
        "norm_eps": NORM_EPS,
    }
    fields.ignore("A_init_range", "dt_min", "dt_max", "dt_init_floor", "conv_init", "chunk_size", "use_mem_eff_path")
    fields.finish()
    return mixer
