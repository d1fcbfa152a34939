"""expand: a checkpoint in, the same checkpoint with a larger state out, one layer in memory at a time."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longrecall.errors import UserError
from longrecall.models.accounting import ModelAccount, account, retrieval_bytes
from longrecall.models.config import RecurrentConfig
from longrecall.models.sizes import mixer_of, with_mixer
from longrecall.surgery.fresh import layer_generator
from longrecall.surgery.handover import finished_config
from longrecall.surgery.inside import check_init_inside, inner_path, join_tensors, mixer_at, plan_inside, split_tensors
from longrecall.surgery.layer_selection import select_layers
from longrecall.surgery.method import Method, Plan, Tensors
from longrecall.surgery.registry import check_mixer, find_method
from longrecall.surgery.streaming import check_places, write_checkpoint
from longrecall.surgery.summary import ExpansionSummary, layer_changes
from longrecall.version import __version__

if TYPE_CHECKING:
    from longrecall.models.checkpoint import Checkpoint

UNKNOWN_CONTEXT = 4096
"""Tokens at which caches are counted when a checkpoint does not say how long its training sequences were."""

MIXER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(mixer\..+|mixer_norm\.weight)")
"""The tensors of a layer that surgery works on: the number of the layer, and the name within it."""


@dataclass(frozen=True)
class Operation:
    """A checked wish: method, init and complete options, before any layer is looked at."""

    method: Method
    init: str
    options: Mapping[str, Any]
    seed: int

    @classmethod
    def check(cls, method: str, init: str, options: Mapping[str, object], seed: int) -> Operation:
        """Return the operation; raise UserError on an unknown method, init or option, or a value that does not fit."""
        found = find_method(method)
        found.check_init(init)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise UserError(f"seed {seed!r} is not a whole number")
        return cls(found, init, found.check_options(init, options), seed)

    def plan(self, layer: int, mixer: Mapping[str, Any]) -> Plan:
        """Return what one layer becomes; raise UserError, naming the layer, when this operation does not fit it."""
        path = inner_path(self.method, mixer)
        target = mixer_at(mixer, path)
        check_mixer(self.method, layer, target)
        check_init_inside(layer, mixer, path, self.init)
        try:
            plan = self.method.plan(target, self.init, self.options)
        except UserError as error:
            raise UserError(f"{self.method.name}, layer {layer} ({target['type']}): {error}") from None
        return plan_inside(mixer, path, plan)


def expand(
    src: str | Path,
    dst: str | Path,
    method: str = "merge_heads",
    layers: str | Iterable[int] = "every:6",
    init: str = "preserve",
    seed: int = 0,
    dry_run: bool = False,
    force: bool = False,
    **options: object,
) -> ExpansionSummary:
    """Write checkpoint `src` to `dst` with a larger recurrent state in the chosen layers; return what was done.

    Args:
        src: checkpoint folder (or whatever `longrecall.load` takes); it is never changed.
        dst: output folder. It appears complete at the end or not at all.
        method: `merge_heads` (GLA, RetNet), `grow_state` (Mamba-2), `subheads` (Gated DeltaNet, DeltaNet, GLA, KDA)
            or `add_retrieval` (any mixer).
        layers: `every:M`, `first:N`, `all`, `0,6,12`, or indices.
        init: `preserve`, `perturb`, `handover`, `reinit` or `inherit`; the modules of the methods say what each does.
        seed: of all fresh numbers; a layer's numbers do not depend on which other layers are chosen.
        dry_run: plan and count, read no weights, write nothing; `src` may then be a config.json alone.
        force: replace an existing `dst`.
        options: of the method, e.g. ``factor=4`` or ``state_dim=512`` of grow_state.

    Raises:
        UserError: an unknown name, a layer that the method does not fit, or an output that cannot be written. Also
            NaN or Inf in the weights of a chosen layer. Nothing is written then.

    >>> summary = expand(BASE, "bigger", method="grow_state", layers="all", dry_run=True)
    >>> summary.state_after / summary.state_before
    4.0
    """
    return expand_with(
        src, dst, method=method, layers=layers, init=init, seed=seed, dry_run=dry_run, force=force, options=options
    )


def expand_with(
    src: str | Path,
    dst: str | Path,
    *,
    method: str,
    layers: str | Iterable[int],
    init: str,
    seed: int,
    dry_run: bool,
    force: bool,
    options: Mapping[str, object],
) -> ExpansionSummary:
    """Do what `expand` says, with the method's options as one mapping, whose keys cannot clash with the arguments."""
    from longrecall.models.checkpoint import Checkpoint, open_checkpoint
    from longrecall.models.outline import open_outline

    operation = Operation.check(method, init, options, seed)
    check_places(src, dst)
    source = open_outline(src) if dry_run else open_checkpoint(src)
    if operation.method.check_model is not None:
        operation.method.check_model(source.config, operation.options)
    chosen = select_layers(layers, len(source.config.layers), _fitting(operation.method, source.plain.layers))
    plans = {layer: operation.plan(layer, mixer_of(source.config.layers[layer])) for layer in chosen}
    config = planned_config(source.config, plans)
    accounts = account(source.config), account(config), account(finished_config(config))
    context = config.context_length or UNKNOWN_CONTEXT
    kept = context, retrieval_bytes(config, context)
    summary = _summary(operation, plans, accounts, kept, str(src), str(dst), written=not dry_run)
    if isinstance(source, Checkpoint) and not dry_run:
        tensors = _edited(source, operation, plans)
        write_checkpoint(source, dst, config, tensors, lambda: [*source.surgery, _record(summary, source)], force=force)
    return summary


