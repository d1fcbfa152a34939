"""What a checkpoint format is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longrecall.models.formats.layout import Layout
from longrecall.models.sizes import PlainConfig


@dataclass(frozen=True)
class Format:
    """A checkpoint format that longrecall reads, and writes where it has a `stock_config`.

    Attributes:
        name: what `info` prints and `export --to` takes.
        model_types: values of "model_type" in its config.json; the first is the one to write.
        layout: parsed config.json and its name for errors -> the checkpoint as a native one.
        stock_config: the inverse: a native config, and the config.json that it was once read from ({} = none) -> the
            config.json to write. `stock.stock_layout` proves it by reading it back. None = it is not written so.
        nested_types: values of "model_type" in "text_config" by which it is known, whatever stands around that.
        mark: a key of config.json by which it is known where there is no "model_type".
        allow_torch: its weights may also be a `pytorch_model.bin`.
    """

    name: str
    model_types: tuple[str, ...]
    layout: Callable[[dict[str, Any], str], Layout]
    stock_config: Callable[[PlainConfig, dict[str, Any]], dict[str, Any]] | None = None
    nested_types: tuple[str, ...] = ()
    mark: str | None = None
    allow_torch: bool = False
