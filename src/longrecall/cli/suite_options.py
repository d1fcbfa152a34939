"""``--suite``, ``--list-suites`` and ``--harness-path`` of ``longrecall eval``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from longrecall.cli.completion import completed

Options = dict[str, dict[str, Any]]


class PrintAndExit(argparse.Action):
    """Prints what `make` returns and ends the command, as ``--help`` does."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, make: Callable[[], str], default: Any = None, help: str = ""
    ) -> None:
        super().__init__(option_strings, dest, nargs=0, default=default, help=help)
        self._make = make

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Print and exit."""
        print(self._make())
        parser.exit()


def add_suite_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about the papers' suites and the harness."""
    group = parser.add_argument_group(
        "suites of the papers, and lm-evaluation-harness (its tasks are named lm_eval:NAME)"
    )
    suite = "use the tasks, lengths and options of a paper; NAME:offline takes only those that need no network"
    completed(group.add_argument("--suite", metavar="NAME", help=suite), _suite_names)
    group.add_argument(
        "--list-suites",
        action=PrintAndExit,
        make=_suites,
        default=argparse.SUPPRESS,
        help="list the suites and what each one runs",
    )
    group.add_argument(
        "--harness-path",
        action=PrintAndExit,
        make=_path,
        default=argparse.SUPPRESS,
        help="print the folder with longrecall's tasks, for lm_eval --include_path",
    )


def _suite_names() -> list[str]:
    from longrecall.tasks.suites import SUITES

    return list(SUITES)


def _suites() -> str:
    from longrecall.tasks.suites import list_suites

    return list_suites()


def _path() -> str:
    from longrecall.evaluation.harness.files import include_path

    return str(include_path())


def expand_suite(args: argparse.Namespace) -> Options:
    """Set the tasks of ``--suite``, and lengths and samples where they are not given; return the options of its tasks.

    What it will run is said on stderr. Without ``--suite``, nothing happens.
    """
    if args.suite is None:
        return {}
    from longrecall.errors import UserError
    from longrecall.tasks.suites import suite

    if args.tasks is not None:
        raise UserError("give --tasks or --suite, not both; a suite names its own tasks")
    chosen = suite(args.suite)
    args.tasks = ",".join(chosen.tasks)
    if args.lengths is None and chosen.lengths is not None:
        args.lengths = ",".join(chosen.lengths)
    if args.samples is None:
        args.samples = chosen.samples
    print("\n".join(chosen.describe()), file=sys.stderr)
    return chosen.options
