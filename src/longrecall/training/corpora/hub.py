"""A `datasets` dataset, streamed by its own shards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from longrecall.errors import UserError
from longrecall.installing import install_command


class HubCorpus:
    """A streamed dataset of the `datasets` library; a chunk is one of its shards (a file, mostly). Needs datasets.

    A place is the number of a document in its shard, and the library's own state (`state_dict`) before it.

    Raises:
        UserError: datasets is missing, there is no such dataset or split, or (when read) no text column of this name.
    """

    streamed = True

    def __init__(self, name: str, config: str | None, split: str, column: str) -> None:
        try:
            import datasets
        except ImportError:
            raise UserError(f"hub datasets need datasets; install it with: {install_command('datasets')}") from None
        self._name, self._split, self._column = name, split, column
        try:
            self._data: Any = datasets.load_dataset(name, config, split=split, streaming=True, trust_remote_code=False)
            self._shards = int(self._data.num_shards)
        except Exception as error:  # the library raises many unrelated types for one cause: it is not there
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f'dataset "{name}" (split {split}) cannot be opened: {reason}') from None

    def __len__(self) -> int:
        return self._shards

    def size(self, chunk: int) -> int:
        raise RuntimeError("how many documents a stream has shows at its end")

    def read(
        self, chunk: int, start: list[Any] | None = None, part: int = 0, parts: int = 1
    ) -> Iterator[tuple[list[Any], str]]:
        """Give the documents of one shard, in stored order."""
        number = 0
        try:
            shard = self._data.shard(num_shards=self._shards, index=chunk)
            if start is not None:
                number = start[0]
                shard.load_state_dict(copy.deepcopy(start[1]))
            rows = iter(shard)
            while True:
                # The state before a document leads to it again; only that of an own document is worth a copy.
                state = copy.deepcopy(shard.state_dict()) if number % parts == part else None
                row = next(rows, None)
                if row is None:
                    break
                text = row.get(self._column)
                if not isinstance(text, str):
                    has = ", ".join(row)
                    raise UserError(f'dataset "{self._name}" has no text column "{self._column}"; it has {has}')
                if text and state is not None:
                    yield [number, state], text
                number += 1
        except UserError:
            raise
        except Exception as error:  # whatever its readers and the network raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{self.describe(chunk)} cannot be read after document {number}: {reason}") from None
        if not number:
            raise UserError(f"{self.describe(chunk)} is empty; choose another split")

    def describe(self, chunk: int) -> str:
        return f'dataset "{self._name}" (split {self._split}) shard {chunk + 1} of {self._shards}'

    def amount(self) -> list[int]:
        return [self._shards]
