"""Every tensor of a file against what its config.json promises."""

from __future__ import annotations

from pathlib import Path

from longrecall.errors import UserError
from longrecall.models.formats.sources import Layout, Source
from longrecall.models.formats.weights import Weights, listed


def match(folder: Path, layout: Layout, weights: Weights) -> dict[str, str | None]:
    """Return native name -> foreign name (None = a constant) once every tensor is accounted for.

    Args:
        folder: named in errors.
        layout: what config.json promises.
        weights: what the files have.

    Raises:
        UserError: a tensor that is missing, unknown, or of a wrong shape or type.
    """
    shapes = layout.plain.tensor_shapes()
    there = set(weights.names())
    found: dict[str, str | None] = {}
    for name in shapes:
        source = layout.sources[name]
        found[name] = next((candidate for candidate in source.names if candidate in there), None)
    used = {foreign for foreign in found.values() if foreign is not None}
    extra = {n for n in there - used - set(layout.copies) if not n.endswith(layout.ignored_suffixes or ("\0",))}
    for name, foreign in found.items():
        source = layout.sources[name]
        if foreign is None and source.names:
            hint = f"; the file has unknown tensors instead: {listed(extra)}" if extra else ""
            raise UserError(f'{folder}: tensor "{source.names[0]}" is missing{hint}')
    if extra:
        raise UserError(f"{folder}: unknown tensors that config.json has no place for: {listed(extra)}")
    for name, foreign in found.items():
        if foreign is not None:
            _check_shape(folder, foreign, layout.sources[name], weights, shapes[name])
    return found


def _check_shape(folder: Path, foreign: str, source: Source, weights: Weights, expected: tuple[int, ...]) -> None:
    shape = weights.shape(foreign)
    try:
        fits = source.shape(shape) == expected
    except ValueError:
        fits = False
    if not fits:
        wanted = list(expected)
        raise UserError(f'{folder}: tensor "{foreign}" has shape {list(shape)}, but config.json asks for {wanted}')
    weights.check_type(foreign)
