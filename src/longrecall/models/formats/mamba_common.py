"""What transformers' and mamba_ssm's Mamba checkpoints share: tensor names and the order of rows.

Rows of in_proj are [x | z] and those of x_proj [dt | B | C] on both sides and in the native format, so every tensor is
carried over as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import same, squeeze_conv
from longrecall.models.formats.stock import common_fields, first_module, merged
from longrecall.models.sizes import PlainConfig

# Either spelling loads: mamba_ssm says embedding, transformers embeddings (and renames on loading).
EMBEDDINGS = ("backbone.embeddings.weight", "backbone.embedding.weight")

_NAMES = ("in_proj.weight", "x_proj.weight", "dt_proj.weight", "dt_proj.bias", "A_log", "D", "out_proj.weight")


def mixer_sources(mixer: Mapping[str, Any], ours: str, theirs: str) -> dict[str, Source]:
    """Return the sources of a `mamba` mixer without inner norms, with `ours` and `theirs` in front of the names."""
    names = [*_NAMES, *(["in_proj.bias", "out_proj.bias"] if mixer["proj_bias"] else [])]
    sources = {f"{ours}{name}": same(f"{theirs}{name}") for name in names}
    sources[f"{ours}conv.weight"] = squeeze_conv(same(f"{theirs}conv1d.weight"))
    if mixer["conv_bias"]:
        sources[f"{ours}conv.bias"] = same(f"{theirs}conv1d.bias")
    return sources


def mamba_layout(config: dict[str, Any], mixer: dict[str, Any], layers: int, *, of_mamba_ssm: bool = False) -> Layout:
    """Build the layout of `layers` equal Mamba blocks; `config` holds the other keys of a native config.json.

    `of_mamba_ssm`: it is written as that library asks for it, with its name of the embedding, and the head stored even
    where it is tied to that.
    """
    tied = config["tie_word_embeddings"]
    sources = {
        "model.embeddings.weight": same(*(reversed(EMBEDDINGS) if of_mamba_ssm else EMBEDDINGS)),
        "model.norm.weight": same("backbone.norm_f.weight"),
    }
    if not tied:
        sources["lm_head.weight"] = same("lm_head.weight")
    for index in range(layers):
        block, foreign = f"model.layers.{index}.", f"backbone.layers.{index}."
        sources[f"{block}mixer_norm.weight"] = same(f"{foreign}norm.weight")
        sources |= mixer_sources(mixer, f"{block}mixer.", f"{foreign}mixer.")
    description = {"mixer": {"type": "mamba", **mixer}, "mlp_size": 0}
    return Layout(
        plain=PlainConfig.from_dict({**config, "layers": [description] * layers}),
        sources=sources,
        copies={"lm_head.weight": "model.embeddings.weight"} if tied else {},
        copies_written=of_mamba_ssm,
    )


def read_transformers(raw: dict[str, Any], where: str, *, inner_norms: bool = False) -> Layout:
    """Read a MambaConfig, or with `inner_norms` a FalconMambaConfig. UserError for what cannot be reproduced."""
    hidden = Fields(raw, where).integer("hidden_size", 768)
    # The file is read with the rank that "auto" stands for, so that it is checked as any other whole number.
    fields = Fields({**raw, "time_step_rank": time_step_rank(raw.get("time_step_rank", "auto"), hidden)}, where)
    fields.integer("hidden_size", 768)
    fields.require("hidden_act", "silu", ["silu", "swish"], "the activation is a SiLU")
    expanded = int(fields.number("expand", 2.0) * hidden)
    mixer: dict[str, Any] = {
        # Where a file has both, transformers takes the width: Falcon-Mamba's says "expand": 16, and means 2.
        "inner_dim": fields.optional_integer("intermediate_size", expanded),
        "state_dim": fields.integer("state_size", 16),
        "dt_rank": fields.integer("time_step_rank"),
        "conv_width": fields.integer("conv_kernel", 4),
        "conv_bias": fields.flag("use_conv_bias", True),
        "proj_bias": fields.flag("use_bias", False),
    }
    if inner_norms:
        mixer |= {"input_norms": "plain", "norm_eps": fields.number("mixer_rms_eps", 1e-6)}
    # How weights were initialised and which code runs the scan. The others stand in published files, converted from
    # mamba_ssm's, but transformers does not read them.
    fields.ignore("time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor")
    fields.ignore("rescale_prenorm_residual", "use_mambapy", "use_falcon_mambapy", "use_associative_scan")
    fields.ignore("d_inner", "d_model", "n_layer", "fused_add_norm", "rms_norm", "ssm_cfg", "pad_vocab_size_multiple")
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


def write_transformers(
    plain: PlainConfig, kept: dict[str, Any], model_type: str, architecture: str, *, inner_norms: bool = False
) -> dict[str, Any]:
    """Return the config that `read_transformers` reads as `plain`; `kept` is the one that it was read from, or {}."""
    mixer = first_module(plain, "mamba")
    rank, width = mixer["dt_rank"], plain.hidden_size
    said = time_step_rank(kept.get("time_step_rank", "auto"), width) == rank and bool(kept)
    fields = {
        "model_type": model_type,
        "architectures": [architecture],
        **common_fields(plain),
        "state_size": mixer["state_dim"],
        **expanded_width(kept, "expand", mixer["inner_dim"], width),
        **({} if said else {"time_step_rank": rank}),
        "conv_kernel": mixer["conv_width"],
        "use_conv_bias": mixer["conv_bias"],
        "use_bias": mixer["proj_bias"],
        **({"mixer_rms_eps": mixer.get("norm_eps", 1e-6)} if inner_norms else {}),
        "layer_norm_epsilon": plain.norm_eps,
        "residual_in_fp32": plain.residual_in_fp32,
    }
    return merged(kept, fields)


def expanded_width(kept: Mapping[str, Any], key: str, inner: int, hidden: int) -> dict[str, Any]:
    """Return the factor `key` and `intermediate_size`, which counts where it says something else."""
    factor = kept.get(key, inner // hidden or 1)
    if "intermediate_size" in kept or not isinstance(factor, int) or factor * hidden != inner:
        return {key: factor, "intermediate_size": inner}
    return {key: factor}


def time_step_rank(value: Any, hidden: int) -> Any:
    """Return the rank that "auto" means in both sources, hidden_size / 16 rounded up; everything else as it is."""
    return -(-hidden // 16) if value == "auto" else value
