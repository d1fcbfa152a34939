"""Rows of data sets: from local jsonl files always, from the hub where there is a network.

A broken row is an error that names file and line; with `skip_broken` that row alone is left out, and counted.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from longrecall.errors import UserError
from longrecall.installing import install_command

_R = TypeVar("_R")

Parse = Callable[[Mapping[str, Any]], _R]
"""Makes a row from a JSON object; raises `ValueError` with the reason when it cannot."""


@dataclass(frozen=True)
class Rows(Generic[_R]):
    """The good rows of one data set, in order; how many broken ones were left out; sha256 (hex) of the good ones."""

    rows: tuple[_R, ...]
    skipped: int
    sha256: str


def read_jsonl(path: str | Path, parse: Parse[_R], skip_broken: bool = False) -> Rows[_R]:
    """Return the rows of a UTF-8 file with one JSON object per line; empty lines are passed over.

    Raises `UserError` for a file that cannot be read or holds no good row, and for a broken row (unless `skip_broken`).
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the jsonl file {path}: {error.strerror or error}") from error
    # Bytes, split at line feeds alone: one line that is not UTF-8 leaves the others whole.
    lines = enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
    found = ((f"line {number}", line) for number, line in lines if line.strip())
    return collect_rows(str(path), found, lambda line: parse(parse_object(line)), skip_broken)


def read_hub(
    name: str,
    config: str | None,
    split: str,
    convert: Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]],
    parse: Parse[_R],
    skip_broken: bool = False,
) -> Rows[_R]:
    """Return the rows of a data set of the Hugging Face hub; `convert` makes JSON objects of one of its rows.

    Raises `UserError` when `datasets` is not installed, the data set cannot be opened, or as `read_jsonl` does.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"hub datasets need datasets; install it with: {install_command('datasets')}, or give local jsonl files"
        ) from None
    try:
        data = datasets.load_dataset(name, config, split=split, trust_remote_code=False)
    except Exception as error:  # the library raises many unrelated types for one cause: it is not there
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f'dataset "{name}" (split {split}) cannot be opened: {reason}; without a network give local jsonl files'
        ) from None

    def converted() -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
        for number, row in enumerate(data, start=1):
            place = f"row {number}"
            try:
                yield from ((place, lambda made=made: made) for made in list(convert(row)))
            except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
                yield place, _raising(f"it has not the expected fields ({type(error).__name__}: {error})")

    return collect_rows(f"{name} ({split})", converted(), lambda make: parse(make()), skip_broken)


def _raising(reason: str) -> Callable[[], Mapping[str, Any]]:
    def fail() -> Mapping[str, Any]:
        raise ValueError(reason)

    return fail


def parse_object(line: bytes) -> Mapping[str, Any]:
    """Return the JSON object of a line; `ValueError` with the reason when it is none."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte 0x{line[error.start]:02x} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def collect_rows(
    source: str, found: Iterable[tuple[str, Any]], parse: Callable[[Any], _R], skip_broken: bool
) -> Rows[_R]:
    """Return the good rows of `found`, pairs (place, what `parse` makes a row of); raises as `read_jsonl`."""
    rows: list[_R] = []
    broken: list[str] = []
    digest = hashlib.sha256()
    for place, raw in found:
        try:
            row = parse(raw)
        except ValueError as error:
            if not skip_broken:
                raise UserError(
                    f"{source}, {place}: {error}; mend the row, or leave out broken rows with skip_broken=true"
                ) from None
            broken.append(f"{place}: {error}")
            continue
        rows.append(row)
        plain = json.dumps(asdict(row), sort_keys=True, ensure_ascii=True)  # type: ignore[call-overload]
        digest.update(plain.encode() + b"\n")
    if not rows:
        found_broken = f"; the first of {len(broken)} broken ones is {broken[0]}" if broken else ""
        raise UserError(f"{source} holds no usable row{found_broken}")
    if broken:
        warnings.warn(f"{source}: left out {len(broken)} broken rows, the first: {broken[0]}", stacklevel=3)
    return Rows(tuple(rows), len(broken), digest.hexdigest())


def text_field(row: Mapping[str, Any], name: str, optional: bool = False) -> str:
    """Return a field that must hold text with more than white space; "" for a missing optional one."""
    value = row.get(name)
    if value is None and optional:
        return ""
    if value is None:
        raise ValueError(f'"{name}" is missing')
    if not isinstance(value, str):
        raise ValueError(f'"{name}" must be text, got {type(value).__name__}')
    if not value.strip() and not optional:
        raise ValueError(f'"{name}" is empty')
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f'"{name}" holds half of a surrogate pair, which no tokenizer can read') from None
    return value


def text_list(row: Mapping[str, Any], name: str, optional: bool = False) -> tuple[str, ...]:
    """Return a field that must hold a list of texts; () for a missing optional one."""
    value = row.get(name)
    if value is None and optional:
        return ()
    if value is None:
        raise ValueError(f'"{name}" is missing')
    if not isinstance(value, list) or (not value and not optional):
        raise ValueError(f'"{name}" must be a list with at least one text')
    return tuple(text_field({name: entry}, name) for entry in value)


def local_file(folder: str, name: str) -> Path:
    """Return ``folder/name``, or raise `UserError` that says which file is missing."""
    path = Path(folder) / name
    if not path.is_file():
        raise UserError(f"there is no file {path}; give the folder that holds {name}, or leave `data` out for the hub")
    return path
