"""Falcon-Mamba (``model_type: falcon_mamba``): ``models/falcon_mamba`` of transformers 5.23.

It is transformers' Mamba with RMS norms without weights on the low-rank time step, on B and on C.
"""

from __future__ import annotations

from typing import Any

from longrecall.models.formats.layout import Layout
from longrecall.models.formats.mamba_common import read_transformers, write_transformers
from longrecall.models.sizes import PlainConfig


def layout(raw: dict[str, Any], where: str) -> Layout:
    """Read a FalconMambaConfig (parsed; `where` names the file in errors). UserError for what cannot be reproduced."""
    return read_transformers(raw, where, inner_norms=True)


def stock_config(plain: PlainConfig, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the FalconMambaConfig of a native model as plain data; `kept` is the one that it was read from, or {}."""
    return write_transformers(plain, kept, "falcon_mamba", "FalconMambaForCausalLM", inner_norms=True)
