"""Write docs/papers.md and docs/papers/: every table and figure of four papers, what it claims, what is known here.

It also writes the first lines of the other pages of evidence.

Usage: python -m experiments.papers.report            writes the pages anew
       python -m experiments.papers.report --check    changes nothing; exit code 1 when a page is out of date

Claims, verdicts and what is missing are written by people, in the YAML files beside this one. Numbers of ours stand
there as calls in braces (records.py) and are filled in from the recorded files; prices come from prices.py.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from experiments.common import pages
from experiments.common.pages import ROOT, table
from experiments.papers.prices import SMALL, price, utilisation
from experiments.papers.records import filled, wrapped

INDEX = "papers.md"
PAPERS = ("statex", "length", "headwise", "resona")
PLACES = """BOOKS, OTHER_BOOKS and the folders: [experiments/README.md](../../experiments/README.md). CKPT is a
checkpoint, MISTRAL a folder with that tokenizer, DESCRIPTION.json a model's description."""
"""What the words in capitals in the commands stand for."""
SHOWN = re.compile(r"(<!-- shown -->\n).*?(<!-- end of shown -->)", re.DOTALL)
"""What a page of evidence says first, between its markers."""
LONGEST_CELL = 200
Paper = dict[str, Any]


@functools.cache
def paper(name: str) -> Paper:
    """The file of claims of one paper, or another file of words."""
    found: Paper = yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def verdict(entry: Mapping[str, Any]) -> str:
    """The verdict as the table shows it: what was not tried says its price."""
    if entry["verdict"] != "needs":
        return str(entry["verdict"])
    weights = "" if entry["weights"].startswith("no") else " and real weights"
    return f"needs {price(entry)} GPU hours{weights}"


def record_link(path: str) -> str:
    """A link to a recorded file, from a page in docs/papers."""
    if not (ROOT / path).exists():
        raise FileNotFoundError(path)
    return f"[{Path(path).stem}](../../{path})"


def claims_table(claims: Paper) -> str:
    """A line for each table and figure of a paper."""
    lines = []
    for entry in claims["entries"]:
        commands = ", ".join(f"[{name}](#{anchor(name)})" for name in entry["command"])
        records = ", ".join(record_link(path) for path in entry["records"])
        lines.append([entry["item"], entry["claim"], filled(entry["here"]), verdict(entry), commands, records])
    return checked(table(["", "the paper claims", "here", "verdict", "rerun", "records"], lines, texts=6))


def open_table(claims: Paper) -> str:
    """A line for each claim that is not shown as a whole: what was tried, what is missing, what it costs."""
    lines = [
        [entry["item"], filled(entry["open"]), price(entry), str(entry["weights"])]
        for entry in claims["entries"]
        if "open" in entry
    ]
    return checked(table(["", "tried, and missing", "H200 hours", "real weights"], lines))


def checked(made: str) -> str:
    """The table; an error where a cell is too long for one."""
    for line in made.splitlines():
        for cell in line.split("|"):
            if len(cell.strip()) > LONGEST_CELL:
                raise ValueError(f"{len(cell.strip())} characters, at most {LONGEST_CELL}: {cell.strip()}")
    return made


def paper_page(name: str) -> str:
    """The page of one paper."""
    claims, figure = paper(name), paper(name)["figure"]
    commands = [f"### {title}\n\n```sh\n{text}```" for title, text in claims["commands"].items()]
    parts = [
        f"# {claims['title']}",
        "\n".join(wrapped(text, bullet=True) for text in claims["short"]),
        wrapped(f"{claims['about']} ± is a 95% interval over seeds. Verdicts and prices: [papers.md](../{INDEX})."),
        f"![{figure['shows']}](../figures/{figure['file']})",
        f"*{figure['caption']}*",
        f"## Tables and figures\n\n{claims_table(claims).rstrip()}",
        f"## What would settle the rest\n\n{open_table(claims).rstrip()}",
        f"## Commands\n\n{PLACES}",
        *commands,
    ]
    return "\n\n".join(parts) + "\n"


def counts_table(verdicts: Iterable[str]) -> str:
    """How many tables and figures of each paper have which verdict."""
    lines = []
    for name in PAPERS:
        found = Counter(entry["verdict"] for entry in paper(name)["entries"])
        link = f"[{paper(name)['name']}](papers/{paper(name)['page']})"
        lines.append([link, str(found.total()), *(str(found[word] or "") for word in verdicts)])
    return table(["paper", "tables and figures", *verdicts], lines, texts=1)


def cheap_lines() -> str:
    """The claims of each paper that under an hour and no real weights would settle."""
    lines = []
    for name in PAPERS:
        entries = [entry for entry in paper(name)["entries"] if "open" in entry and entry["weights"].startswith("no")]
        items = [entry["item"] for entry in entries if price(entry) == SMALL]
        if items:
            lines.append(f"- {paper(name)['name']}: {', '.join(items)}.")
    return "\n".join(lines)


def index_page() -> str:
    """The page that leads to the four."""
    words = paper("index")
    found = Counter(entry["verdict"] for name in PAPERS for entry in paper(name)["entries"])
    counts = ", ".join(f"{found[word]} {word}" for word in words["verdicts"] if word != "needs")
    lead = words["lead"].format(all=found.total(), counts=counts, needs=found["needs"])
    short = [f"{paper(name)['name']}. {paper(name)['short'][0]}" for name in PAPERS]
    meanings = "\n".join(f"- **{word}**: {meaning}." for word, meaning in words["verdicts"].items())
    parts = [
        f"# {words['title']}",
        wrapped(lead),
        "\n".join(wrapped(text, bullet=True) for text in short),
        counts_table(words["verdicts"]).rstrip(),
        f"## Verdicts\n\n{meanings}",
        wrapped(words["about"]),
        f"## Prices\n\n{wrapped(words['prices'].format(utilisation=f'{utilisation():.0%}'))}",
        f"{wrapped(words['cheap'])}\n\n{cheap_lines()}",
        wrapped(words["made"]),
    ]
    return "\n\n".join(parts) + "\n"


def evidence_page(name: str, text: str) -> str:
    """A page of evidence with its first lines made anew; the tables below them are its own report's."""
    page = (pages.DOCS / name).read_text(encoding="utf-8")
    fresh, count = SHOWN.subn(lambda found: f"{found[1]}{wrapped(text)}\n{found[2]}", page)
    if count != 1:
        raise ValueError(f"{name}: one place for what is shown, not {count}")
    return fresh


def made() -> dict[str, str]:
    """Every page by its path in docs."""
    found = {INDEX: index_page(), **{f"papers/{paper(name)['page']}": paper_page(name) for name in PAPERS}}
    return found | {name: evidence_page(name, text) for name, text in paper("pages").items()}


def main() -> None:
    """Write the pages, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when a page is out of date")
    args = parser.parse_args()
    fresh = made()
    if args.check:
        old = {name: (pages.DOCS / name).read_text(encoding="utf-8") for name in fresh if (pages.DOCS / name).exists()}
        raise SystemExit(int(old != fresh))
    for name, text in fresh.items():
        (pages.DOCS / name).parent.mkdir(exist_ok=True)
        (pages.DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
