"""Writing files so that readers see the old or the new one, whole."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from longrecall.errors import UserError

ELSEWHERE = "choose another --out"
_SURROGATES = re.compile("[\ud800-\udfff]")


def write_text(path: str | Path, text: str, advice: str = ELSEWHERE) -> None:
    """Write `text` (UTF-8) to a temporary file beside `path`, then rename it; folders on the way are made.

    A link is refused. Bytes of file names that are no UTF-8 are written as "?".
    Raises `UserError`, which ends with `advice`, when the place cannot be written; nothing is left behind then.
    """
    path = Path(path)
    temporary = None
    try:
        place = place_of(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = _new_beside(place)
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(temporary, place)
        temporary = None
    except OSError as error:
        raise cannot_write(path, error, advice) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def write_json(path: str | Path, data: Mapping[str, Any], advice: str = ELSEWHERE) -> None:
    """Write `data` as `write_text` does. NaN and infinity are refused (ValueError): they are no JSON."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n", advice)


def check_writable(path: str | Path, advice: str = ELSEWHERE) -> None:
    """Raise `UserError` now if `path` could not be written later; leaves no file behind."""
    path = Path(path)
    try:
        place = place_of(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place.parent):
            pass
    except OSError as error:
        raise cannot_write(path, error, advice) from error


def check_no_input(path: str | Path | None, inputs: Iterable[str | Path | None], advice: str = ELSEWHERE) -> None:
    """Raise `UserError` when `path` is one of the files that are read: writing it would destroy what was given.

    None, and what does not exist, is no file.
    """
    for source in inputs:
        if path is None or source is None or not (os.path.isfile(path) and os.path.isfile(source)):
            continue
        if os.path.samefile(path, source):
            raise UserError(f"{path} is an input of this command and would be overwritten; {advice}")


def place_of(path: Path) -> Path:
    """Return where a file that is called `path` is written; OSError for what is there already and is no file.

    To rename a file over a device (/dev/null) would take the device away from everybody.
    """
    place = Path(os.path.realpath(path))
    if place.is_dir():
        raise IsADirectoryError(None, "it is a folder")
    # Asked of the path too: /dev/stdout leads to a pipe by a link whose words name no file.
    if any(known.exists() and not known.is_file() for known in (path, place)):
        raise OSError(None, "it is a device or a pipe, not a file")
    refuse_links(path)
    return place


def refuse_links(path: Path, *, into: bool = False) -> None:
    """Raise OSError when `path` is a link, or one on the way to it leads nowhere.

    What is written through a link replaces something that was not named, or makes folders where nobody looks. A link
    to a folder that is there, on the way, is as good as the folder; with `into`, so is `path` itself.
    """
    last = Path.cwd() / path
    for place in (last, *last.parents):
        if not place.is_symlink():
            continue
        target = os.path.realpath(place)
        if os.path.islink(target):
            raise OSError(None, "its symbolic links form a circle")
        if not os.path.exists(target):
            raise OSError(None, f"{place} is a link to {target}, which is not there")
        if place == last and not into:
            raise OSError(None, f"it is a link, and results are not written through links; name {target} itself")


def expand_home(path: str | Path) -> Path:
    """Return `path` with a leading ``~`` or ``~name`` replaced; raise `UserError` when there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path} begins with the home folder of an unknown user; write the whole path") from None


def printable(name: str | Path) -> str:
    """Return a name as text that every page and file can hold.

    The bytes of a file's name that are no UTF-8, which Python keeps as lone surrogates, become replacement characters.
    """
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", str(name))


def cannot_write(path: str | Path, error: OSError, advice: str) -> UserError:
    """Return the line for a place that the system, or a rule, does not let anybody write."""
    return UserError(f"cannot write {path}: {error.strerror or error}; {advice}")


def make_readable(path: str | Path) -> None:
    """Give a new file the permissions of any other that the user writes; safetensors makes private ones."""
    # Those of a file that is made for this alone: the mask can only be read by setting it, for all threads.
    handle, other = _new_beside(Path(path))
    try:
        os.chmod(path, stat.S_IMODE(os.fstat(handle).st_mode))
    finally:
        os.close(handle)
        os.unlink(other)


@contextlib.contextmanager
def written_apart(place: Path) -> Iterator[Path]:
    """Give a name to write; what is there at the end of the block gets the name `place`, unless an exception comes.

    It lies in a hidden folder beside `place`: libraries that write a file may put one of their own beside it, under a
    name that nobody could know again after a kill.
    """
    folder = _temporary(place)
    folder.mkdir()
    try:
        path = folder / place.name
        yield path
        os.replace(path, place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_temporary(path: Path) -> None:
    """Remove what killed writers of the file `path` have left beside it; only for its one writer (`outputs`)."""
    name = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{16}\.tmp")
    with contextlib.suppress(OSError):  # a folder may be written and not read
        for entry in path.parent.iterdir():
            if not name.fullmatch(entry.name):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def _new_beside(path: Path) -> tuple[int, str]:
    """Open a new hidden file in the folder of `path`, to be written; mkstemp would make a private one."""
    name = str(_temporary(path))
    return os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), name


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def check_replaceable(folder: Path) -> None:
    """Raise `UserError` for a folder that nothing may replace: the working folder, home, what holds them, a mount."""
    place, here = Path(os.path.realpath(folder)), Path.cwd()
    kept = [here, *here.parents]
    with contextlib.suppress(RuntimeError):  # a user without a home
        kept += [Path.home(), *Path.home().parents]
    if place in kept or os.path.ismount(place):
        raise UserError(f"{place} is a working, home or system folder; --force does not replace it")
