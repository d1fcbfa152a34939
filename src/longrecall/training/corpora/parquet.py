"""Parquet files, read row group by row group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from longrecall.errors import UserError
from longrecall.installing import install_command
from longrecall.training.corpora.base import is_empty

_ROWS = 64
"""Rows that are unpacked at once."""
_BUFFER = 1 << 20
"""Bytes of a column that are read from the file at once; without it a whole row group of it would be."""
_THREADS = 16
"""Footers are read side by side: there may be thousands, on a disk far away."""


class ParquetCorpus:
    """Parquet files; a chunk is a row group, of which only `column` is read, a few rows at a time. Needs pyarrow.

    Raises:
        UserError: pyarrow is missing, a file is no whole parquet file, has no rows or no text column of this name.
    """

    streamed = False

    def __init__(self, files: Sequence[Path], column: str) -> None:
        try:
            import pyarrow.parquet  # noqa: F401 (asked for before the run begins)
        except ImportError:
            raise UserError(f"parquet needs pyarrow; install it with: {install_command('pyarrow')}") from None
        self._files, self._column = list(files), column
        with ThreadPoolExecutor(_THREADS) as pool:
            groups = list(pool.map(lambda path: _rows_of_groups(path, column), files))
        spans = [(file, group, rows) for file, sizes in enumerate(groups) for group, rows in enumerate(sizes) if rows]
        self._spans = np.array(spans, dtype=np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._spans)

    def size(self, chunk: int) -> int:
        """Return the number of rows."""
        return int(self._spans[chunk][2])

    def read(self, chunk: int, start: int | None = None, part: int = 0, parts: int = 1) -> Iterator[tuple[int, str]]:
        """Give the non-empty documents of one row group; a place is the number of a row in it."""
        import pyarrow

        file, group, rows = (int(value) for value in self._spans[chunk])
        number, start = 0, start or 0
        try:
            opened = _open(self._files[file])
            for batch in opened.iter_batches(_ROWS, row_groups=[group], columns=[self._column], use_threads=False):
                if number + len(batch) > start:
                    for place, value in enumerate(batch.column(0).to_pylist(), start=number):
                        if value and place >= start and place % parts == part:
                            yield place, value
                number += len(batch)
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"{self.describe(chunk)} cannot be read after row {number}: {reason}; it is damaged, get it again"
            ) from None
        if number != rows:
            raise UserError(f"{self.describe(chunk)} has {number} rows, not {rows}; the file has changed or is damaged")

    def describe(self, chunk: int) -> str:
        file, group, _ = self._spans[chunk]
        return f"{self._files[file]} row group {group}"

    def amount(self) -> list[int]:
        return [len(self._files), len(self._spans), int(self._spans[:, 2].sum())]


def _open(path: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)


def _rows_of_groups(path: Path, column: str) -> list[int]:
    """Return the rows of every row group of a file that has been checked."""
    import pyarrow

    try:
        with _open(path) as opened:
            schema, metadata = opened.schema_arrow, opened.metadata
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a whole parquet file: {str(error).splitlines()[0]}") from None
    if column not in schema.names:
        raise UserError(f'{path} has no column "{column}"; it has {", ".join(schema.names)}')
    kind = schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f'{path}: column "{column}" holds {kind}, not text')
    if not metadata.num_rows:
        raise is_empty(path)
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
