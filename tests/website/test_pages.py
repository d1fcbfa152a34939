"""The site: its pages are in reach and short, its pictures are what the code draws, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longrecall.cli.main import main
from website import build, pictures
from website.escaping import escaped
from website.pages import EVIDENCE, HOME, BrokenLinks, stage, with_method_folded

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = tomllib.loads((ROOT / "website" / "zensical.toml").read_text(encoding="utf-8"))
GENERATED = {"reference/cli.md", "reference/recipes.md", "reference/api.md"}
QUESTIONS = (
    *("forgets-past-2k", "enlarge-mamba2", "enlarge-qwen3.5", "train-on-8-gpus", "serve", "compare-checkpoints"),
    "add-a-mixer",
)


def named(part: Any) -> Iterator[str]:
    """The pages of a navigation."""
    if isinstance(part, str):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from named(inner)


def test_the_navigation_names_every_page_and_no_other() -> None:
    """The kernels' pages are reached from kernels.md."""
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    pages = {page.replace("README.md", "index.md") for page in pages if not page.startswith("kernels/")}
    pages = {"index.md" if page == HOME else page for page in pages}
    assert sorted(named(CONFIG["project"]["nav"])) == sorted(pages)
    assert {f"how-to/{name}.md" for name in QUESTIONS} == {page for page in pages if page.startswith("how-to/")}


def test_pages_of_the_site_are_short() -> None:
    """All but those that are generated from the code. tests/test_plain_english.py bounds sentences and cells."""
    for page in sorted(DOCS.rglob("*.md")):
        lines = page.read_text(encoding="utf-8").splitlines()
        name = page.relative_to(DOCS).as_posix()
        assert len(lines) <= 250 or name in GENERATED, name


def test_every_concept_has_a_picture_that_is_drawn_by_code() -> None:
    assert pictures.stale(write=False) == [], "run python -m website.pictures"
    for name in pictures.PICTURES:
        shown = re.findall(r"!\[(.+?)\]\((\S+)\)", (DOCS / "concepts" / f"{name}.md").read_text(encoding="utf-8"))
        assert [place for _, place in shown] == [f"pictures/{name}.svg"]
        # For those who do not see the picture: a sentence, not a name.
        assert len(shown[0][0].split()) >= 10


def test_the_numbers_of_the_pages_are_recorded_ones(capsys: pytest.CaptureFixture[str]) -> None:
    shares = {name: pictures.phonebook(pictures.DEMO / f"{name}.json")[24] for name in ("before", "after", "control")}
    start = " ".join((DOCS / HOME).read_text(encoding="utf-8").split())
    assert (
        "recalls {before:.0%} of 24 numbers before and {after:.0%} after, the control {control:.0%}".format(**shares)
        in start
    )
    recall = (DOCS / "concepts" / "recall.md").read_text(encoding="utf-8")
    assert "{before:.0%} and {after:.0%} of 24".format(**shares) in recall
    assert main(["info", str(ROOT / "src" / "longrecall" / "assets" / "mamba2-base")]) == 0
    told, state = capsys.readouterr().out, (DOCS / "concepts" / "state.md").read_text(encoding="utf-8")
    assert all(number in told and number in state for number in ("1,280", "3,840", "491,520"))


def test_files_beside_the_pages_travel_along_and_missing_ones_are_named(tmp_path: Path) -> None:
    root = tmp_path / "clone"
    for name, text in {
        "docs/start.md": "# A\n[one](how-to/b.md#b) [two](../data/x.json) [three](../data) `[code](no.md)`\n",
        "docs/how-to/b.md": "# B\n[home](../start.md) [read](../../data/README.md)\n```\n[code](no.md)\n```\n",
        "data/README.md": "# Data\n[back](../docs/start.md)\n",
        "data/x.json": "{}",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    made = tmp_path / "pages"
    assert stage(made, root) == ["how-to/b.md", "index.md", "repository/data/index.md"]
    home = "(how-to/b.md#b) [two](repository/data/x.json) [three](repository/data/index.md) `[code](no.md)`"
    assert home in (made / "index.md").read_text()
    assert "(../index.md) [read](../repository/data/index.md)" in (made / "how-to" / "b.md").read_text()
    assert "(../../index.md)" in (made / "repository" / "data" / "index.md").read_text()
    assert (made / "repository" / "data" / "x.json").read_text() == "{}"
    (root / "docs" / "start.md").write_text("[gone](figures/gone.svg)")
    with pytest.raises(BrokenLinks, match=r"docs/start\.md: docs/figures/gone\.svg is not there"):
        stage(made, root)


def test_how_it_was_measured_opens_with_a_click() -> None:
    page = "# A\n\nResult.\n\n## What was done\n\nA lot.\n\n### In detail\n\nMore.\n\n## Not measured\n\nSpeed.\n"
    folded = with_method_folded(page)
    closed = folded[folded.index("<details") : folded.index("</details>")]
    assert "A lot." in closed and "### In detail" in closed and "Result." not in closed and "Speed." not in closed
    for name in EVIDENCE[1:]:
        assert "<details" in with_method_folded((DOCS / f"{name}.md").read_text(encoding="utf-8")), name


def test_text_of_the_program_stays_what_it_is() -> None:
    assert escaped("a*b <= `c*d <e>` [f]") == r"a\*b &lt;= `c*d <e>` \[f\]"


@pytest.mark.slow
def test_the_site_builds_and_a_broken_link_ends_the_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The CI builds it with `make docs-build`; here also that its builder sees what is broken."""
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("the extra docs is not installed")
    build.prepare(tmp_path)
    assert build.build(tmp_path) == 0
    assert (tmp_path / "site" / "index.html").is_file() and (tmp_path / "site" / "reference" / "api.html").is_file()
    for link, told in (("nothing.md", "page does not exist"), ("surgery.md#nothing", "anchor does not exist")):
        (tmp_path / "pages" / "glossary.md").write_text(f"# Glossary\n[broken]({link})\n")
        assert build.build(tmp_path) != 0
        assert told in capsys.readouterr().err
