"""Checkpoint formats: one file each. `detect` chooses by config.json; a new format is one file and one line here.

docs/reference/formats.md says how to write one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from longrecall.errors import UserError, did_you_mean
from longrecall.models.formats import (
    bamba,
    falcon_h1,
    falcon_mamba,
    fla_delta_net,
    fla_gated_delta_net,
    fla_gated_deltaproduct,
    fla_gla,
    fla_hgrn2,
    fla_kda,
    fla_mom,
    fla_retnet,
    fla_rwkv6,
    fla_rwkv7,
    granitemoehybrid,
    hymba,
    jamba,
    kimi_linear,
    mamba_ssm,
    native,
    nemotron_h,
    olmo_hybrid,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
    recurrent_gemma,
    transformers_mamba,
    transformers_mamba2,
    transformers_rwkv,
    zamba2,
)
from longrecall.models.formats.format import Format
from longrecall.models.formats.unread import missing_part


def registry(formats: Iterable[Format]) -> dict[str, Format]:
    """Return formats by name; ValueError when two share a name, a model_type or a mark."""
    table: dict[str, Format] = {}
    known: set[tuple[str, str]] = set()
    for entry in formats:
        own = {("model_type", kind) for kind in entry.model_types} | {("text", kind) for kind in entry.nested_types}
        own |= {("mark", entry.mark)} if entry.mark is not None else set()
        if entry.name in table or own & known:
            raise ValueError(f"checkpoint format {entry.name} ({', '.join(entry.model_types)}) is registered twice")
        table[entry.name] = entry
        known |= own
    return table


FORMATS = registry(
    (
        Format(native.NAME, (native.MODEL_TYPE,), native.layout),
        Format("fla_gla", ("gla",), fla_gla.layout, fla_gla.stock_config),
        Format(
            "fla_gated_delta_net", ("gated_deltanet",), fla_gated_delta_net.layout, fla_gated_delta_net.stock_config
        ),
        Format("fla_delta_net", ("delta_net",), fla_delta_net.layout, fla_delta_net.stock_config),
        Format("fla_retnet", ("retnet",), fla_retnet.layout, fla_retnet.stock_config),
        Format("fla_rwkv7", ("rwkv7",), fla_rwkv7.layout, fla_rwkv7.stock_config),
        Format("fla_rwkv6", ("rwkv6",), fla_rwkv6.layout, fla_rwkv6.stock_config),
        Format("fla_hgrn2", ("hgrn2",), fla_hgrn2.layout, fla_hgrn2.stock_config),
        Format("fla_kda", ("kda",), fla_kda.layout, fla_kda.stock_config),
        Format("fla_mom", ("mom",), fla_mom.layout, fla_mom.stock_config),
        Format(
            "fla_gated_deltaproduct",
            ("gated_deltaproduct",),
            fla_gated_deltaproduct.layout,
            fla_gated_deltaproduct.stock_config,
        ),
        Format("transformers_mamba", ("mamba",), transformers_mamba.layout, transformers_mamba.stock_config),
        Format("transformers_mamba2", ("mamba2",), transformers_mamba2.layout, transformers_mamba2.stock_config),
        Format("falcon_mamba", ("falcon_mamba",), falcon_mamba.layout, falcon_mamba.stock_config),
        Format("jamba", ("jamba",), jamba.layout, jamba.stock_config),
        Format("kimi_linear", ("kimi_linear",), kimi_linear.layout, kimi_linear.stock_config),
        Format("nemotron_h", ("nemotron_h",), nemotron_h.layout, nemotron_h.stock_config),
        Format("bamba", ("bamba",), bamba.layout, bamba.stock_config),
        Format("falcon_h1", ("falcon_h1",), falcon_h1.layout, falcon_h1.stock_config),
        Format("granitemoehybrid", ("granitemoehybrid",), granitemoehybrid.layout, granitemoehybrid.stock_config),
        Format("qwen3_5", ("qwen3_5", "qwen3_5_text"), qwen3_5.layout, qwen3_5.stock_config),
        Format("qwen3_5_moe", ("qwen3_5_moe", "qwen3_5_moe_text"), qwen3_5_moe.layout, qwen3_5_moe.stock_config),
        Format("qwen3_next", ("qwen3_next",), qwen3_next.layout, qwen3_next.stock_config),
        Format("olmo_hybrid", ("olmo_hybrid",), olmo_hybrid.layout, olmo_hybrid.stock_config),
        Format("recurrent_gemma", ("recurrent_gemma",), recurrent_gemma.layout, recurrent_gemma.stock_config),
        Format("transformers_rwkv", ("rwkv",), transformers_rwkv.layout, transformers_rwkv.stock_config),
        Format("zamba2", ("zamba2",), zamba2.layout, zamba2.stock_config),
        Format("hymba", ("hymba",), hymba.layout, hymba.stock_config),
        Format("mamba_ssm", (), mamba_ssm.layout, mamba_ssm.stock_config, mark="ssm_cfg", allow_torch=True),
    )
)


def detect(raw: dict[str, Any], where: str) -> Format:
    """Return the format of a parsed config.json.

    Args:
        raw: the JSON object.
        where: its file name, for errors.

    Raises:
        UserError: no format fits; the message says what is missing, or lists those there are and the nearest name.
    """
    kind, text = raw.get("model_type"), raw.get("text_config")
    inner = text.get("model_type") if isinstance(text, dict) else None
    for entry in FORMATS.values():
        if kind in entry.model_types or inner in entry.nested_types:
            return entry
        if kind is None and entry.mark is not None and entry.mark in raw:
            return entry
    if kind is None:
        marks = " nor ".join(f'"{entry.mark}"' for entry in FORMATS.values() if entry.mark is not None)
        raise UserError(f'{where} has neither "model_type" nor {marks}; {kinds_read()}')
    start = f'{where}: model_type "{kind}" is not a kind of model that longrecall reads'
    code = " The Python code that comes with it is never run." if raw.get("auto_map") else ""
    if (missing := missing_part(kind, inner)) is not None:
        raise UserError(f"{start}: {missing}.{code} {kinds_read()}")
    # Only for a slip of the pen: "llama" is no misspelt "gla".
    hint = did_you_mean(str(kind), [name for entry in FORMATS.values() for name in entry.model_types], cutoff=0.8)
    raise UserError(f"{start}.{code}{hint} {kinds_read()}")


def find_format(name: str) -> Format:
    """Return the format that a user means: its name, or its model_type; UserError with the nearest name for others."""
    for entry in FORMATS.values():
        if name == entry.name or name in entry.model_types:
            return entry
    written = [entry.name for entry in FORMATS.values() if entry.stock_config is not None]
    raise UserError(
        f'there is no checkpoint format "{name}".{did_you_mean(name, written)} Those that are written: '
        f"{', '.join(written)}"
    )


def kinds_read() -> str:
    """Return the sentence that lists every kind of checkpoint there is a format for."""
    named = [kind for entry in FORMATS.values() for kind in entry.model_types]
    others = [entry.name for entry in FORMATS.values() if not entry.model_types]
    return f"longrecall reads model_type {', '.join(named)}, and checkpoints of {' and '.join(others)}"
