"""What a config.json alone says about a model: enough to count it, and to plan surgery on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrecall.files import expand_home
from longrecall.models.checkpoint import Checkpoint, open_checkpoint, read_layout
from longrecall.models.description import is_description, read_sizes
from longrecall.models.formats import native
from longrecall.models.formats.descriptions import read_json
from longrecall.models.formats.weights import has_weights
from longrecall.models.sizes import PlainConfig
from longrecall.models.surgery_records import SURGERY_FILE, read_surgery

if TYPE_CHECKING:
    from longrecall.models.config import RecurrentConfig


@dataclass(frozen=True)
class Outline:
    """A model without its weights.

    Attributes:
        plain: all sizes.
        surgery: the records of surgery.json beside the config, oldest first.
    """

    plain: PlainConfig
    surgery: list[dict[str, Any]]
    origin: None = None
    """Of a `Checkpoint`: what its files hold beside the model."""

    @property
    def config(self) -> RecurrentConfig:
        """The same for transformers."""
        from longrecall.models.config import RecurrentConfig

        return RecurrentConfig.from_dict(self.plain.to_dict())


def open_outline(path: str | Path) -> Checkpoint | Outline:
    """Open a checkpoint, or where there are no weights read what the config says; no tensor is read.

    Args:
        path: a checkpoint folder or a hub id; a folder that has a config.json and no weights; a config.json of any
            known format, or a model description (FILE.json).

    Raises:
        UserError: as `open_checkpoint`, but for weights that are not there at all.
    """
    place = Path(expand_home(path))
    if is_description(path):
        kind = read_json(place).get("model_type", native.MODEL_TYPE) if place.is_file() else native.MODEL_TYPE
        if kind == native.MODEL_TYPE:
            return Outline(read_sizes(path), [])
        return Outline(read_layout(place).layout.plain, [])
    if not (place / "config.json").is_file() or has_weights(place):
        return open_checkpoint(path)
    return Outline(read_layout(place / "config.json").layout.plain, read_surgery(place / SURGERY_FILE))
