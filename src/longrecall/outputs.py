"""Where results may go, for every verb: claimed by one writer at a time, never over what is there without a word.

The rule: a result replaces nothing without ``--force``, goes through no link, and into no checkpoint's folder. Each
verb claims its output before its work begins, so that nothing is computed in vain, and holds it until the end.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from longrecall.errors import UserError
from longrecall.files import ELSEWHERE, cannot_write, check_writable, place_of, refuse_links, remove_temporary
from longrecall.locks import LOCK_FILE, hold, lock_file_in, lock_file_of

JOURNALS = r"\.partial(\.[0-9]+)?"
"""What follows the name of a result file in those of its journals: ``<path>.partial``, ``<path>.partial.<number>``."""


@contextlib.contextmanager
def claim_file(
    path: str | Path | None,
    *,
    force: bool = False,
    resume: bool | None = None,
    unfinished: str = JOURNALS,
    advice: str = ELSEWHERE,
) -> Iterator[None]:
    """Be the only writer of the file `path` inside the block; None claims nothing.

    Claims may be nested in one thread: a function claims what its caller has claimed already.

    Args:
        path: a result file.
        force: it, and unfinished work, may be replaced. This only allows it: the caller replaces.
        resume: the caller goes on with what is there; None for a verb that cannot.
        unfinished: what the verb's unfinished work is called, if it can resume; see `unfinished_work`.
        advice: end of every line that refuses.

    Raises:
        UserError: another process is writing it (the line names the process); it exists; it has unfinished work; it is
            a link, a folder, a device, or lies in a checkpoint's folder; it cannot be written; `force` with `resume`.
    """
    if path is None:
        yield
        return
    if force and resume:
        raise UserError("--force starts over and --resume continues; give one of them")
    path = Path(path)
    with contextlib.ExitStack() as claim:
        try:
            place = place_of(path)
            _refuse_checkpoints(path, place.parent, advice)
            place.parent.mkdir(parents=True, exist_ok=True)
            claim.enter_context(hold(lock_file_of(place), path, advice))
            remove_temporary(place)
        except OSError as error:
            raise cannot_write(path, error, advice) from error
        check_writable(path, advice)
        if not force and not resume:
            if resume is not None and (work := unfinished_work(path, unfinished)):
                raise UserError(
                    f"{work[0]} holds an interrupted run; --resume continues it, --force starts over, or {advice}"
                )
            if place.exists():
                goes_on = "" if resume is None else "--resume keeps it and does what is missing, "
                raise UserError(f"{path} exists already; {goes_on}--force replaces it, or {advice}")
        yield


@contextlib.contextmanager
def claim_folder(folder: str | Path, advice: str) -> Iterator[None]:
    """Be the only writer of a folder, which is made, inside the block; what it may hold already is the caller's rule.

    The folder may be a link to one that is there: nothing in its place is replaced. One that was made here and has
    nothing in it at the end is removed. Raises `UserError` as `claim_file`.
    """
    folder = Path(folder)
    with contextlib.ExitStack() as claim:
        try:
            refuse_links(folder, into=True)
            place = Path(os.path.realpath(folder))
            _refuse_checkpoints(folder, place, advice)
            if not place.exists():
                claim.callback(_remove_if_empty, place)
            place.mkdir(parents=True, exist_ok=True)
            claim.enter_context(hold(lock_file_in(place), folder, advice))
        except OSError as error:
            raise cannot_write(folder, error, advice) from error
        yield


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


@contextlib.contextmanager
def claim_new_folder(folder: str | Path, advice: str) -> Iterator[Path]:
    """Be the only one who puts a folder at `folder`, as a whole, inside the block; gives its place.

    Folders on the way are made. Whether a folder that is there may be replaced is the caller's rule, and `refuse_busy`
    asks whether somebody writes in it. Raises `UserError` as `claim_file`, and OSError for a place that is a link or
    cannot be written: the caller has its own words for that.
    """
    folder = Path(folder)
    refuse_links(folder)
    place = Path(os.path.realpath(folder))
    _refuse_checkpoints(folder, place.parent, advice)
    place.parent.mkdir(parents=True, exist_ok=True)
    with hold(lock_file_of(place), folder, advice):
        yield place


def refuse_busy(folder: Path, advice: str) -> None:
    """Raise `UserError` when another process writes in `folder` (`claim_folder`); a dead one's lock file is removed."""
    if (folder / LOCK_FILE).exists():
        with hold(lock_file_in(folder), folder, advice):
            pass


def unfinished_work(path: Path, called: str = JOURNALS, *, remove: bool = False) -> list[Path]:
    """Return the files of unfinished work beside the result file `path`, removed if asked for.

    `called`: a regular expression for what follows the name of the result file in theirs.
    """
    name = re.compile(re.escape(path.name) + called)
    found = sorted(entry for entry in path.parent.iterdir() if name.fullmatch(entry.name))
    for entry in found if remove else ():
        entry.unlink(missing_ok=True)
    return found


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint of any format: its description and weights."""
    if not (folder / "config.json").is_file():
        return False
    return any(
        next(folder.glob(name), None) is not None
        for name in ("model*.safetensors", "pytorch_model*.bin", "shards.json")
    )


def _refuse_checkpoints(path: Path, folder: Path, advice: str) -> None:
    """Raise `UserError` when `folder`, where `path` is to be written, is a checkpoint's or lies in one."""
    for place in (folder, *folder.parents):
        if is_checkpoint(place):
            raise UserError(f"{path} lies inside the checkpoint folder {place}, which may hold nothing else; {advice}")
