"""How much is read at once: what fits, known before the work where it can be, and less when memory runs out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from longrecall.errors import UserError, ran_out_of_memory
from longrecall.models.accounting import key_value_cache_size
from longrecall.models.config import RecurrentConfig
from longrecall.models.limits import machine_memory
from longrecall.units import format_length

_T = TypeVar("_T")
_R = TypeVar("_R")

ALONE = 1024
"""Columns at once of a sequence that is read alone: always as many, so that it is always the same computation."""
_SMALLEST = 32
# Logits of one segment, and states of one batch, in float32: 2**28 numbers are 1 GiB.
_BUDGET = 2**28
# Tokens, labels and one copy of both, in int64: what a sample takes while it is made.
_SAMPLE_BYTES = 32


class Room:
    """Limits of a batch; they shrink when memory runs out and stay small.

    `batch_tokens`: tokens that one forward pass reads at most (but a whole row of `segment_tokens`); `alone_tokens`:
    columns of a sequence that is read alone.
    """

    def __init__(self, model: Any, batch_tokens: int, segment_tokens: int) -> None:
        self.batch_tokens = max(1, min(batch_tokens, _BUDGET // int(model.config.vocab_size)))
        self.segment_tokens = min(segment_tokens, self.batch_tokens)
        self.alone_tokens = ALONE
        self._state = int(model.state_size()) if hasattr(model, "state_size") else 0
        self._config = model.config

    def rows(self, longest: int, context: int, rows_each: int = 1) -> int:
        """Return how many sequences fit, at least one.

        `longest`: tokens to read of the longest; `context`: tokens it has read in the end, which attention layers keep;
        `rows_each`: rows of a batch that a sequence takes.
        """
        state = self._state + _kept_numbers(self._config, context)
        by_state = _BUDGET // max(1, state)
        by_tokens = self.batch_tokens // max(1, min(longest, self.segment_tokens))
        return max(1, min(by_tokens, by_state) // rows_each)

    def run(self, items: list[_T], read: Callable[[list[_T]], list[_R]], each: int) -> list[_R]:
        """Return ``read(items)``, read in parts that fit; after memory has run out, in smaller ones.

        `each`: tokens to read of the longest item, over all its rows. Raises `UserError` when one item in the shortest
        segments does not fit.
        """
        done: list[_R] = []
        while len(done) < len(items):
            rows = max(1, self.batch_tokens // max(1, min(each, self.segment_tokens)))
            part = items[len(done) : len(done) + rows]
            found = self._try(part, read)
            if found is not None:
                done += found
            elif len(part) > 1:
                self.batch_tokens = max(1, len(part) // 2 * min(each, self.segment_tokens))
                _say(f"out of memory with {len(part)} sequences at once; going on with half as many")
            else:
                self._shorten(each)
        return done

    def _try(self, items: list[_T], read: Callable[[list[_T]], list[_R]]) -> list[_R] | None:
        """Return ``read(items)``, or None when memory runs out."""
        try:
            return read(items)
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
        # Out of the handler: until here the traceback has kept what was read alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def _shorten(self, each: int) -> None:
        shorter = min(self.alone_tokens, self.segment_tokens) // 2
        while shorter >= each > _SMALLEST:
            shorter //= 2
        if shorter < _SMALLEST:
            raise UserError(
                f"out of memory with a single sequence, read in segments of {2 * shorter} tokens; "
                "use shorter --lengths, --dtype bfloat16 or another --device"
            )
        self.alone_tokens = self.segment_tokens = shorter
        self.batch_tokens = min(self.batch_tokens, shorter)
        _say(f"out of memory with a single sequence; going on in segments of {shorter} tokens")


def _say(line: str) -> None:
    tqdm.write(f"longrecall eval: {line}", file=sys.stderr)


def _kept_numbers(config: Any, context: int) -> int:
    return key_value_cache_size(config, context) if isinstance(config, RecurrentConfig) else 0


def check_fits(model: Any, task: str, cell: Mapping[str, Any]) -> None:
    """Raise `UserError` when a sequence of a cell cannot fit into this machine, whatever the batch.

    Counted is what is known for sure: the tokens of a sample, and the keys and values of attention layers.
    """
    tokens = next((int(cell[key]) for key in ("length", "end", "distance") if isinstance(cell.get(key), int)), 0)
    here = f"{task}: length {format_length(tokens)}"
    memory = machine_memory()
    if memory is not None and tokens * _SAMPLE_BYTES > memory:
        _refuse(f"{here} takes", tokens * _SAMPLE_BYTES, memory, "for its tokens alone", "this machine")
    kept = _kept_numbers(model.config, tokens)
    if not kept:
        return
    size = kept * torch.empty((), dtype=model.dtype).element_size()
    device = torch.device(model.device)
    if device.type == "cuda":
        memory = int(torch.cuda.get_device_properties(device).total_memory)
    if memory is not None and size > memory:
        _refuse(f"{here} takes", size, memory, "for the keys and values of attention layers", str(device))


def _refuse(what: str, needed: int, memory: int, why: str, where: str) -> None:
    raise UserError(
        f"{what} {needed / 2**30:.1f} GiB {why}, but {where} has {memory / 2**30:.1f} GiB; use shorter --lengths"
    )
