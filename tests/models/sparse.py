"""Checkpoints of any size that cost no disk: shards whose tensors are holes of a file, read as zeros."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from longrecall.models.formats import detect
from longrecall.models.formats.weights import SAFETENSORS_INDEX


def write_sparse(folder: Path, raw: dict[str, Any], shard_bytes: int = 5 << 30) -> int:
    """Write a checkpoint of the foreign `config.json` in bfloat16, every number 0; return its bytes.

    Names and shapes are those that the format asks for: `raw` alone decides them.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    shapes = detect(raw, str(folder)).layout(raw, str(folder)).plan(()).foreign
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = total = 0
    for name, shape in shapes.items():
        more = 2 * math.prod(shape)
        if shards[-1] and size + more > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size, total = size + more, total + more
    names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        _write_holes(folder / name, tensors)
    places = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    (folder / SAFETENSORS_INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return total


def _write_holes(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file with a header and nothing behind it: the file system answers with zeros."""
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
