"""A bank of states: texts that were read once, each a file under its name, for questions at any time by any process.

The files are those of ``generate --save-state``. Each names the model it belongs to; another model refuses it.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longrecall.errors import UserError, did_you_mean
from longrecall.files import expand_home
from longrecall.models.captured_steps import addresses
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.outputs import claim_file

ENDING = ".safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
KEPT = 8
"""States of a bank that are kept in memory, those asked for last."""

ADVICE = "choose another name"

Reader = Callable[[list[int], RecurrentState | None], RecurrentState]
"""Tokens, and the state before them (None = none), to the state ``[1]`` after them."""


@dataclass(frozen=True)
class _Model:
    """What a state file asks of its model, without reading all weights for a fingerprint each time."""

    config: Any
    device: torch.device
    known: str

    def fingerprint(self) -> str:
        return self.known


class Bank:
    """A folder of states of one model. Several processes may share it: a file is written by one of them, as a whole."""

    def __init__(
        self, folder: str | Path, model: RecurrentLM, tokenizer: Any = None, read: Reader | None = None
    ) -> None:
        self.folder = expand_home(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"the bank {self.folder} is not a folder; name another one")
        self.tokenizer = tokenizer
        self._model, self._read = model, read
        self._known: _Model | None = None
        self._where: tuple[Any, ...] = ()
        self._kept: OrderedDict[tuple[Any, ...], RecurrentState] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """The texts that are there, sorted."""
        if not self.folder.is_dir():
            return []
        found = (path.name.removesuffix(ENDING) for path in self.folder.glob(f"*{ENDING}"))
        return sorted(name for name in found if NAME.fullmatch(name))

    def path(self, name: str) -> Path:
        """The file of a text, which need not be there.

        Raises:
            UserError: no text can have this name.
        """
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise UserError(
                f"{name!r} cannot name a text in a bank. A name has at most 100 letters, digits, dots, dashes and "
                "underscores, and begins with a letter or digit"
            )
        return self.folder / f"{name}{ENDING}"

    def add(self, name: str, text: str | Sequence[int], *, after: str | None = None, force: bool = False) -> Path:
        """Read a text (or its tokens) and keep the state under a name; the file that it is in.

        `after`: another text of the bank that comes before it. `force` replaces a text of that name.

        Raises:
            UserError: there is such a text already, another process is writing it, or the text has no token.
        """
        path = self.path(name)
        with claim_file(path, force=force, advice=ADVICE):
            start = None if after is None else self.state(after)
            tokens = self._tokens(text, start)
            state = self.read(tokens, start)
            state.save(path, self.fingerprint())
        return path

    def _tokens(self, text: str | Sequence[int], start: RecurrentState | None) -> list[int]:
        if isinstance(text, str):
            if self.tokenizer is None:
                raise UserError("the bank has no tokenizer: give token ids, not text")
            tokens = list(self.tokenizer.encode(text, add_special_tokens=start is None))
        else:
            tokens = [int(token) for token in text]
        if not tokens:
            raise UserError("there is nothing to read: the text has no token")
        if min(tokens) < 0 or max(tokens) >= self._model.config.vocab_size:
            raise UserError(f"token ids must be from 0 to {self._model.config.vocab_size - 1}")
        return tokens

    def read(self, tokens: list[int], start: RecurrentState | None) -> RecurrentState:
        """The state after these tokens."""
        if self._read is not None:
            return self._read(tokens, start)
        ids = torch.tensor([tokens], device=self._model.device)
        with torch.no_grad():
            out = self._model(ids, past_key_values=start, use_cache=True, logits_to_keep=1)
        return _finite(out.past_key_values, out.logits)

    def remove(self, name: str) -> None:
        """Forget a text.

        Raises:
            UserError: there is none of this name.
        """
        path = self._found(name)
        with claim_file(path, force=True, advice=ADVICE):
            path.unlink(missing_ok=True)

    def state(self, name: str) -> RecurrentState:
        """The state ``[1]`` after a text, on the model's device.

        Raises:
            UserError: there is none of this name, or its file is broken or of another model.
        """
        return self.found(name)[1]

    def found(self, name: str) -> tuple[tuple[Any, ...], RecurrentState]:
        """`key` and `state` of a text, of the same file: its name may be another text's at any moment."""
        path = self._found(name)
        key = self.key(name)
        with self._lock:
            owner = self._owner()
            found = self._kept.get(key)
            if found is None:
                found = RecurrentState.load(path, owner)
                if found.batch_size != 1:
                    raise UserError(f"{path} holds {found.batch_size} sequences, but a text in a bank is one sequence")
                self._kept[key] = found
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return key, found

    def key(self, name: str) -> tuple[Any, ...]:
        """What tells this text from one that had its name before."""
        with suppress(OSError):
            stat = os.stat(self.path(name))
            return name, stat.st_ino, stat.st_size, stat.st_mtime_ns
        return (name,)

    def _found(self, name: str) -> Path:
        path = self.path(name)
        if not path.is_file():
            raise UserError(
                f'the bank {self.folder} has no text "{name}".{did_you_mean(name, self.names())} '
                "Add it with bank.add or longrecall generate --save-state"
            )
        return path

    def fingerprint(self) -> str:
        """That of the model, computed once for the tensors that it has."""
        with self._lock:
            return self._owner().known

    def _owner(self) -> _Model:
        # Others may have been put in their place meanwhile, quantised ones, say. Only with the lock.
        where = addresses(self._model)
        if self._known is None or where != self._where:
            self._known, self._where = _Model(self._model.config, self._model.device, self._model.fingerprint()), where
            self._kept.clear()
        return self._known


def _finite(state: RecurrentState, logits: torch.Tensor) -> RecurrentState:
    if not bool(torch.isfinite(logits).all()):
        raise UserError(
            "after the text the model's logits are NaN or infinite, so its state was not kept. longrecall diagnose "
            "CKPT --text FILE says which layer breaks, and where"
        )
    return state
