"""transformers' Mamba (``model_type: mamba``): ``models/mamba`` of transformers 5.23."""

from __future__ import annotations

from typing import Any

from longrecall.models.formats.layout import Layout
from longrecall.models.formats.mamba_common import read_transformers, write_transformers
from longrecall.models.sizes import PlainConfig


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a MambaConfig (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    return read_transformers(raw, where)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the MambaConfig of a native model as plain data; `kept` is the one that it was read from, or {}."""
    return write_transformers(plain, kept, "mamba", "MambaForCausalLM")
