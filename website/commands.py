"""docs/reference/cli.md: every verb with its arguments, from the parsers that the command itself uses."""

from __future__ import annotations

import argparse
import importlib

from longrecall.cli.main import VERBS, build_parser
from website.escaping import escaped

HEAD = """# Commands

Generated from the command's own parsers by `python -m website.reference`. Every verb also has `--help`, and `--debug`,
which shows the traceback when longrecall itself fails.

Exit codes: 0 done, 1 a bug, 2 bad input or too little memory or disk, 130 interrupted. Lengths may be written 512, 4k
or 1m (k = 1024). A checkpoint is a folder or a hub id, in any of the [formats](families.md) that are read.

"""


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join(section(verb) for verb in VERBS)


def section(verb: str) -> str:
    """One verb: what it does, an example, its arguments."""
    parser = parser_of(verb)
    example = importlib.import_module(f"longrecall.cli.{verb}").EXAMPLE
    lines = [f"## longrecall {verb}", "", *prose(parser.description or ""), "", "```sh"]
    lines += [line.strip() for line in example.splitlines()]
    lines += ["```", ""]
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        entries = [entry(action, parser) for action in shown if not isinstance(action, argparse._HelpAction)]
        # The options of a method are lines of a description: "name: what it is".
        lines_of = (line.strip().partition(": ") for line in (group.description or "").splitlines())
        entries += [f"`{name}`: {escaped(text)}" for name, _, text in lines_of]
        if entries:
            named = group.title if group.title not in ("positional arguments", "options") else None
            lines += [f"**{escaped(named)}**", ""] if named else []
            lines += [f"- {line}" for line in entries]
            lines += [""] if group.title != "positional arguments" else []
    return "\n".join(lines)


def parser_of(verb: str) -> argparse.ArgumentParser:
    """The parser of one verb, as the command builds it."""
    (children,) = (a for a in build_parser((verb,))._actions if isinstance(a, argparse._SubParsersAction))
    found: argparse.ArgumentParser = children.choices[verb]
    return found


def prose(text: str) -> list[str]:
    """A description as Markdown: lists that argparse prints as indented lines stay as they are printed."""
    first, _, rest = text.strip().partition("\n\n")
    lines = first.splitlines()
    return lines + (["", "```text", *rest.splitlines(), "```"] if rest else [])


def entry(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """One argument: how it is written, and its help."""
    formatter = parser._get_formatter()
    if action.option_strings:
        value = "" if action.nargs == 0 else f" {formatter._format_args(action, action.dest.upper())}"
        name = ", ".join(f"`{option}{value}`" for option in action.option_strings)
    else:
        name = f"`{formatter._format_args(action, action.dest)}`"
    text = formatter._expand_help(action) if action.help else ""
    return f"{name}: {escaped(' '.join(text.split()))}" if text else name
