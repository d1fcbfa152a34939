"""Weight files opened lazily: names, shapes and types at once, the tensors one by one."""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from safetensors import SafetensorError, safe_open

from longrecall.errors import UserError, first_line
from longrecall.models.formats.descriptions import check_header, read_json
from longrecall.models.formats.pieces import SHARDS_INDEX, ShardedWeights
from longrecall.models.formats.quantised import WAY_OUT
from longrecall.models.limits import DESCRIPTION_BYTES, SHARDS, TENSORS
from longrecall.units import format_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_FILE = "pytorch_model.bin"

_CALLS = frozenset({"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"})
"""How a pickle names what it calls."""

_TENSOR_CALLS = re.compile(r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch \w+Storage")
"""What a pickle of named tensors calls."""

_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The types that are read: safetensors' names -> torch's."""


class Weights(Protocol):
    """Read access to the tensors of a checkpoint, whatever the files are."""

    files: list[Path]

    def names(self) -> list[str]:
        """Return all tensor names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, without reading it."""

    def kind(self, name: str) -> str:
        """Return what the file calls the storage type of one tensor."""

    def check_type(self, name: str) -> None:
        """Raise `UserError` unless a tensor is stored as 16-, 32- or 64-bit floats."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the storage type of one tensor, without reading it; raises as `check_type`."""

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """Return the tensors, on the CPU. They may be backed by the file: callers that keep them copy them."""

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` (dimension 0) of one tensor as `read` would; no other rows are read."""


class SafetensorsWeights:
    """One safetensors file, or shards with an index.

    A file is mapped only while one of its tensors is read: pages of a mapping that stays open would pile up to the size
    of the model.

    Args:
        folder: where the files are.
        shards: file name -> the tensor names the index promises there, or None when there is no index.
    """

    def __init__(self, folder: Path, shards: dict[str, set[str] | None]) -> None:
        self.files = [folder / name for name in shards]
        self._file: dict[str, Path] = {}
        self._info: dict[str, tuple[tuple[int, ...], str]] = {}
        for path, promised in zip(self.files, shards.values(), strict=True):
            self._scan(path, promised)

    def _scan(self, path: Path, promised: set[str] | None) -> None:
        if not path.is_file():
            raise UserError(f"{path} does not exist, but the index names it; the checkpoint is incomplete")
        check_header(path)
        try:
            # Nothing is read: what the names would be read as does not matter, and numpy is imported faster than torch.
            with safe_open(str(path), framework="np", device="cpu") as handle:
                headers = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
                found = {name: (tuple(header.get_shape()), str(header.get_dtype())) for name, header in headers.items()}
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is truncated or not a safetensors file ({error})") from None
        for name in sorted(found.keys() & self._file.keys()):
            raise UserError(f'{path}: tensor "{name}" is already in {self._file[name].name}; the shards contradict')
        if promised is not None and promised != found.keys():
            name = min(promised ^ found.keys())
            problem = "is missing, but the index promises it" if name in promised else "is not in the index"
            raise UserError(f'{path}: tensor "{name}" {problem}')
        self._info.update(found)
        if len(self._info) > TENSORS:
            raise UserError(f"{path}: the checkpoint has more than {TENSORS} tensors; no model has")
        self._file.update(dict.fromkeys(found, path))

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, from the header."""
        return self._info[name][0]

    def kind(self, name: str) -> str:
        """Storage type of one tensor as safetensors calls it, such as BF16."""
        return self._info[name][1]

    def check_type(self, name: str) -> None:
        """UserError for integers and 8-bit formats."""
        if self.kind(name) not in _FLOATS:
            raise _not_read(self._file[name], name, self.kind(name), _FLOATS)

    def dtype(self, name: str) -> torch.dtype:
        """Storage type of one tensor, from the header; raises as `check_type`."""
        import torch

        self.check_type(name)
        return cast("torch.dtype", getattr(torch, _FLOATS[self._info[name][1]]))

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """Tensors, mapped from the files; each file is opened once."""
        found: dict[str, Tensor] = {}
        for path in dict.fromkeys(self._file[name] for name in names):
            wanted = [name for name in dict.fromkeys(names) if self._file[name] == path]
            try:
                with safe_open(str(path), framework="pt", device="cpu") as handle:
                    found |= {name: handle.get_tensor(name) for name in wanted}
            except (SafetensorError, OSError) as error:
                raise UserError(f'{path}: tensor "{wanted[0]}" cannot be read ({error})') from None
        return [found[name] for name in names]

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of one tensor."""
        path = self._file[name]
        try:
            with safe_open(str(path), framework="pt", device="cpu") as handle:
                return cast("Tensor", handle.get_slice(name)[start:stop])
        except (SafetensorError, OSError) as error:
            raise UserError(f'{path}: tensor "{name}" cannot be read ({error})') from None


def _not_read(path: Path, name: str, kind: str, read: Iterable[str]) -> UserError:
    return UserError(
        f'{path}: tensor "{name}" has type {kind}; longrecall reads only {", ".join(read)}. '
        f"If the weights are quantised, {WAY_OUT}"
    )


def _check_torch_file(path: Path) -> None:
    """Raise ValueError when reading a torch file could take more memory than the file has bytes.

    ``weights_only=True`` keeps code from running, but it lets a few bytes ask for an array of any size.
    """
    with zipfile.ZipFile(path) as archive:
        for part in archive.infolist():
            if part.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it has compressed parts, which torch never writes")
            if not part.filename.endswith("data.pkl"):
                continue
            if part.file_size > DESCRIPTION_BYTES:
                raise ValueError(f"its list of tensors is larger than {format_bytes(DESCRIPTION_BYTES)}")
            for code, argument, _ in pickletools.genops(archive.read(part)):
                if code.name in _CALLS and not _TENSOR_CALLS.fullmatch(str(argument)):
                    raise ValueError(f"it calls {argument or code.name}")


class TorchWeights:
    """A `pytorch_model.bin` in torch's zip format, memory-mapped, unpickled with ``weights_only=True``."""

    def __init__(self, path: Path) -> None:
        import torch

        self.files = [path]
        try:
            _check_torch_file(path)
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises half a dozen unrelated types on a bad or dangerous file
            reason = first_line(error)
            raise UserError(
                f"{path} is truncated, not a torch zip file, or holds more than plain tensors ({reason}); "
                "convert it to safetensors where you trust it"
            ) from None
        if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
            raise UserError(f"{path} must hold one dictionary of named tensors, not {type(loaded).__name__}")
        for name, value in loaded.items():
            if not isinstance(value, torch.Tensor):
                raise UserError(f'{path}: "{name}" is a {type(value).__name__}, not a tensor')
        self._tensors: dict[str, Tensor] = dict(loaded)

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return tuple(self._tensors[name].shape)

    def kind(self, name: str) -> str:
        """Storage type of one tensor as torch calls it, such as bfloat16."""
        return str(self._tensors[name].dtype).removeprefix("torch.")

    def check_type(self, name: str) -> None:
        """UserError for integers and 8-bit formats."""
        if self.kind(name) not in _FLOATS.values():
            raise _not_read(self.files[0], name, self.kind(name), _FLOATS.values())

    def dtype(self, name: str) -> torch.dtype:
        """Storage type of one tensor; raises as `check_type`."""
        self.check_type(name)
        return self._tensors[name].dtype

    def read(self, names: Sequence[str]) -> list[Tensor]:
        """Tensors, mapped from the file."""
        return [self._tensors[name] for name in names]

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of one tensor, mapped from the file."""
        return self._tensors[name][start:stop]


def _read_index(path: Path) -> dict[str, set[str] | None]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f'{path} has no "weight_map" of tensor names to file names')
    shards: dict[str, set[str] | None] = {}
    for name, file in weight_map.items():
        # A shard outside the folder would let a downloaded index point anywhere on the disk.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f'{path}: tensor "{name}" is placed in {file!r}; a shard is a .safetensors file beside it')
        names = shards.setdefault(file, set())
        if names is not None:
            names.add(name)
    if len(shards) > SHARDS:
        raise UserError(f"{path} names {len(shards)} weight files; longrecall reads at most {SHARDS}")
    return dict(sorted(shards.items()))


def has_weights(folder: Path) -> bool:
    """Whether a folder has a weight file of any kind that `open_weights` knows, damaged or not."""
    return any((folder / file).exists() for file in (SAFETENSORS_INDEX, SAFETENSORS_FILE, TORCH_FILE, SHARDS_INDEX))


def open_weights(folder: Path, allow_torch: bool = False) -> Weights:
    """Open the weight files of a checkpoint folder.

    Args:
        folder: a local folder.
        allow_torch: whether the format may also be stored as `pytorch_model.bin`.

    Raises:
        UserError: no weight file, a missing shard, a truncated or foreign file, contradicting names.
    """
    if (folder / SAFETENSORS_INDEX).is_file():
        return SafetensorsWeights(folder, _read_index(folder / SAFETENSORS_INDEX))
    if (folder / SAFETENSORS_FILE).is_file():
        return SafetensorsWeights(folder, {SAFETENSORS_FILE: None})
    if (folder / SHARDS_INDEX).is_file():
        return ShardedWeights(folder)
    if (folder / TORCH_FILE).is_file():
        if allow_torch:
            return TorchWeights(folder / TORCH_FILE)
        raise UserError(f"{folder} has only {TORCH_FILE}; for this format longrecall reads safetensors, never pickle")
    raise UserError(f"{folder} has no weights: neither {SAFETENSORS_FILE} nor {SAFETENSORS_INDEX}")


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return the first names in quotes and how many more there are, for one-line messages."""
    ordered = sorted(names)
    shown = ", ".join(f'"{name}"' for name in ordered[:most])
    return shown + (f" and {len(ordered) - most} more" if len(ordered) > most else "")
