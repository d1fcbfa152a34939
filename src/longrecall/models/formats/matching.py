"""Every tensor of a file against what its config.json promises."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from longrecall.errors import UserError
from longrecall.models.formats.layout import Layout, TensorPlan
from longrecall.models.formats.quantised import quantised_by_name, quantised_tensor
from longrecall.models.formats.weights import Weights, listed


@dataclass(frozen=True)
class Match:
    """What a file has of the tensors of a layout.

    Attributes:
        plan: the tensors, spelt as in the file.
        spelt: names of the file that are not what the format would write by itself: other spellings, stored copies.
        travelling: names of tensors that only travel along.
    """

    plan: TensorPlan
    spelt: tuple[str, ...]
    travelling: tuple[str, ...]


def match(folder: Path, layout: Layout, weights: Weights) -> Match:
    """Return where every native tensor is, once every tensor of the files is accounted for.

    Args:
        folder: named in errors.
        layout: what config.json promises.
        weights: what the files have.

    Raises:
        UserError: a tensor that is missing, unknown, or of a wrong shape or type; quantised weights.
    """
    shapes = {name: weights.shape(name) for name in weights.names()}
    there = shapes.keys()
    plan = layout.plan(shapes)
    travelling = {name for name in there - plan.foreign.keys() if name.startswith(layout.travelling)}
    known = plan.foreign.keys() | layout.copies.keys() | travelling
    extra = {name for name in there - known if not name.endswith(layout.ignored_suffixes or ("\0",))}
    method = quantised_by_name(extra)
    if method is not None:
        raise quantised_tensor(str(folder), next(n for n in sorted(extra) if quantised_by_name([n]) == method), method)
    for name in plan.foreign:
        if name not in there:
            hint = f"; the file has unknown tensors instead: {listed(extra)}" if extra else ""
            raise UserError(f'{folder}: tensor "{name}" is missing{hint}')
    if extra:
        raise UserError(f"{folder}: unknown tensors that config.json has no place for: {listed(extra)}")
    for name, wanted in plan.foreign.items():
        shape = shapes[name]
        if shape != wanted:
            raise UserError(
                f'{folder}: tensor "{name}" has shape {list(shape)}, but config.json asks for {list(wanted)}'
            )
        weights.check_type(name)
    _check_equal_types(folder, plan, weights)
    written = layout.plan(()).foreign.keys()
    spelt = (plan.foreign.keys() - written) | (there & layout.copies.keys())
    return Match(plan, tuple(sorted(spelt)), tuple(sorted(travelling)))


def _check_equal_types(folder: Path, plan: TensorPlan, weights: Weights) -> None:
    for native, parts in plan.parts.items():
        if len(parts) > 1 and len(kinds := {weights.kind(part.name) for part in parts}) > 1:
            first = parts[0].name
            other = next(part.name for part in parts if weights.kind(part.name) != weights.kind(first))
            shown = " and ".join(sorted(kinds))
            raise UserError(
                f'{folder}: tensors "{first}" and "{other}" have different types ({shown}), but belong to one, '
                f'"{native}"; convert them to one type'
            )
