"""Reads a checkpoint of another library and writes it back: tensors bit for bit, the config equal but for defaults.

The proof that every format has to pass: `assert_round_trip(folder, out)`, with a folder as the other library writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from longrecall.models.checkpoint import Checkpoint, CheckpointWriter, open_checkpoint
from longrecall.models.formats import FORMATS
from longrecall.models.formats.stock import plain_values, stock_layout
from longrecall.models.formats.weights import open_weights


def as_native(folder: Path, out: Path) -> Checkpoint:
    """Write what is read from `folder` as a native checkpoint, and open that."""
    source = open_checkpoint(folder)
    with CheckpointWriter(out) as writer:
        writer.set_config(source.config)
        for name in source.names():
            writer.add(name, source.read(name))
        writer.set_origin(source.origin)
        writer.add_companions(source.companion_files())
    return open_checkpoint(out)


def changed(read: dict[str, Any], written: dict[str, Any], place: str = "") -> list[str]:
    """The keys of a config.json, those of its sections included, that are written with another value."""
    found = []
    for key, value in read.items():
        if isinstance(value, dict) and isinstance(written.get(key), dict):
            found += changed(value, written[key], f"{place}{key}.")
        elif key not in written or plain_values(value) != plain_values(written[key]):
            found.append(place + key)
    return found


def assert_round_trip(folder: Path, out: Path) -> None:
    """Check that a checkpoint is read, kept as a native one at `out`, and written to `out`/stock without a change."""
    native = as_native(folder, out)
    origin = native.origin
    assert origin is not None
    form = FORMATS[origin.format]
    read = json.loads((folder / "config.json").read_text())
    raw, layout = stock_layout(form, native.plain, origin.config)
    assert changed(read, raw) == []
    # What is written beside that are defaults.
    assert form.layout(read, "config.json").plain == layout.plain
    # A config made without knowing the old one describes the same model.
    fresh, _ = stock_layout(form, native.plain, {})
    assert not form.model_types or fresh["model_type"] in form.model_types
    plan = layout.plan(origin.spelt)
    written = dict(plan.foreign_tensors(native.read)) | {name: origin.read(name) for name in origin.travelling}
    written |= {copy: native.read(layout.copies[copy]) for copy in layout.copies if copy in origin.spelt}
    (out / "stock").mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in written.items()},
        out / "stock" / "model.safetensors",
        metadata={"format": "pt"},
    )
    (out / "stock" / "config.json").write_text(json.dumps(raw))
    stored = open_weights(folder, form.allow_torch)
    kept = [name for name in stored.names() if not name.endswith(layout.ignored_suffixes or ("\0",))]
    assert sorted(written) == kept
    for name, tensor in zip(kept, stored.read(kept), strict=True):
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name
