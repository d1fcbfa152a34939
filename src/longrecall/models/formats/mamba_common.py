"""What transformers' and mamba_ssm's Mamba checkpoints share: tensor names and the order of rows.

Rows of in_proj are [x | z] and those of x_proj [dt | B | C] on both sides and in the native format, so every tensor is
carried over as it is.
"""

from __future__ import annotations

from typing import Any

from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import same, squeeze_conv
from longrecall.models.sizes import PlainConfig

# Either spelling loads: mamba_ssm says embedding, transformers embeddings (and renames on loading).
EMBEDDINGS = ("backbone.embeddings.weight", "backbone.embedding.weight")

_NAMES = ("in_proj.weight", "x_proj.weight", "dt_proj.weight", "dt_proj.bias", "A_log", "D", "out_proj.weight")


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
    names = [*_NAMES, *(["in_proj.bias", "out_proj.bias"] if mixer["proj_bias"] else [])]
    for index in range(layers):
        block, foreign = f"model.layers.{index}.", f"backbone.layers.{index}."
        sources[f"{block}mixer_norm.weight"] = same(f"{foreign}norm.weight")
        for name in names:
            sources[f"{block}mixer.{name}"] = same(f"{foreign}mixer.{name}")
        sources[f"{block}mixer.conv.weight"] = squeeze_conv(same(f"{foreign}mixer.conv1d.weight"))
        if mixer["conv_bias"]:
            sources[f"{block}mixer.conv.bias"] = same(f"{foreign}mixer.conv1d.bias")
    description = {"mixer": {"type": "mamba", **mixer}, "mlp_size": 0}
    return Layout(
        plain=PlainConfig.from_dict({**config, "layers": [description] * layers}),
        sources=sources,
        copies={"lm_head.weight": "model.embeddings.weight"} if tied else {},
        copies_written=of_mamba_ssm,
    )


def time_step_rank(value: Any, hidden: int) -> Any:
    """Return the rank that "auto" means in both sources, hidden_size / 16 rounded up; everything else as it is."""
    return -(-hidden // 16) if value == "auto" else value