def _fitting(method: Method, layers: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the layers that have a mixer which `method` fits."""
    mixers = [mixer_of(layer) for layer in layers]
    targets = [mixer_at(mixer, inner_path(method, mixer)) for mixer in mixers]
    return tuple(index for index, target in enumerate(targets) if method.fits(str(target["type"])))


def planned_config(config: RecurrentConfig, plans: Mapping[int, Plan]) -> RecurrentConfig:
    """Return a copy of `config` in which every planned layer has its new mixer."""
    descriptions = copy.deepcopy(list(config.layers))
    for layer, plan in plans.items():
        descriptions[layer] = with_mixer(descriptions[layer], plan.mixer)
    return RecurrentConfig.from_dict(config.to_dict() | {"layers": descriptions})


def edit_layer(
    layer: int,
    mixer: Mapping[str, Any],
    tensors: Tensors,
    operation: Operation,
    earlier_surgeries: int = 0,
) -> Tensors:
    """Return the tensors of one layer after `operation`; names relative to the layer, e.g. `mixer.q_proj.weight`.

    `tensors` holds `mixer_norm.weight` and everything under `mixer.`. Raises UserError on NaN or Inf in it.
    """
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(
                f"model.layers.{layer}.{name} holds NaN or Inf; surgery would hide that, use an undamaged checkpoint"
            )
    generator = layer_generator(operation.seed, layer, earlier_surgeries)
    transform, init, options = operation.method.transform, operation.init, operation.options
    path = inner_path(operation.method, mixer)
    if not path:
        return transform(mixer, tensors, init, options, generator)
    inner, others = split_tensors(tensors, path)
    return join_tensors(transform(mixer_at(mixer, path), inner, init, options, generator), others, path)


def _edited(source: Checkpoint, operation: Operation, plans: Mapping[int, Plan]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the new checkpoint; at most one edited layer is in memory."""
    members: dict[int, list[str]] = {layer: [] for layer in plans}
    for name in source.names():
        match = MIXER_TENSOR.fullmatch(name)
        if match and int(match[1]) in plans:
            members[int(match[1])].append(match[2])
        else:
            yield name, source.read(name)
    for layer, names in members.items():
        prefix = f"model.layers.{layer}."
        old = {name: source.read(prefix + name) for name in names}
        new = edit_layer(layer, mixer_of(source.config.layers[layer]), old, operation, len(source.surgery))
        del old
        for name in sorted(new):
            if not bool(torch.isfinite(new[name]).all()):
                raise UserError(f"{prefix}{name} would hold NaN or Inf; use smaller numbers in the method's options")
            yield prefix + name, new.pop(name)


def _summary(
    operation: Operation,
    plans: Mapping[int, Plan],
    accounts: tuple[ModelAccount, ModelAccount, ModelAccount],
    kept: tuple[int, int],
    src: str,
    dst: str,
    *,
    written: bool,
) -> ExpansionSummary:
    before, after, finished = accounts
    warnings = dict.fromkeys(warning for plan in plans.values() for warning in plan.warnings)
    return ExpansionSummary(
        method=operation.method.name,
        init=operation.init,
        seed=operation.seed,
        options={name: value for name, value in operation.options.items() if value is not None},
        source=src,
        destination=dst,
        layers=layer_changes(before, after, tuple(plans)),
        touched=tuple(f"model.layers.{layer}.{name}" for layer, plan in plans.items() for name in plan.touched),
        warnings=tuple(warnings),
        state_before=before.state_size,
        state_after=after.state_size,
        parameters_before=before.parameters,
        parameters_after=after.parameters,
        state_finished=finished.state_size,
        parameters_finished=finished.parameters,
        context=kept[0],
        retrieval_bytes=kept[1],
        written=written,
    )


def _record(summary: ExpansionSummary, source: Checkpoint) -> dict[str, Any]:
    """Return the record of surgery.json (docs/reference/files.md, "A native checkpoint")."""
    return {
        "method": summary.method,
        "init": summary.init,
        "layers": list(summary.chosen_layers),
        "seed": summary.seed,
        "options": summary.options,
        "longrecall_version": __version__,
        "source": {"path": summary.source, "sha256": source.sha256()},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "touched": list(summary.touched),
        "state_size": {"before": summary.state_before, "after": summary.state_after},
        "parameters": {"before": summary.parameters_before, "after": summary.parameters_after},
    }
