"""What the pages of evidence share: recorded files, numbers, tables and their markers."""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
DOCS = ROOT / "docs"
NOT_RUN = "not run"
MARKED = re.compile(r"(<!-- table: ([\w :]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read(name: str) -> Any:
    """One recorded file, read once: every table asks for it. Nobody changes what this returns."""
    path = RESULTS / name
    return _parsed(path, path.stat().st_mtime_ns)


@functools.cache
def _parsed(path: Path, changed: int) -> Any:
    """`changed`, the time of the last change, makes a file that was written anew another one."""
    return json.loads(path.read_text(encoding="utf-8"))


def number(value: float, signed: bool = False, digits: int = 3) -> str:
    """`digits` decimals without the zero before the point."""
    return re.sub(r"^([+-]?)0\.", r"\1.", f"{value:{'+' if signed else ''}.{digits}f}")


def share(value: float, digits: int = 4) -> str:
    """An accuracy to some decimals, cut off and not rounded: what falls short of 1 shows."""
    return number(int(value * 10**digits + 1e-6) / 10**digits, digits=digits)


def until_then(run: Mapping[str, Any], digits: int = 4) -> str:
    """What is known of a run that was stopped; it may not have been evaluated yet."""
    evaluated = run["epochs"] >= 1 and run.get("history") != []
    known = f"{share(run['accuracy'], digits)}, " if evaluated else ""
    return f"{known}cut off at {number(run['epochs'], digits=1)}"


def signed_with_error(mean: float, half: float, digits: int = 3) -> str:
    """`mean` ± `half`, bold where the interval leaves out zero."""
    text = f"{number(mean, signed=True, digits=digits)} ± {number(half, digits=digits)}"
    return f"**{text}**" if abs(mean) > half else text


def table(head: list[str], lines: Iterable[list[str]], texts: int = 2) -> str:
    """A Markdown table; the first `texts` columns are text."""
    rule = ["---"] * texts + ["---:"] * (len(head) - texts)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines]) + "\n"


def renewed(page: str, tables: dict[str, str]) -> str:
    """The page with what stands between its markers made anew; a marker that names no table is an error."""
    return MARKED.sub(lambda m: f"{m[1]}\n{tables[m[2]]}\n{m[3]}", page)


def pages_of(name: str) -> list[Path]:
    """The pages of a study: `docs/{name}`, then those in the folder that is called the same."""
    first = DOCS / name
    return [first, *sorted(first.with_suffix("").glob("*.md"))]


def write_page(
    about: str | None, name: str, tables: Callable[[], dict[str, str]], draw: Callable[[Path], None] | None = None
) -> None:
    """The command line of a study: renew the tables and figures of its pages, or with --check compare the tables."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when a table is out of date")
    args = parser.parse_args()
    old = {path: path.read_text(encoding="utf-8") for path in pages_of(name)}
    made = tables()
    fresh = {path: renewed(page, made) for path, page in old.items()}
    if args.check:
        raise SystemExit(int(fresh != old))
    for path, page in fresh.items():
        path.write_text(page, encoding="utf-8")
    if draw is not None:
        draw(DOCS / "figures")
