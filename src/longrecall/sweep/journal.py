"""The rows of a sweep on disk: each as soon as its run has ended, so that a killed sweep loses only what still ran.

A journal lies beside the result file as ``<output>.partial``: a line that says what it is, then a row a line, those of
earlier calls first. It is deleted when the result file, which holds all rows, is written; where there is a journal, the
result file beside it is an older one and does not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from longrecall.errors import UserError
from longrecall.files import write_json
from longrecall.json_lines import JsonLines, read_json_lines

SCHEMA = 1
KIND = "sweep"
PARTIAL = "partial sweep"
ADVICE = "choose another run.output"

Row = dict[str, Any]


def shard_path(output: str | Path, shard: tuple[int, int] | None) -> Path:
    """Return where a shard writes: ``name.2of4.json`` beside ``name.json``; the file itself without a shard."""
    path = Path(output)
    return path if shard is None else path.with_name(f"{path.stem}.{shard[0]}of{shard[1]}{path.suffix}")


class Journal:
    """The rows of one process, which has claimed the result file (`outputs`); nothing is written before `start`.

    `done`: key -> row of what earlier calls finished, when resuming: of this file, of its journal, and of the other
    files of the same sweep (a shard reads the whole file, the whole sweep reads its shards).

    Raises:
        UserError: a file to be resumed that is damaged or no sweep's.
    """

    def __init__(self, output: str | Path, shard: tuple[int, int] | None, resume: bool) -> None:
        self.path = shard_path(output, shard)
        self._partial = self.path.with_name(f"{self.path.name}.partial")
        self._lines = JsonLines(self._partial, ADVICE)
        self._resume = resume
        self.done: dict[str, Row] = {}
        self.own: dict[str, None] = {}
        """Keys of the rows in this process's own files."""
        if resume:
            whole = Path(output)
            others = [whole] if shard else _shards(whole)
            for path in [*others, self.path]:
                partial = path.with_name(f"{path.name}.partial")
                for row in _read_journal(partial)[0] if partial.exists() else read_rows(path):
                    self.done[row["key"]] = row
                    if path == self.path:
                        self.own[row["key"]] = None

    def start(self) -> None:
        """Begin to write; what is not to be resumed is deleted."""
        whole = _read_journal(self._partial)[1] if self._resume else 0
        if whole:
            self._lines.open(whole)
        else:
            # From now on the result file beside it does not count, so its rows must be here.
            self._lines.begin([{"schema": SCHEMA, "kind": PARTIAL}, *(self.done[key] for key in self.own)])

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep the row of a run; it is on the disk when this returns."""
        self._lines.write([row])

    def close(self) -> None:
        """Stop writing; the journal stays."""
        self._lines.close()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result file, with every row in it, and delete the journal."""
        self.close()
        write_json(self.path, result, ADVICE)
        self._partial.unlink(missing_ok=True)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a sweep's result file, none when there is no such file; UserError when it is another's."""
    if not path.exists():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot resume {path}: {error}; start over with --force") from error
    if not isinstance(data, dict) or data.get("kind") != KIND or data.get("schema") != SCHEMA:
        raise UserError(f"cannot resume {path}: it is not a result file of sweep; {ADVICE}")
    return _checked(data.get("rows"), path)


def _read_journal(path: Path) -> tuple[list[Row], int]:
    """Return (rows, bytes of whole lines)."""
    rows: list[Row] = []
    if not path.exists():
        return rows, 0

    def take(number: int, data: Any) -> None:
        if number > 1:
            rows.extend(_checked([data], path))
        elif not isinstance(data, dict) or data.get("kind") != PARTIAL or data.get("schema") != SCHEMA:
            raise ValueError("it is not a journal of sweep")

    return rows, read_json_lines(path, take)


def _checked(rows: Any, path: Path) -> list[Row]:
    if not isinstance(rows, list):
        raise UserError(f'cannot resume {path}: it has no list of "rows"; start over with --force')
    for row in rows:
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("key", "status")):
            raise UserError(f"cannot resume {path}: a row has no key or no status; start over with --force")
    return rows


def _shards(path: Path) -> list[Path]:
    """Return the result files of shards of `path`, also those of which there is only a journal yet."""
    name = re.compile(rf"({re.escape(path.stem)}\.[0-9]+of[0-9]+{re.escape(path.suffix)})(\.partial)?")
    found: Iterable[str] = (match[1] for entry in path.parent.iterdir() if (match := name.fullmatch(entry.name)))
    return [path.with_name(entry) for entry in sorted(set(found))]
