"""A folder that appears whole or not at all: written under a hidden name beside its place, then renamed."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path

from longrecall.errors import UserError
from longrecall.files import check_replaceable, expand_home
from longrecall.outputs import claim_new_folder, refuse_busy

_PARTIAL, _REPLACED = ".partial-", ".replaced-"
"""Within the hidden names: of the new folder, until it is whole; of the old one, until the new one stands."""
_ELSEWHERE = "choose another folder"


class NewFolder:
    """The folder `out` while it is being made, by one process at a time; a non-empty one is replaced only with `force`.

    `open`, then write into `folder`, then `put` it in place; `close` in any case. What a killed process has left beside
    `out` is removed by the next one that opens it.
    """

    def __init__(self, out: str | Path, force: bool) -> None:
        self.out = expand_home(out)
        self.force = force
        self._claim = ExitStack()
        self._token = secrets.token_hex(4)

    @property
    def folder(self) -> Path:
        """Where files are until the end."""
        return self._beside(_PARTIAL)

    def open(self) -> None:
        """Claim the place and make the hidden folder.

        Raises:
            UserError: something is in the way, or another process is writing there.
            OSError: the place is a link or cannot be written.
        """
        with ExitStack() as claim:
            self.out = claim.enter_context(claim_new_folder(self.out, _ELSEWHERE))
            clear_remains(self.out)
            self._refuse_occupied()
            self.folder.mkdir()
            self._claim = claim.pop_all()

    def put(self) -> None:
        """Put the finished folder in place; the old one goes only when the new one stands. Raises as `open`."""
        if not self.out.exists():
            self.folder.rename(self.out)
            return
        self._refuse_occupied()
        old = self._beside(_REPLACED)
        self.out.rename(old)
        try:
            self.folder.rename(self.out)
        except OSError:
            old.rename(self.out)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Remove the hidden folder, if it has not been put in place, and let others write."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._claim.close()

    def _beside(self, mark: str) -> Path:
        return self.out.with_name(f".{self.out.name}{mark}{self._token}")

    def _refuse_occupied(self) -> None:
        if self.out.is_dir():
            refuse_busy(self.out, _ELSEWHERE)
            if any(self.out.iterdir()):
                if not self.force:
                    raise UserError(f"{self.out} is not empty; {_ELSEWHERE} or use --force to replace it")
                check_replaceable(self.out)
        elif self.out.exists():
            raise UserError(f"{self.out} is a file; a checkpoint is written as a folder")


def clear_remains(out: Path) -> None:
    """Remove what killed writers of the folder `out` have left; only for its one writer.

    A folder that was just being replaced, and has only its hidden name, gets its own name back.
    """
    pattern = re.compile(re.escape(f".{out.name}") + f"({_PARTIAL}|{_REPLACED})[0-9a-f]{{8}}")
    remains = [place for place in out.parent.iterdir() if pattern.fullmatch(place.name)]
    for place in sorted(remains, key=lambda place: _REPLACED not in place.name):
        if _REPLACED in place.name and not os.path.lexists(out):
            place.rename(out)
        else:
            shutil.rmtree(place, ignore_errors=True)
