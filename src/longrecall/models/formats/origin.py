"""What a native checkpoint keeps of the foreign one that it was made of, so that export can give that back.

It lies in the folder ``origin`` beside the native tensors: the foreign config.json as it was, ``origin.json``, and the
tensors that only travelled along (`Layout.travelling`), in shards of their own. Nothing of it is loaded into a model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrecall.errors import UserError
from longrecall.models.formats.descriptions import read_json
from longrecall.models.formats.weights import SAFETENSORS_FILE, SAFETENSORS_INDEX, Weights, open_weights

if TYPE_CHECKING:
    from torch import Tensor

ORIGIN_FOLDER = "origin"
ORIGIN_FILE = "origin.json"


@dataclass(frozen=True)
class Origin:
    """The foreign checkpoint that a native one was made of.

    Attributes:
        format: its name in `longrecall.models.formats.FORMATS`.
        config: its config.json.
        spelt: names of its tensors that the format would not write by itself (`Match.spelt`).
        travelling: names of the tensors that travel along.
    """

    format: str
    config: dict[str, Any]
    spelt: tuple[str, ...] = ()
    travelling: tuple[str, ...] = ()
    _weights: Weights | None = field(default=None, repr=False, compare=False)

    @property
    def files(self) -> list[Path]:
        """The weight files with tensors that travel along."""
        return [] if self._weights is None else list(self._weights.files)

    @property
    def travelling_numbers(self) -> int:
        """How many numbers the tensors that travel along have."""
        weights = self._weights
        return 0 if weights is None else sum(math.prod(weights.shape(name)) for name in self.travelling)

    def read(self, name: str) -> Tensor:
        """Return one of the tensors that travel along, bit for bit, as a copy of the file."""
        assert self._weights is not None
        return self._weights.read([name])[0].clone()

    def write(self, folder: Path, add: Callable[[str, Tensor], None]) -> None:
        """Put config.json and origin.json into `folder`, and hand every tensor that travels along to `add`."""
        folder.mkdir(exist_ok=True)
        for name, content in (
            ("config.json", self.config),
            (ORIGIN_FILE, {"format": self.format, "spelt": list(self.spelt)}),
        ):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for name in self.travelling:
            add(name, self.read(name))


def read_origin(folder: Path) -> Origin | None:
    """Return the origin that is kept in `folder`; None where there is no such folder.

    Raises:
        UserError: a file of it is missing or damaged.
    """
    if not folder.is_dir():
        return None
    config, record = read_json(folder / "config.json"), read_json(folder / ORIGIN_FILE)
    name, spelt = record.get("format"), record.get("spelt", [])
    if not isinstance(name, str) or not isinstance(spelt, list) or not all(isinstance(entry, str) for entry in spelt):
        raise UserError(f'{folder / ORIGIN_FILE} must hold the name of a "format" and a list "spelt" of tensor names')
    weights: Weights | None = None
    if any((folder / file).is_file() for file in (SAFETENSORS_FILE, SAFETENSORS_INDEX)):
        weights = open_weights(folder)
    travelling = () if weights is None else tuple(weights.names())
    return Origin(name, config, tuple(spelt), travelling, weights)
