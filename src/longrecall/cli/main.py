# PYTHON_ARGCOMPLETE_OK: by this word argcomplete's completion of every Python command finds this one.
"""The `longrecall` command: finds the verb, runs it, and turns what goes wrong into one line and an exit code.

Exit codes: 0 done, 1 a bug in longrecall, 2 bad input, too little memory or a full or unwritable disk, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.util
import io
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast

from longrecall.cli import completion
from longrecall.errors import RefusedTogether, UserError, did_you_mean, first_process, ran_out_of_memory
from longrecall.version import __version__

VERBS = (
    "demo",
    "doctor",
    "info",
    "init",
    "expand",
    "tokenize",
    "train",
    "consolidate",
    "sweep",
    "eval",
    "diagnose",
    "generate",
    "serve",
    "export",
    "bench",
    "compare",
    "report",
)
"""In the order in which they are used; the verb `x` lives in `longrecall.cli.x`."""

_DESCRIPTION = "Give a language model with a fixed-size memory a bigger one, and measure what it remembers."
_AFTER_THE_FIRST = 5.0
"""Seconds that other processes than the first wait before they end, or say what is wrong."""
_FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class Verb(Protocol):
    """What a verb's module offers."""

    HELP: str
    EXAMPLE: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the verb's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit code."""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line as a UserError: one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def build_parser(verbs: Sequence[str] = VERBS, arguments: bool = True) -> argparse.ArgumentParser:
    """Return the parser of the whole command; imports every verb's module, which must be light.

    `arguments`: with those of the verbs. Some verbs import more to know theirs, such as tasks and methods of surgery.
    """
    parser = _Parser(
        prog="longrecall",
        description=_DESCRIPTION,
        epilog="Start with longrecall demo. longrecall VERB --help explains a verb and gives an example.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"longrecall {__version__}")
    parser.add_argument("--debug", action="store_true", help="when longrecall itself fails, show the traceback")
    children = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    for name in verbs:
        verb = cast(Verb, importlib.import_module(f"longrecall.cli.{name}"))
        child = children.add_parser(
            name,
            help=verb.HELP,
            description=f"{verb.HELP[0].upper()}{verb.HELP[1:]}.",
            epilog=f"example:\n  {verb.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if arguments:
            verb.configure(child)
        child.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        child.set_defaults(run=verb.run, parser=child)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line; raise UserError with the nearest name for an unknown verb or option."""
    first = next((word for word in argv if not word.startswith("-")), None)
    if first is not None and first not in VERBS:
        raise UserError(f'there is no verb "{first}".{did_you_mean(first, VERBS)} See longrecall --help')
    parser = build_parser(VERBS, arguments=False) if first is None else build_parser((first,))
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        child: argparse.ArgumentParser = args.parser
        options = set(re.findall(r"--[a-z][a-z-]*", child.format_help()))
        hint = did_you_mean(unknown[0].partition("=")[0], options) if unknown[0].startswith("-") else ""
        raise UserError(f'"{unknown[0]}" is not an argument of {child.prog}.{hint} See {child.prog} --help')
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (None = this process's) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except UserError as error:
        told_here = not isinstance(error, RefusedTogether) or error.told_here
        if not (told_here and first_process()):
            # A launcher such as torchrun ends all processes when one has failed. The first one must have said its line
            # by then; and where others find the same by themselves, it is there once.
            time.sleep(_AFTER_THE_FIRST)
        return _complain(str(error), 2) if told_here else 2
    except BrokenPipeError:
        # The reader (head, less) has left, and has what it wanted.
        _settle_stdout()
        return 0
    except Exception as error:
        if (line := _system_failure(error) or _short_memory(error) or _missing_package(error)) is not None:
            return _complain(line, 2)
        if "--debug" in words:
            traceback.print_exc()
        what = " ".join(f"{type(error).__name__}: {error}".split())
        advice = "the traceback is above" if "--debug" in words else "add --debug to see the traceback"
        return _complain(f"{what} (this is a bug in longrecall, please report it; {advice})", 1)


def _open_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr (``>&-``) the empty device in their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (as long as the process)
    # A terminal that lacks a letter, or a file name that is no UTF-8, is shown as stderr shows it, and ends nothing.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(words: Sequence[str]) -> int:
    if completion.SWITCH in os.environ:
        verb = completion.verb_typed(VERBS)
        completion.complete(build_parser(VERBS, arguments=False) if verb is None else build_parser((verb,)))
    if not words:
        build_parser(arguments=False).print_help(sys.stderr)
        return 2
    try:
        args = parse(words)
    except SystemExit as done:  # argparse has answered --help or --version
        return done.code if isinstance(done.code, int) else 0
    code: int = args.run(args)
    return code


def _complain(line: str, code: int) -> int:
    _settle_stdout()
    print(f"longrecall: error: {' '.join(line.split())}", file=sys.stderr)
    return code


def _settle_stdout() -> None:
    """Write out what was printed; where that fails, forget it, or Python would complain once more when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _system_failure(error: BaseException) -> str | None:
    """Return the line for a full or forbidden disk, or a killed data worker, anywhere in the chain of causes."""
    seen: BaseException | None = error
    while seen is not None:
        place = ""
        code = None
        if isinstance(seen, OSError):
            code = seen.errno
            place = f" {seen.filename}" if seen.filename else ""
        # safetensors and torch's writer report a full disk as their own exceptions, with the system's words in them.
        if code in _FULL_DISK or "No space left on device" in str(seen):
            return f"no space left on the disk while writing{place}; free some space or choose another disk"
        # torch says it in whatever the process is doing just then.
        if isinstance(seen, RuntimeError) and "DataLoader worker (pid" in str(seen):
            return f"a data worker has ended ({seen}). Most often memory ran out: lower data.workers and use --resume"
        if code in _FORBIDDEN:
            return f"no permission to use{place or ' a file'}; change its permissions or choose another path"
        seen = seen.__cause__ or seen.__context__
    return None


def _missing_package(error: BaseException) -> str | None:
    """Return the line for a package of others that is not there, None for anything else."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    # Where the package is there, what lacks is a part of it: a mistake of who asked for the part.
    if not name or name == "longrecall" or importlib.util.find_spec(name) is not None:
        return None
    return f'Python has no module "{name}", which longrecall needs; longrecall doctor says what else is not installed'


def _short_memory(error: BaseException) -> str | None:
    """Return the line for memory that did not suffice, anywhere in the chain of causes, None for anything else."""
    seen: BaseException | None = error
    while seen is not None:
        if ran_out_of_memory(seen):
            reason = next(iter(str(seen).splitlines()), "") or "the system gave no number"
            return f"memory ran out ({reason}); use a smaller model, batch, length or dtype"
        seen = seen.__cause__ or seen.__context__
    return None


if __name__ == "__main__":
    sys.exit(main())
