"""transformers' Qwen3.5 (``qwen3_5``, ``qwen3_5_text``): ``models/qwen3_5`` of transformers 5.23.

Published files hold a model that reads images too. Its text model is read; the tensors of the vision part, and of the
layers that predict several tokens, travel along. A text model alone (``Qwen3_5ForCausalLM``) is read as well. The names
of its tensors lack ``language_model.``, unless it was loaded from a file that had that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from longrecall.models.formats.expressions import Source
from longrecall.models.formats.fields import Fields
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.qwen_common import (
    Body,
    Defaults,
    body_fields,
    channels,
    delta_sources,
    read_body,
    text_layout,
)
from longrecall.models.formats.sources import same, split
from longrecall.models.formats.stock import common_fields, first_module, merged
from longrecall.models.sizes import PlainConfig

_DEFAULTS = Defaults(vocab_size=248320, hidden_size=4096, num_hidden_layers=32, kv_heads=4)
_AROUND = (
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    # What training tools and servers put beside the text model's own values.
    *("bos_token_id", "eos_token_id", "pad_token_id", "hidden_size", "language_model_only"),
)
"""Keys around a text model that have no part in it."""


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a Qwen3_5Config or Qwen3_5TextConfig (parsed; `where` names the file in errors).

    Raises:
        UserError: what cannot be reproduced.
    """
    return read_text(raw, where, _DEFAULTS, _read_mlp)


def read_text(
    raw: dict[str, Any], where: str, defaults: Defaults, read_mlp: Callable[[Fields, int], dict[str, Any]]
) -> Layout:
    """Read a text model, alone or in a `text_config`; `read_mlp(fields, layers)`: the channel mixer of each layer."""
    fields = Fields(raw, where)
    inside = "text_config" in raw
    text = fields.section("text_config") if inside else fields
    body = read_body(text, defaults)
    mlp = read_mlp(text, len(body.mixers))
    # A leftover of a relative.
    text.require("mlp_only_layers", [], [[]], "all layers have the same kind of MLP")
    text.finish()
    if inside:
        # The whole model says whether its head is tied.
        tied = fields.flag("tie_word_embeddings", body.config["tie_word_embeddings"])
        body = Body({**body.config, "tie_word_embeddings": tied}, body.mixers)
        fields.ignore(*_AROUND)
        fields.finish()
    places = ["model.language_model.", "model."]
    mlps = [mlp] * len(body.mixers)
    return text_layout(body, mlps, _delta_sources, places if inside else places[::-1], ("model.visual.", "mtp."))


def text_config(
    plain: PlainConfig, kept: dict[str, Any], own: Mapping[str, Any], kind: str, architecture: str
) -> dict[str, Any]:
    """Return the config.json of a text model, in a `text_config` where the one that it was read from had that.

    Args:
        plain: the native model.
        kept: the config.json that it was read from, or {}.
        own: the fields of its channel mixers.
        kind, architecture: "model_type" and class of a text model alone.
    """
    inner = kept.get("text_config", kept)
    common = common_fields(plain)
    fields = {**common, **body_fields(plain, inner), **own}
    if "text_config" not in kept:
        return merged(kept, {"model_type": kind, "architectures": [architecture], **fields})
    del fields["tie_word_embeddings"]
    tied = {"tie_word_embeddings": plain.tie_word_embeddings}
    return merged(kept, {**tied, "text_config": merged(inner, fields)})


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a native model as plain data; `kept` is the one that it was read from, or {}."""
    own = {"intermediate_size": first_module(plain, "mlp")["inner_size"]}
    return text_config(plain, kept, own, "qwen3_5_text", "Qwen3_5ForCausalLM")


def _read_mlp(fields: Fields, layers: int) -> dict[str, Any]:
    del layers
    return {"type": "mlp", "inner_size": fields.integer("intermediate_size", 12288)}


def _delta_sources(mixer: Mapping[str, Any]) -> dict[str, Source]:
    sources = delta_sources(mixer)
    for name, source in zip("qkv", split("in_proj_qkv.weight", channels(mixer)), strict=True):
        sources[f"{name}_proj.weight"] = source
    return sources | {
        f"{ours}_proj.weight": same(f"in_proj_{theirs}.weight") for ours, theirs in zip("gba", "zba", strict=True)
    }
