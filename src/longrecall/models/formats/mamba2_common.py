"""What transformers' and mamba_ssm's Mamba-2 checkpoints share: tensor names and the order of rows.

Rows of in_proj are [z | x | B | C | dt] and convolution channels [x | B | C] on both sides and in the native format, so
every tensor is carried over as it is. The gated norm works on groups of inner_dim / groups channels in both sources
(transformers' ``MambaRMSNormGated``, mamba_ssm's ``RMSNormGated(group_size=d_ssm // ngroups)``).
"""

from __future__ import annotations

from typing import Any

from longrecall.models.formats.layout import Layout
from longrecall.models.formats.sources import same, squeeze_conv
from longrecall.models.sizes import PlainConfig

# Either spelling loads: mamba_ssm says embedding, transformers embeddings (and renames on loading).
_EMBEDDINGS = ("backbone.embeddings.weight", "backbone.embedding.weight")


def mamba2_layout(config: dict[str, Any], mixer: dict[str, Any], layers: int, *, of_mamba_ssm: bool = False) -> Layout:
    """Build the layout of `layers` equal Mamba-2 blocks; `config` holds the other keys of a native config.json.

    `of_mamba_ssm`: it is written as that library asks for it, with its name of the embedding, and the head stored even
    where it is tied to that.
    """
    tied = config["tie_word_embeddings"]
    sources = {
        "model.embeddings.weight": same(*(reversed(_EMBEDDINGS) if of_mamba_ssm else _EMBEDDINGS)),
        "model.norm.weight": same("backbone.norm_f.weight"),
    }
    if not tied:
        sources["lm_head.weight"] = same("lm_head.weight")
    names = ["in_proj.weight", "dt_bias", "A_log", "D", "norm.weight", "out_proj.weight"]
    names += ["in_proj.bias", "out_proj.bias"] if mixer["proj_bias"] else []
    for index in range(layers):
        block, foreign = f"model.layers.{index}.", f"backbone.layers.{index}."
        sources[f"{block}mixer_norm.weight"] = same(f"{foreign}norm.weight")
        for name in names:
            sources[f"{block}mixer.{name}"] = same(f"{foreign}mixer.{name}")
        weight = squeeze_conv(same(f"{foreign}mixer.conv1d.weight"))
        sources[f"{block}mixer.conv.weight"] = weight
        if mixer["conv_bias"]:
            sources[f"{block}mixer.conv.bias"] = same(f"{foreign}mixer.conv1d.bias")
    description = {"mixer": {"type": "mamba2", **mixer}, "mlp_size": 0}
    return Layout(
        plain=PlainConfig.from_dict({**config, "layers": [description] * layers}),
        sources=sources,
        copies={"lm_head.weight": "model.embeddings.weight"} if tied else {},
        copies_written=of_mamba_ssm,
    )
