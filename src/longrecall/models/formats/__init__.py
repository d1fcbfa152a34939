"""Checkpoint formats: one file each. `detect` chooses by config.json; a new format is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from longrecall.errors import UserError, did_you_mean
from longrecall.models.formats import (
    fla_delta_net,
    fla_gated_delta_net,
    fla_gla,
    fla_retnet,
    mamba_ssm,
    native,
    transformers_mamba,
    transformers_mamba2,
)
from longrecall.models.formats.sources import Layout


@dataclass(frozen=True)
class Format:
    """A checkpoint format that longrecall reads.

    Attributes:
        name: what `info` prints.
        model_type: the value of "model_type" in its config.json, None when `ssm_cfg` marks it instead.
        layout: parsed config.json and its name for errors -> the checkpoint as a native one.
        allow_torch: its weights may also be a `pytorch_model.bin`.
    """

    name: str
    model_type: str | None
    layout: Callable[[dict[str, Any], str], Layout]
    allow_torch: bool = False


def registry(formats: Iterable[Format]) -> dict[str | None, Format]:
    """Return formats by model_type; ValueError when two share a name or a model_type."""
    table: dict[str | None, Format] = {}
    for entry in formats:
        if entry.model_type in table or entry.name in {known.name for known in table.values()}:
            raise ValueError(f"checkpoint format {entry.name} ({entry.model_type}) is registered twice")
        table[entry.model_type] = entry
    return table


FORMATS = registry(
    (
        Format("native", native.MODEL_TYPE, native.layout),
        Format("fla_gla", fla_gla.MODEL_TYPE, fla_gla.layout),
        Format("fla_gated_delta_net", fla_gated_delta_net.MODEL_TYPE, fla_gated_delta_net.layout),
        Format("fla_delta_net", fla_delta_net.MODEL_TYPE, fla_delta_net.layout),
        Format("fla_retnet", fla_retnet.MODEL_TYPE, fla_retnet.layout),
        Format("transformers_mamba", transformers_mamba.MODEL_TYPE, transformers_mamba.layout),
        Format("transformers_mamba2", transformers_mamba2.MODEL_TYPE, transformers_mamba2.layout),
        Format("mamba_ssm", None, mamba_ssm.layout, allow_torch=True),
    )
)


def detect(raw: dict[str, Any], where: str) -> Format:
    """Return the format of a parsed config.json.

    Args:
        raw: the JSON object.
        where: its file name, for errors.

    Raises:
        UserError: no format fits; the message lists those there are and the nearest name.
    """
    kind = raw.get("model_type")
    if kind is None and "ssm_cfg" in raw:
        return FORMATS[None]
    if isinstance(kind, str) and kind in FORMATS:
        return FORMATS[kind]
    if kind is None:
        raise UserError(f'{where} has neither "model_type" nor "ssm_cfg"; {kinds_read()}')
    # Only for a slip of the pen: "llama" is no misspelt "gla".
    hint = did_you_mean(str(kind), [name for name in FORMATS if name is not None], cutoff=0.8)
    raise UserError(f'{where}: model_type "{kind}" is not a kind of model that longrecall reads.{hint} {kinds_read()}')


def kinds_read() -> str:
    """Return the sentence that lists every kind of checkpoint there is a format for."""
    named = [entry.model_type for entry in FORMATS.values() if entry.model_type is not None]
    others = [entry.name for entry in FORMATS.values() if entry.model_type is None]
    return f"longrecall reads model_type {', '.join(named)}, and checkpoints of {' and '.join(others)}"
