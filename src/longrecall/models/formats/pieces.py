"""Tensors that several processes have written, each its own pieces of them: read one at a time, or a part of one.

``shards.json`` beside the files says where every piece is::

    {"schema": 1, "files": ["shard-00000-000.safetensors", ...],
     "tensors": {"model/lm_head.weight": {"dtype": "float32", "shape": [256, 64],
                                          "pieces": [[0, [0, 0], [128, 64]], [1, [128, 0], [128, 64]]]}}}

A piece is the number of its file, the place of its first number in the whole tensor, and its shape. In the file it is
called ``NAME@OFFSETS`` (``model/lm_head.weight@128,0``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from longrecall.errors import UserError, did_you_mean
from longrecall.models.formats.descriptions import check_header, read_json
from longrecall.models.limits import SHARDS, TENSORS, check_numbers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHARDS_INDEX = "shards.json"
MODEL = "model/"
"""How the names of the weights begin; the others belong to training."""

_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""The types of safetensors as torch calls them."""

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A part of a tensor: its file, its name there, the place of its first number in the whole tensor, its shape."""

    file: Path
    key: str
    offset: Numbers
    shape: Numbers


@dataclass(frozen=True)
class Stored:
    """A tensor: its type as torch calls it, its shape, and its pieces, which overlap nowhere."""

    dtype: str
    shape: Numbers
    pieces: tuple[Piece, ...]


def piece_key(name: str, offset: Iterable[int]) -> str:
    """Return what the piece of a tensor that begins at `offset` is called in its file."""
    return f"{name}@{','.join(map(str, offset))}"


class StoredTensors:
    """Tensors in safetensors files, whole or in pieces, of which only what is asked for is read.

    A file is mapped only while something of it is read.
    """

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self._tensors = dict(tensors)

    @classmethod
    def of_files(cls, files: Mapping[str, Path]) -> StoredTensors:
        """Open files with whole tensors; the names of those of a file begin with its key in `files`.

        Raises:
            UserError: a file cannot be read.
        """
        found: dict[str, Stored] = {}
        for prefix, path in files.items():
            for key, (dtype, shape) in _headers(path).items():
                piece = Piece(path, key, (0,) * len(shape), shape)
                found[prefix + key] = Stored(dtype, shape, (piece,))
        return cls(found)

    @classmethod
    def of_shards(cls, folder: Path) -> StoredTensors:
        """Open what several processes have written into `folder`.

        Raises:
            UserError: the index or a file is missing or damaged, or they contradict each other.
        """
        index = folder / SHARDS_INDEX
        data = read_json(index)
        try:
            files = [_beside(folder, name) for name in data["files"]]
            tensors = {str(name): _stored(name, entry, files) for name, entry in data["tensors"].items()}
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise UserError(f"{index} is damaged: {error}") from None
        if len(files) > SHARDS or len(tensors) > TENSORS:
            raise UserError(f"{index} names {len(tensors)} tensors in {len(files)} files; no run has so many")
        headers = {path: _headers(path) for path in files}
        for name, stored in tensors.items():
            check_numbers([stored.shape], f'tensor "{name}" of {index}')
            if sum(math.prod(piece.shape) for piece in stored.pieces) != math.prod(stored.shape):
                raise UserError(f'{index}: the pieces of tensor "{name}" do not make up {list(stored.shape)}')
            for piece in stored.pieces:
                if headers[piece.file].get(piece.key) != (stored.dtype, piece.shape):
                    raise UserError(f'{piece.file} does not hold "{piece.key}" as {index.name} describes it')
        return cls(tensors)

    def within(self, prefix: str) -> StoredTensors:
        """Return the tensors whose names begin with `prefix`, without it in their names."""
        return StoredTensors({n.removeprefix(prefix): t for n, t in self._tensors.items() if n.startswith(prefix)})

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        return sorted({piece.file for stored in self._tensors.values() for piece in stored.pieces})

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._tensors)

    def __getitem__(self, name: str) -> Stored:
        if name not in self._tensors:
            raise UserError(f'there is no tensor "{name}".{did_you_mean(name, self._tensors)}')
        return self._tensors[name]

    def dtype(self, name: str) -> torch.dtype:
        """Type of one tensor."""
        import torch

        dtype: torch.dtype = getattr(torch, self[name].dtype)
        return dtype

    def read(self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """Return a tensor, or the part of it that begins at `offset` and has this shape, as a copy on the CPU.

        Raises:
            UserError: an unknown name, or a file that cannot be read.
        """
        import torch

        stored = self[name]
        offset = tuple(offset) if offset is not None else (0,) * len(stored.shape)
        shape = tuple(shape) if shape is not None else stored.shape
        out = torch.empty(shape, dtype=self.dtype(name))
        for piece in stored.pieces:
            starts = [max(a, b) for a, b in zip(offset, piece.offset, strict=True)]
            spans = zip(offset, shape, piece.offset, piece.shape, strict=True)
            ends = [min(a + wanted, b + there) for a, wanted, b, there in spans]
            if all(start < end for start, end in zip(starts, ends, strict=True)):
                inside = tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, piece.offset, strict=True))
                place = tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, offset, strict=True))
                out[place] = _part(piece, inside)
        return out


class ShardedWeights:
    """The weights among `StoredTensors`, for whoever reads checkpoints (`formats.weights.Weights`)."""

    def __init__(self, folder: Path) -> None:
        self._stored = StoredTensors.of_shards(folder).within(MODEL)
        self.files = self._stored.files

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return self._stored.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._stored[name].shape

    def kind(self, name: str) -> str:
        """Storage type of one tensor as torch calls it, such as bfloat16."""
        return self._stored[name].dtype

    def check_type(self, name: str) -> None:
        """UserError for integers and 8-bit formats."""
        if not self._stored.dtype(name).is_floating_point:
            raise UserError(f'{self.files[0].parent}: tensor "{name}" has type {self.kind(name)}, which no weight has')

    def dtype(self, name: str) -> torch.dtype:
        """Storage type of one tensor; raises as `check_type`."""
        self.check_type(name)
        return self._stored.dtype(name)

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """Whole tensors, put together from their pieces."""
        return [self._stored.read(name) for name in names]

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of one tensor; of its pieces those are read that hold them."""
        rest = self.shape(name)[1:]
        return self._stored.read(name, (start, *[0] * len(rest)), (stop - start, *rest))


