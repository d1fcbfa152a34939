"""Checkpoints: opening any known format lazily, and writing the native one so that it appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from longrecall.errors import UserError, did_you_mean
from longrecall.files import ELSEWHERE, check_no_input
from longrecall.models.accounting import account
from longrecall.models.formats import detect
from longrecall.models.formats.descriptions import read_json
from longrecall.models.formats.format import Format
from longrecall.models.formats.hub import COMPANION_PATTERNS, locate
from longrecall.models.formats.layout import Layout
from longrecall.models.formats.matching import Match, match
from longrecall.models.formats.native import NAME as NATIVE
from longrecall.models.formats.native import model_card
from longrecall.models.formats.origin import ORIGIN_FOLDER, Origin, read_origin
from longrecall.models.formats.quantised import refuse_quantised
from longrecall.models.formats.remote_code import AUTO_MAP, CODE, CODE_FILE
from longrecall.models.formats.shards import ShardWriter, disk_errors
from longrecall.models.formats.weights import Weights, listed, open_weights
from longrecall.models.limits import check_numbers
from longrecall.models.sizes import PlainConfig
from longrecall.models.surgery_records import SURGERY_FILE, read_surgery
from longrecall.new_folder import NewFolder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from longrecall.models.config import RecurrentConfig
    from longrecall.models.recurrent_lm import RecurrentLM

DEFAULT_SHARD_BYTES = 1 << 30


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of any known format, seen as a native one. Tensors are read one at a time, never all together.

    Attributes:
        path: the local folder.
        source_format: "native", "fla_gla", ... (`longrecall.models.formats.FORMATS`).
        surgery: the records of surgery.json, oldest first; empty without surgery.
    """

    path: Path
    source_format: str
    surgery: list[dict[str, Any]]
    _raw: dict[str, Any]
    _layout: Layout
    _weights: Weights
    _match: Match

    @property
    def config(self) -> RecurrentConfig:
        """The native configuration."""
        return self._layout.config

    @property
    def plain(self) -> PlainConfig:
        """The same without transformers: all sizes."""
        return self._layout.plain

    @cached_property
    def origin(self) -> Origin | None:
        """The foreign checkpoint that this is, or was made of; None where it was native from the beginning.

        Raises:
            UserError: what a native checkpoint has kept of it is damaged.
        """
        if self.source_format == NATIVE:
            return read_origin(self.path / ORIGIN_FOLDER)
        return Origin(self.source_format, self._raw, self._match.spelt, self._match.travelling, self._weights)

    def names(self) -> list[str]:
        """Native tensor names in the order of the config."""
        return list(self._match.plan.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Native shape of a tensor."""
        return self._match.plan.shapes[self._known(name)]

    def dtype(self, name: str) -> torch.dtype:
        """Storage type of a tensor."""
        parts = self._match.plan.parts
        # A constant has no type of its own: it takes the one that most of the model has.
        return self._weights.dtype((parts[self._known(name)] or parts["model.embeddings.weight"])[0].name)

    def read(self, name: str) -> Tensor:
        """Return one tensor under its native name and shape, in its storage type, on the CPU, as a copy of the file.

        Raises:
            UserError: an unknown name, a damaged file, or a stored head that differs from the embedding it is tied to.
        """
        import torch

        mapped: list[Tensor] = []

        def read(names: list[str]) -> list[Tensor]:
            mapped.extend(self._weights.read(names))
            return mapped

        plan = self._match.plan
        tensor = plan.assemble(self._known(name), read).to(self.dtype(name))
        for copy in self._copies_of(name):
            if not torch.equal(self._weights.read([copy])[0], tensor):
                raise self._untied(copy, name)
        of_file = {whole.untyped_storage().data_ptr() for whole in mapped}
        if tensor.untyped_storage().data_ptr() in of_file:
            return tensor.clone(memory_format=torch.contiguous_format)
        return tensor.contiguous()

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` (dimension 0) of one tensor, otherwise as `read`.

        No other rows are read where the file has the tensor as it is. A tensor that is made of several of the file, or
        stored in another order, is made whole first.
        """
        import torch

        part = self._match.plan.piece(self._known(name))
        if part is None:
            return self.read(name)[start:stop].clone()
        own = part.start if part.of is not None else 0
        tensor = self._weights.read_rows(part.name, own + start, own + stop).to(self.dtype(name))
        for copy in self._copies_of(name):
            if not torch.equal(self._weights.read_rows(copy, start, stop), tensor):
                raise self._untied(copy, name)
        return tensor.clone(memory_format=torch.contiguous_format)

    def _copies_of(self, name: str) -> list[str]:
        """The tensors of the file that must equal this native one."""
        copies = self._layout.copies.items()
        return [copy for copy, original in copies if original == name and copy in self._match.spelt]

    def _untied(self, copy: str, name: str) -> UserError:
        return UserError(
            f'{self.path}: "{copy}" differs from "{self._match.plan.parts[name][0].name}", but config.json says they '
            "are tied; set tie_word_embeddings (tie_embeddings) to false"
        )

    def sha256(self) -> str:
        """SHA-256 (hex) of config.json and the weight files, names included, read in pieces."""
        digest = hashlib.sha256()
        for path in sorted([self.path / "config.json", *self._weights.files]):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def companion_files(self) -> list[Path]:
        """Files that belong beside the weights wherever they go: tokenizer, generation settings, licence."""
        found = {path for pattern in COMPANION_PATTERNS for path in self.path.glob(pattern) if path.is_file()}
        return sorted(found)

    def files(self) -> list[Path]:
        """Every file that the checkpoint consists of, whether its weights are read or not."""
        own = [self.path / "config.json", self.path / SURGERY_FILE, *self._weights.files, *self.companion_files()]
        own += (self.path / ORIGIN_FOLDER).glob("*")
        return sorted({path for path in own if path.is_file()})

    def _known(self, name: str) -> str:
        if name not in self._match.plan.shapes:
            raise UserError(f'{self.path} has no tensor "{name}".{did_you_mean(name, self.names())}')
        return name


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint folder (or hub id) without reading its tensors; every name, shape and type is checked.

    Args:
        path: a folder in native, fla, transformers mamba or mamba2, or mamba_ssm format, or `org/name` on the hub.

    Raises:
        UserError: no such folder; a config.json that is missing, damaged, or says something longrecall cannot
            reproduce; a weight file that is missing, truncated or no safetensors; a tensor that is missing, unknown, or
            of a wrong shape or type. The message names the file or the tensor.
    """
    folder = locate(path)
    read = read_layout(folder / "config.json")
    weights = open_weights(folder, read.form.allow_torch)
    found = match(folder, read.layout, weights)
    surgery = read_surgery(folder / SURGERY_FILE)
    return Checkpoint(folder, read.form.name, surgery, read.raw, read.layout, weights, found)


@dataclass(frozen=True)
class ReadConfig:
    """A config.json of any known format: as it is, its format, and what it says in native terms."""

    raw: dict[str, Any]
    form: Format
    layout: Layout


def read_layout(config: Path) -> ReadConfig:
    """Read a config.json; raises UserError as `open_checkpoint`, as far as that is about this file."""
    where, raw = str(config), read_json(config)
    form = detect(raw, where)
    refuse_quantised(raw, where)
    try:
        layout = form.layout(raw, where)
        check_numbers(layout.plain.tensor_shapes().values(), "the model")
        check_numbers([[layout.plain.state_size()]], "the state of a sequence")
    except UserError as error:
        raise error if str(error).startswith(where) else UserError(f"{where}: {error}") from None
    return ReadConfig(raw, form, layout)


def check_no_part(out: str | Path | None, path: str | Path, advice: str = ELSEWHERE) -> None:
    """Raise `UserError` when `out` is a file of the checkpoint at `path`: writing it would destroy that.

    A checkpoint that cannot be opened raises what `open_checkpoint` does, as far as `out` is there at all.
    """
    if out is not None and os.path.isfile(out):
        check_no_input(out, open_checkpoint(path).files(), advice)


class CheckpointWriter:
    """Write a native checkpoint tensor by tensor; `out` appears, complete and checked, at the end of the block.

    ::

        with CheckpointWriter("out", force=False) as writer:
            writer.set_config(config)
            for name in names:
                writer.add(name, tensor)
            writer.set_surgery(records)
            writer.set_origin(source.origin)
            writer.add_companions(source.companion_files())

    Everything goes into a hidden folder beside `out`, config.json last, and is renamed at the end; an exception removes
    it, and what a killed process has left there is removed by the next writer of `out`. One writer at a time: a second
    one is refused when the block begins. Memory: one shard.

    Args:
        out: the folder to make. A non-empty one is replaced, at the very end, only with `force`.
        force: allow that.
        max_shard_bytes: a new weight file starts before this size is passed; one larger tensor gets a file of its own.

    Raises:
        UserError: `out` is in the way, a link, inside another checkpoint, being written by another process, or cannot
            be written; the disk is full; or tensors do not fit the config.
    """

    def __init__(self, out: str | Path, force: bool = False, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        if max_shard_bytes < 1:
            raise UserError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
        self.max_shard_bytes = max_shard_bytes
        self._place = NewFolder(out, force)
        self._config: RecurrentConfig | None = None
        self._expected: dict[str, tuple[int, ...]] = {}
        self._surgery: list[dict[str, Any]] = []
        self._origin: Origin | None = None
        self._with_code = False
        self._dtypes: dict[str, torch.dtype] = {}

    def __enter__(self) -> Self:
        with disk_errors(self.out):
            self._place.open()
        # The place is known by its full name from here on.
        self._shards = ShardWriter(self.folder, self.max_shard_bytes, self.out)
        return self

    @property
    def out(self) -> Path:
        """The folder to make."""
        return self._place.out

    @property
    def folder(self) -> Path:
        """Where files are until the end; callers may write companions (a tokenizer) here."""
        return self._place.folder

    def set_config(self, config: RecurrentConfig) -> None:
        """Set the configuration of the model; must come before the first tensor."""
        self._config = config
        self._expected = config.tensor_shapes()

    def set_surgery(self, records: Sequence[dict[str, Any]]) -> None:
        """Set the surgery records, oldest first; an empty list writes no surgery.json."""
        self._surgery = list(records)

    def set_origin(self, origin: Origin | None) -> None:
        """Keep what there is of the foreign checkpoint that this one comes from; None = nothing."""
        self._origin = origin

    def bring_code(self) -> None:
        """Write code beside the weights by which transformers finds longrecall (`formats.remote_code`)."""
        self._with_code = True

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor (any device; it is copied). UserError unless the config has this name and shape, once."""
        if self._config is None:
            raise RuntimeError("set_config must come before add")
        if name not in self._expected:
            raise UserError(f'tensor "{name}" has no place in the config.{did_you_mean(name, self._expected)}')
        if tuple(tensor.shape) != self._expected[name]:
            wanted = list(self._expected[name])
            raise UserError(f'tensor "{name}" has shape {list(tensor.shape)}, the config asks for {wanted}')
        self._shards.add(name, tensor)
        self._dtypes[name] = tensor.dtype

    def set_elsewhere(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Write no weights, only what describes them: the caller puts them, of these types, into files beside it."""
        self._dtypes.update(dtypes)

    def add_companions(self, files: Iterable[Path]) -> None:
        """Copy files that belong beside the weights (`Checkpoint.companion_files`)."""
        with disk_errors(self.out):
            for path in files:
                shutil.copyfile(path, self.folder / path.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with disk_errors(self.out):
                    self._finish()
                    self._place.put()
        finally:
            self._place.close()

    def _finish(self) -> None:
        if self._config is None:
            raise RuntimeError("set_config was never called")
        missing = [name for name in self._expected if name not in self._dtypes]
        if missing:
            raise UserError(f"tensors of the config were never given: {listed(missing)}")
        self._shards.finish()
        if self._origin is not None:
            kept = ShardWriter(self.folder / ORIGIN_FOLDER, self.max_shard_bytes, self.out)
            self._origin.write(kept.folder, kept.add)
            kept.finish()
        dtype = self._dtypes["model.embeddings.weight"]
        if self._surgery:
            self._write(SURGERY_FILE, json.dumps(self._surgery, indent=2, default=str) + "\n")
        parameters = account(self._config).parameters
        short = str(dtype).removeprefix("torch.")
        card = model_card(self._config, parameters, short, self._surgery, with_code=self._with_code)
        self._write("README.md", card)
        stored = self._config.to_diff_dict() | {
            "architectures": ["RecurrentLM"],
            "dtype": short,
            "tie_word_embeddings": self._config.tie_word_embeddings,
        }
        if self._with_code:
            self._write(CODE_FILE, CODE)
            stored["auto_map"] = AUTO_MAP
        self._write("config.json", json.dumps(stored, indent=2, sort_keys=True) + "\n")

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")


def save(
    model: RecurrentLM,
    folder: str | Path,
    tokenizer: Any = None,
    surgery: Sequence[dict[str, Any]] | None = None,
    force: bool = False,
) -> None:
    """Write a model in memory as a native checkpoint.

    Args:
        model: its tensors keep their dtypes.
        folder: where to; see CheckpointWriter.
        tokenizer: anything with `save_pretrained(folder)`, stored beside the weights.
        surgery: records for surgery.json, oldest first.
        force: replace a non-empty folder.

    Raises:
        UserError: as CheckpointWriter; the model's weights are quantised.
    """
    from longrecall.models.quantising import check_not_quantised

    check_not_quantised(model, "saved")
    tensors = model.state_dict()
    with CheckpointWriter(folder, force=force) as writer:
        writer.set_config(model.config)
        for name in model.config.tensor_shapes():
            writer.add(name, tensors[name])
        writer.set_surgery(surgery or [])
        with disk_errors(writer.out):
            if tokenizer is not None:
                tokenizer.save_pretrained(str(writer.folder))
            if model.generation_config is not None:
                model.generation_config.save_pretrained(str(writer.folder))
