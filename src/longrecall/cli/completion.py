"""Completion of command lines in bash, zsh and fish, by argcomplete (docs/install.md says how to switch it on).

The shell starts `longrecall` with _ARGCOMPLETE in the environment and with the line that was typed so far. Verbs and
options are completed from their parsers. A verb declares the names that an option takes with `completed`; whether an
argument is a file follows from its metavar.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from longrecall.shipped import shipped_recipes

SWITCH = "_ARGCOMPLETE"
"""Set in the environment by the shell that asks for completions."""

_NAMES = {"--device": ("cpu", "cuda"), "--dtype": ("float32", "bfloat16", "float16", "float64")}
"""Options that mean the same under every verb -> their values."""
_FILES: dict[str, tuple[str, ...]] = {
    "CKPT": ("json",),
    "CKPT|ops": ("json",),
    "TOKENIZER": (),
    "OUT": (),
    "DIR": (),
    "FOLDER": (),
    "RUN": (),
    "RECIPE": ("yaml", "yml"),
    "RESULT": ("json",),
    "A.json": ("json",),
    "B.json": ("json",),
    "FILE.json": ("json",),
    "FILE.html": ("html",),
}
"""Metavars of arguments that name files or folders -> endings of the files offered, () = any; folders always are."""
_ANY_FILE = ("FILE", "INPUT")
_SHIPPED = {"RECIPE": ".yaml", "FILE.json": ".json"}
"""Metavars of arguments that also take what ships with longrecall, by its name (shipped.py)."""


def completed(
    action: argparse.Action, names: Iterable[str] | Callable[[], Iterable[str]], several: bool = False
) -> None:
    """Complete the values of an argument with names; a function of names is asked when a shell asks.

    `several`: the value is a comma-separated list of them.
    """

    def offer(prefix: str, **_: Any) -> list[str]:
        before, comma, _last = prefix.rpartition(",") if several else ("", "", prefix)
        taken = set(before.split(","))
        known = names() if callable(names) else names
        return [f"{before}{comma}{name}" for name in known if name not in taken]

    action.completer = offer  # type: ignore[attr-defined]  # where argcomplete looks for it


def verb_typed(names: Sequence[str]) -> str | None:
    """The verb in the line that is being completed; None = there is none before the word under the cursor."""
    line = os.environ.get("COMP_LINE", "")
    typed = line[: int(os.environ.get("COMP_POINT") or len(line))]
    try:
        words = shlex.split(typed)
    except ValueError:  # a quotation that has not ended yet
        words = typed.split()
    finished = words[1:] if typed[-1:].isspace() else words[1:-1]
    return next((word for word in finished if word in names), None)


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and end the process; return where argcomplete is not installed, and nothing can be offered."""
    try:
        import argcomplete
        from argcomplete.completers import FilesCompleter
    except ImportError:
        return
    for action in _all_actions(parser):
        if common := next((_NAMES[option] for option in action.option_strings if option in _NAMES), ()):
            completed(action, common)
        if not hasattr(action, "completer") and action.choices is None and action.nargs != 0:
            # Without a metavar argparse shows the name of the option.
            shown = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            files = FilesCompleter(_FILES.get(shown, ())) if shown in _FILES or shown in _ANY_FILE else None
            if files is None:
                completed(action, ())
            else:
                _complete_files(action, files, _shipped(shown))
    argcomplete.autocomplete(parser, always_complete_options="long")


def _shipped(shown: str) -> list[str]:
    return shipped_recipes(_SHIPPED[shown]) if shown in _SHIPPED else []


def _complete_files(action: argparse.Action, files: Callable[[str], list[str]], others: list[str]) -> None:
    def offer(prefix: str, **_: Any) -> list[str]:
        return list(dict.fromkeys([*files(prefix), *others]))

    action.completer = offer  # type: ignore[attr-defined]


def _all_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [one for child in action.choices.values() for one in _all_actions(child)]
    return found
