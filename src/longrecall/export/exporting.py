"""export: a checkpoint in, one that the tools of others load out, tensor by tensor.

A native model that has the shapes of a stock one becomes a stock checkpoint: what reading does, the other way round.
Any other one is written natively, with code that finds longrecall (``auto_map``).
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from longrecall.errors import UserError
from longrecall.export.card import exported_card
from longrecall.export.padding import PaddedReader, Padding, plan_padding
from longrecall.export.summary import ExportSummary
from longrecall.models import checkpoint
from longrecall.models.accounting import account
from longrecall.models.checkpoint import Checkpoint, open_checkpoint
from longrecall.models.formats import FORMATS, find_format
from longrecall.models.formats.format import Format
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.origin import Origin
from longrecall.models.formats.shards import ShardWriter, disk_errors, new_checkpoint_folder
from longrecall.models.formats.stock import stock_layout
from longrecall.models.formats.torch_file import TorchFileWriter
from longrecall.models.sizes import PlainConfig
from longrecall.models.surgery_records import SURGERY_FILE
from longrecall.surgery.streaming import check_places, write_checkpoint

AUTO_MAP = "auto_map"
"""The format of a native checkpoint that brings along the code by which transformers finds longrecall."""

_WITH_CODE = f"--to {AUTO_MAP} writes any model; transformers loads it where longrecall is installed"
_WITH_PADDING = (
    "--pad-states gives the smaller layers channels that change no answer (--dry-run says what that costs). "
)


class _TensorWriter(Protocol):
    def add(self, name: str, tensor: Tensor) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class _Target:
    """A stock checkpoint to write: its format, config.json, tensors, and what is known of the one it comes from."""

    form: Format
    raw: dict[str, Any]
    layout: Layout
    padding: Padding
    origin: Origin | None


def export_checkpoint(
    src: str | Path,
    dst: str | Path,
    to: str | None = None,
    *,
    pad_states: bool = False,
    new_config: bool = False,
    dry_run: bool = False,
    force: bool = False,
) -> ExportSummary:
    """Write checkpoint `src` to `dst` in the format of another library; return what was done.

    Args:
        src: checkpoint folder (or whatever `longrecall.load` takes); it is never changed.
        dst: output folder. It appears complete at the end or not at all.
        to: the name or model_type of a format, or ``auto_map``; None = the format that `src` comes from.
        pad_states: fill layers with smaller states up with channels that add nothing.
        new_config: make config.json anew, not after the one that `src` was read from; tensors that only travelled along
            stay behind.
        dry_run: plan and count, read no weights, write nothing.
        force: replace an existing `dst`.

    Raises:
        UserError: an unknown format, a model that it cannot hold (the line says which layer or field), or an output
            that cannot be written. Nothing is written then.
    """
    check_places(src, dst)
    source = open_checkpoint(src)
    if to == AUTO_MAP:
        if pad_states or new_config:
            raise UserError(f"--to {AUTO_MAP} keeps every layer as it is; leave out --pad-states and --new-config")
        return _with_code(source, dst, dry_run=dry_run, force=force)
    target = _target(source, to, pad_states=pad_states, new_config=new_config)
    summary = _summary(source, target, str(dst), written=not dry_run)
    if not dry_run:
        with new_checkpoint_folder(dst, force) as folder:
            _write(folder, Path(dst), source, target, summary)
            # What was written is a checkpoint of this format, whole, or it does not appear.
            open_checkpoint(folder)
    return summary


def _with_code(source: Checkpoint, dst: str | Path, *, dry_run: bool, force: bool) -> ExportSummary:
    padding = Padding(source.plain, {}, ())
    summary = _counted(source, padding, str(dst), AUTO_MAP, travelling=0, notes=(), written=not dry_run)
    if not dry_run:
        tensors = ((name, source.read(name)) for name in source.names())
        records = source.surgery
        write_checkpoint(source, dst, source.config, tensors, lambda: records, force=force, with_code=True)
    return summary


def _target(source: Checkpoint, to: str | None, *, pad_states: bool, new_config: bool) -> _Target:
    origin = source.origin
    if to is None:
        if origin is None:
            raise UserError(
                f"{source.path} was not read from another library's checkpoint, so its format must be named; give "
                f"--to FORMAT. {_fitting(source.plain)}"
            )
        to = origin.format
    form = find_format(to)
    if form.stock_config is None:
        raise UserError(f'export cannot write the format "{form.name}"; {_WITH_CODE}')
    known = origin if origin is not None and origin.format == form.name and not new_config else None
    kept = {} if known is None else known.config
    padding = plan_padding(source.plain) if pad_states else Padding(source.plain, {}, ())
    try:
        raw, layout = stock_layout(form, padding.plain, kept)
    except UserError as error:
        padded = "" if pad_states or not _fits(form, plan_padding(source.plain).plain, kept) else _WITH_PADDING
        raise UserError(
            f"{source.path} cannot be written as {form.name}: {error}. {padded}{_WITH_CODE}. {_fitting(source.plain)}"
        ) from None
    return _Target(form, _typed(raw, form, source), layout, padding, known)


def _fits(form: Format, plain: PlainConfig, kept: dict[str, Any]) -> bool:
    try:
        stock_layout(form, plain, kept)
    except UserError:
        return False
    return True


def _fitting(plain: PlainConfig) -> str:
    """Say in which formats the model can be written as it is."""
    names = [form.name for form in FORMATS.values() if form.stock_config is not None and _fits(form, plain, {})]
    return f"It fits {', '.join(names)}" if names else "It fits no stock format as it is"


def _typed(raw: dict[str, Any], form: Format, source: Checkpoint) -> dict[str, Any]:
    """Return config.json with the storage type of the weights, where the other library says that."""
    if not form.model_types:
        return raw
    name = str(source.dtype("model.embeddings.weight")).removeprefix("torch.")
    key = "torch_dtype" if "torch_dtype" in raw and "dtype" not in raw else "dtype"
    sections = {
        section: {**value, **{known: name for known in ("dtype", "torch_dtype") if known in value}}
        for section, value in raw.items()
        if section == "text_config" and isinstance(value, dict)
    }
    return {**raw, **sections, key: name}


def _summary(source: Checkpoint, target: _Target, dst: str, *, written: bool) -> ExportSummary:
    notes = []
    if target.layout.plain.residual_in_fp32 != source.plain.residual_in_fp32:
        types = ["float32", "the weights' type"]
        here, there = types if source.plain.residual_in_fp32 else reversed(types)
        notes.append(
            f"the residual stream is summed in {there} by the other library and in {here} by longrecall; answers can "
            "differ slightly where weights are not float32"
        )
    travelling = 0 if target.origin is None else len(target.origin.travelling)
    left = 0 if source.origin is None else len(source.origin.travelling) - travelling
    if left:
        notes.append(
            f"{left} tensors of parts that longrecall does not run are left out: they belong to another format"
        )
    return _counted(
        source, target.padding, dst, target.form.name, travelling=travelling, notes=tuple(notes), written=written
    )


def _counted(
    source: Checkpoint,
    padding: Padding,
    dst: str,
    name: str,
    *,
    travelling: int,
    notes: tuple[str, ...],
    written: bool,
) -> ExportSummary:
    before, after = account(source.plain), account(padding.plain)
    size = {name: source.dtype(name).itemsize for name in source.names()}
    grown = padding.plain.tensor_shapes()
    return ExportSummary(
        source=str(source.path),
        destination=dst,
        format=name,
        padded=padding.sizes,
        parameters_before=before.parameters,
        parameters_after=after.parameters,
        weight_bytes_before=sum(math.prod(source.shape(known)) * size[known] for known in size),
        weight_bytes_after=sum(math.prod(grown[known]) * size[known] for known in size),
        state_bytes_before=before.state_bytes,
        state_bytes_after=after.state_bytes,
        travelling=travelling,
        notes=notes,
        written=written,
    )


def _write(folder: Path, out: Path, source: Checkpoint, target: _Target, summary: ExportSummary) -> None:
    spelt = () if target.origin is None else target.origin.spelt
    writer: _TensorWriter = (
        TorchFileWriter(folder, out)
        if target.form.allow_torch
        else ShardWriter(folder, checkpoint.DEFAULT_SHARD_BYTES, out)
    )
    for name, tensor in target.layout.plan(spelt).foreign_tensors(PaddedReader(source, target.padding)):
        writer.add(name, tensor)
    for copy, original in target.layout.copies.items():
        if target.layout.copies_written or copy in spelt:
            writer.add(copy, source.read(original))
    if target.origin is not None:
        for name in target.origin.travelling:
            writer.add(name, target.origin.read(name))
    writer.finish()
    with disk_errors(out):
        for path in source.companion_files():
            shutil.copyfile(path, folder / path.name)
        texts = {
            "README.md": exported_card(summary, target.raw.get("architectures") or (), source.surgery),
            "config.json": json.dumps(target.raw, indent=2) + "\n",
        }
        if source.surgery:
            texts[SURGERY_FILE] = json.dumps(source.surgery, indent=2, default=str) + "\n"
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
