"""handover: an old and a new block side by side, and how the old one is dropped at the end.

A handover mixer holds both paths and `progress`: the output is the old path's at 0 and the new path's at 1. `expand`
writes it with progress 0 (the old function exactly), training moves progress up, and `finish_handover` leaves the new
path alone, as a plain mixer. Both paths share the layer's `mixer_norm`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from longrecall.errors import UserError
from longrecall.models.sizes import mixer_of, with_mixer

if TYPE_CHECKING:
    from torch import Tensor

    from longrecall.models.config import RecurrentConfig

_PROGRESS = "model.layers.{layer}.mixer.progress"
_MIXER = "model.layers.{layer}.mixer."


class TensorReader(Protocol):
    """Whatever can name and read the tensors of a checkpoint one at a time."""

    def names(self) -> Iterable[str]:
        """Return every tensor name."""

    def read(self, name: str) -> Tensor:
        """Return one tensor."""


def handover_mixer(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a mixer that hands over from `old` to `new`."""
    return {"type": "handover", "old": dict(old), "new": dict(new)}


def handover_tensors(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a handover layer's tensors (relative names) at progress 0; `mixer_norm` stays the old one's."""
    import torch

    result = {name: tensor for name, tensor in old.items() if not name.startswith("mixer.")}
    for path, tensors in (("old", old), ("new", new)):
        for name, tensor in tensors.items():
            if name.startswith("mixer."):
                result[f"mixer.{path}.{name.removeprefix('mixer.')}"] = tensor
    # float32 whatever the weights' dtype: bfloat16 would move in steps of up to 1/256 along the schedule.
    result["mixer.progress"] = torch.zeros((), dtype=torch.float32)
    return result


def handover_layers(config: RecurrentConfig) -> tuple[int, ...]:
    """Return the indices of the layers that are handing over."""
    return tuple(i for i, layer in enumerate(config.layers) if mixer_of(layer)["type"] == "handover")


def finish_handover(
    config: RecurrentConfig, reader: TensorReader, *, force: bool = False
) -> tuple[RecurrentConfig, Iterator[tuple[str, Tensor]]]:
    """Return the config without handover layers, and its (name, tensor) pairs, read and yielded one at a time.

    A layer is finished when its progress is 1; with `force` the old path is dropped at any progress, which changes the
    function. Raises UserError when a layer is unfinished and not forced, before any weight is read. A checkpoint
    without handover layers comes back unchanged.
    """
    layers = handover_layers(config)
    for layer in layers:
        progress = float(reader.read(_PROGRESS.format(layer=layer)))
        if progress != 1.0 and not force:
            raise UserError(
                f"layer {layer} has handed over only {progress:.3g} of its output; train until progress is 1, or force"
            )
    return finished_config(config), _renamed(reader, layers)


def finished_config(config: RecurrentConfig) -> RecurrentConfig:
    """Return a copy of `config` in which every handover layer is its new mixer alone."""
    descriptions = copy.deepcopy(list(config.layers))
    for layer in handover_layers(config):
        descriptions[layer] = with_mixer(descriptions[layer], mixer_of(descriptions[layer])["new"])
    return type(config).from_dict(config.to_dict() | {"layers": descriptions})


def finished_name(name: str, layers: Sequence[int]) -> str | None:
    """Return the name that tensor `name` has once `layers` are finished, or None when it is dropped."""
    match = re.match(r"model\.layers\.(\d+)\.mixer\.", name)
    if match is None or int(match[1]) not in layers:
        return name
    prefix = _MIXER.format(layer=match[1])
    path, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{rest}" if path == "new" else None


def finish_records(records: Sequence[Mapping[str, Any]], layers: Sequence[int]) -> list[dict[str, Any]]:
    """Return surgery records in which `touched` names tensors as they are called after `layers` are finished.

    Without this a recipe's multiplier for touched parameters would look for tensors that no longer exist.
    """
    changed = []
    for record in records:
        names = [finished_name(name, layers) for name in record.get("touched", [])]
        changed.append({**record, "touched": [name for name in names if name is not None]})
    return changed


def finish_checkpoint(
    src: str | Path, dst: str | Path, *, force: bool = False, overwrite: bool = False
) -> tuple[int, ...]:
    """Write checkpoint `src` to `dst` with every handover finished; return the layers that were.

    Streams tensor by tensor; `dst` appears complete or not at all. `force` drops old paths before progress is 1,
    `overwrite` replaces an existing `dst`. Raises UserError for an unfinished layer or a `dst` that cannot be written.
    """
    from longrecall.models.checkpoint import open_checkpoint
    from longrecall.surgery.streaming import write_checkpoint

    source = open_checkpoint(src)
    layers = handover_layers(source.config)
    finished, tensors = finish_handover(source.config, source, force=force)
    write_checkpoint(source, dst, finished, tensors, lambda: finish_records(source.surgery, layers), force=overwrite)
    return layers


def _renamed(reader: TensorReader, layers: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    for name in reader.names():
        new_name = finished_name(name, layers)
        if new_name is not None:
            yield new_name, reader.read(name)