def _part(piece: Piece, inside: tuple[slice, ...]) -> Tensor:
    try:
        with safe_open(str(piece.file), framework="pt", device="cpu") as handle:
            part: Tensor = handle.get_slice(piece.key)[inside] if inside else handle.get_tensor(piece.key)
            return part
    except (SafetensorError, OSError) as error:
        raise UserError(f'{piece.file}: "{piece.key}" cannot be read ({error})') from None


def _headers(path: Path) -> dict[str, tuple[str, Numbers]]:
    """Type and shape of every tensor of a file."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; the checkpoint is incomplete")
    check_header(path)
    try:
        with safe_open(str(path), framework="np", device="cpu") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
            found = {name: (str(part.get_dtype()), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is truncated or not a safetensors file ({error})") from None
    return {name: (_TYPES.get(dtype, dtype), shape) for name, (dtype, shape) in found.items()}


def _stored(name: str, entry: Mapping[str, Any], files: Sequence[Path]) -> Stored:
    dtype, shape = entry["dtype"], _numbers(entry["shape"])
    if dtype not in _TYPES.values():
        raise ValueError(f'tensor "{name}" has the unknown type {dtype}')
    pieces = []
    for file, first, size in entry["pieces"]:
        offset, part = _numbers(first), _numbers(size)
        if not 0 <= file < len(files) or not len(offset) == len(part) == len(shape):
            raise ValueError(f'a piece of tensor "{name}" has no place')
        if any(o + n > whole for o, n, whole in zip(offset, part, shape, strict=True)):
            raise ValueError(f'a piece of tensor "{name}" is outside of it')
        pieces.append(Piece(files[file], piece_key(name, offset), offset, part))
    return Stored(dtype, shape, tuple(pieces))


def _numbers(values: Sequence[int]) -> Numbers:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values} are no sizes")
    return tuple(values)


def _beside(folder: Path, name: str) -> Path:
    # A file outside the folder would let somebody's index point anywhere on the disk.
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise ValueError(f"{name!r} is not a .safetensors file beside it")
    return folder / name
