"""Nobody has to read a sentence twice: pages, help, errors, reports and docstrings have short sentences and cells.

The bounds are what a page reads well with; a longer sentence becomes two, or a list. The help of every verb and the
docstrings of public names are read where they are printed, on the generated pages of docs/reference/.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plain_english import messages, paragraphs, sentences, words

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCES = sorted((ROOT / "src" / "longrecall").rglob("*.py"))
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *DOCS.rglob("*.md"),
        *(ROOT / "src").rglob("assets/**/*.md"),
    ]
)
CELL = 200
"""Characters of a table's cell: more is no cell, but several rows, or prose below the table."""
PROGRAM = 25
"""Words of a sentence that the program says, or that is looked up."""
PAGE = 30
"""Words of a sentence on a page."""
WORKSHOP = 35
"""Words of a sentence on a page for those who work on the kernels, which names many parts at once."""
GENERATED = ("api.md", "cli.md", "recipes.md")


def bound(page: Path) -> int:
    """Words of a sentence on a page."""
    if page.parent.name == "reference" and page.name in GENERATED:
        return PROGRAM
    if page.stem in ("architecture", "kernels") or page.parent.name == "kernels":
        return WORKSHOP
    return PAGE


def too_long(text: str, most: int) -> list[str]:
    return [f"{words(said)} words: {said}" for said in sentences(text) if words(said) > most]


def test_sentences_of_pages_are_short() -> None:
    found = []
    for page in PAGES:
        parts = paragraphs(page.read_text(encoding="utf-8"))
        found += [f"{page.relative_to(ROOT)}, {line}" for part in parts for line in too_long(part, bound(page))]
    assert not found, "make two sentences, or a list, of each:\n" + "\n".join(found)


def test_sentences_of_the_program_are_short() -> None:
    """Help, errors, reports, model cards: every string of the package that is prose."""
    found = []
    for path in SOURCES:
        for line, part in messages(path):
            found += [f"{path.relative_to(ROOT)}:{line}, {said}" for said in too_long(part, PROGRAM)]
    assert not found, "make two sentences of each:\n" + "\n".join(found)


def test_cells_of_tables_are_short() -> None:
    for page in PAGES:
        rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        assert all(len(cell.strip()) <= CELL for row in rows for cell in row.split("|")), page


LONG = " ".join(["word"] * 40)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("One. Two words? (Three more words.) And `code. of one` word", [1, 2, 3, 3]),
        ("A file such as config.json, e.g. that one, has 1.5 sentences.", [11]),
        ("It takes a.b, c, d, e_f and g.", [5]),
        (f"{LONG}; {LONG}", [80]),
    ],
)
def test_sentences_are_counted_as_people_do(text: str, counts: list[int]) -> None:
    assert [words(said) for said in sentences(text)] == counts


def test_of_a_page_only_its_prose_counts() -> None:
    page = f"---\ntags: {LONG}\n---\n# A title\nText with a [link of words](x.md)\nand $a + b$.\n- one\n- two\n"
    page += f"\n| {LONG} |\n\n```sh\n{LONG}\n```\n\n$$\n{LONG}\n$$\n\nThe end.\n"
    assert list(paragraphs(page)) == ["A title", "Text with a link of words\nand formula.", "one", "two", "The end."]


def test_every_string_that_may_be_read_is_found(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        f'"""{LONG}"""\n\n'
        "def f(x):\n"
        f'    """{LONG}"""\n'
        f'    y = "import {LONG}"\n'
        f'    raise UserError("Bad: {LONG} " f"{{x}} {LONG}" + advice)\n'
    )
    ((line, text),) = messages(source)
    assert line == 6 and [words(said) for said in sentences(text)] == [82]
    assert len(too_long(text, PROGRAM)) == 1 and too_long("Short enough.", PROGRAM) == []


def test_no_line_becomes_a_list_by_its_first_number() -> None:
    """A number and a full stop at the beginning of a line is an entry of a list, also where a sentence ends so."""
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        last = 0
        for line in text.splitlines():
            found = re.match(r"\s*(\d+)[.)]\s", line)
            if found is not None:
                assert int(found[1]) in (1, last + 1), f"{page.relative_to(ROOT)}: {line}"
                last = int(found[1])
