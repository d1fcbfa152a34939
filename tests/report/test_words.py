"""What a page opens with, what it is called, and that nothing on it is cut, split or empty of meaning."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longrecall.demo.table import verdict
from longrecall.report import build_report
from longrecall.report.blocks import Words, with_interval
from longrecall.report.inputs import read_inputs
from longrecall.report.opening_sections import in_words, title_of
from longrecall.report.sections import sizes
from longrecall.report.summaries import Number, headlines
from tests.report.conftest import training
from tests.report.test_page import Page
from tests.report.test_sweeps import mqar_sweep

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "experiments" / "results" / "demo"
LABELS = {"before": "before", "after": "after", "control (same state)": "control"}


@pytest.fixture(scope="module")
def demo_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the recorded demo, made as the demo makes it."""
    files = {label: str(RECORDED / f"{name}.json") for label, name in LABELS.items()}
    return build_report(list(files.values()), tmp_path_factory.mktemp("demo") / "r.html", labels=files)


def words_of(paths: list[str]) -> list[Words]:
    section = in_words(read_inputs(paths))
    assert section is not None
    return [block for block in section.blocks if isinstance(block, Words)]


def test_the_page_opens_with_the_words_of_the_terminal(demo_page: Path) -> None:
    results = [json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8")) for name in LABELS.values()]
    text = html.unescape(demo_page.read_text(encoding="utf-8"))
    opening = text[text.index("<section") : text.index("</section>")]
    lines = verdict(*results).splitlines()
    assert len(lines) > 8
    for line in filter(None, lines):
        name, _, sentence = line.strip().partition(": ") if line.startswith("  ") else ("", "", line)
        assert sentence in opening and name in opening, line
    assert re.search(r"<h2[^>]*>In short</h2>", opening)


def test_each_task_is_explained_where_it_stands(demo_page: Path) -> None:
    text = demo_page.read_text(encoding="utf-8")
    for section, words in (
        ("phonebook", "The model reads a list of names, each with a number"),
        ("passkey", "One number is hidden in a long text"),
        ("positions", "How well the model predicts ordinary text"),
    ):
        part = text[text.index(f'<section id="{section}"') :]
        assert words in part[: part.index("<figure")], section


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (Number(4.0, 4.0, 4.0), "4"),
        (Number(4.0, 2.0, 8.0), "4\n2 to 8"),
        # Narrower than the digits: more of them, never the same number twice.
        (Number(0.5, 0.49999, 0.50001), "0\n0 to 1"),
    ],
)
def test_an_interval_says_something(number: Number, told: str) -> None:
    shown = with_interval(number, 0)
    low, _, high = shown.partition("\n")[2].partition(" to ")
    assert not high or low != high
    if told.count("\n") == 0 or number.low == 2.0:
        assert shown == told


def test_no_interval_of_one_number_stands_on_the_page(demo_page: Path) -> None:
    page = Page(demo_page.read_text(encoding="utf-8"))
    spans = [re.fullmatch(r"(\S+) to (\S+)", text) for text in page.text["small"]]
    assert any(spans) and not [found[0] for found in spans if found and found[1] == found[2]]


def test_a_difference_in_the_table_compares_each_question_with_itself() -> None:
    inputs = read_inputs([str(RECORDED / f"{name}.json") for name in ("before", "after")])
    before, after = inputs.evaluations
    rows = {row.name: row for row in headlines(inputs.evaluations)}
    row = rows["phone book: accuracy at 24 pairs"]
    change, apart = row.change(before, after), (row.number(before), row.number(after))
    assert change.low is not None and change.high is not None
    widths = [(number.high or 0) - (number.low or 0) for number in apart]
    # Independent samples: the widths of both sides add in squares.
    assert change.high - change.low < (widths[0] ** 2 + widths[1] ** 2) ** 0.5


def test_titles_fit_what_is_shown(synthetic: SimpleNamespace) -> None:
    def title(**files: dict[str, Any]) -> str:
        return title_of(read_inputs(synthetic.write(**files)))

    assert title(grown=synthetic.diagnosis(0.5)) == "Diagnosis: grown"
    assert title(base=synthetic.evaluation(5)) == "What the model remembers: base"
    assert title(base=synthetic.evaluation(5), big=synthetic.evaluation(9)) == "What the model remembers: base and big"
    assert title(grid=mqar_sweep()) == "Small models trained from scratch: grid"
    assert title(run=training()) == "Training: run"
    many = {f"f{index}": synthetic.diagnosis(0.5) for index in range(6)}
    assert title(**many) == "Diagnosis: f0 and 5 others"


def test_every_kind_of_file_opens_with_words(synthetic: SimpleNamespace) -> None:
    (alone,) = words_of(synthetic.write(base=synthetic.evaluation(5)))
    assert alone.opening.startswith("What was measured of base") and alone.told[0][0] == "Phone book"
    (control,) = words_of(synthetic.write(big=synthetic.evaluation(5), control=synthetic.evaluation(5)))
    assert control.opening.startswith("Big against control, the same training without surgery. Cannot tell: ")
    (sweep,) = words_of(synthetic.write(grid=mqar_sweep()))
    assert sweep.opening.startswith("grid: ") and "no interval" in sweep.method
    (run,) = words_of(synthetic.write(run=training()))
    assert "the training loss went from" in run.opening and "300 steps" in run.opening


def test_a_cache_that_no_file_records_takes_no_column(demo_page: Path, synthetic: SimpleNamespace) -> None:
    section = sizes(read_inputs(synthetic.write(base=synthetic.evaluation(5))))
    assert section is not None and not any("cache" in name for name in section.blocks[0].header)


def test_words_are_never_split_and_paths_only_at_slashes(demo_page: Path) -> None:
    text = demo_page.read_text(encoding="utf-8")
    style = text[text.index("<style>") : text.index("</style>")]
    assert "anywhere" not in style and "break-all" not in style
    assert "experiments/<wbr>results/<wbr>demo/<wbr>before.json" in text
    assert "2026-11-2" in text and " UTC</td>" in text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium to lay out the page")
def test_nothing_scrolls_sideways_at_1200_pixels_and_the_page_never_does(demo_page: Path, tmp_path: Path) -> None:
    """The width of every box that could scroll, as a browser lays it out in a frame as wide as a desk and as a phone.

    The script that looks is in the page around it: a report holds none.
    """
    names = sorted((ROOT / "experiments" / "results" / "length_diagnosis").glob("*.json"))
    diagnoses = build_report([str(name) for name in names], tmp_path / "d.html")
    script = """<script>
        addEventListener("load", () => {
          const page = document.querySelector("iframe").contentDocument, all = page.documentElement;
          const wide = [...page.querySelectorAll(".scroll, .plot")].filter(box => box.scrollWidth > box.clientWidth);
          const names = wide.map(box => box.getAttribute("aria-label"));
          document.documentElement.dataset.wide = JSON.stringify([all.scrollWidth > all.clientWidth, names]);
        });
        </script>"""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", "--window-size=1400,900"]
    for page in (demo_page, diagnoses):
        for width in (1200, 360):
            inside = html.escape(page.read_text(encoding="utf-8"))
            frame = f'<iframe style="width: {width}px; height: 800px; border: 0" srcdoc="{inside}"></iframe>'
            around = tmp_path / "around.html"
            around.write_text(f"<!DOCTYPE html><html><body>{frame}{script}</body></html>", encoding="utf-8")
            command = ["chromium", *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", around.as_uri()]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
            found = re.search(r'data-wide="([^"]*)"', done.stdout)
            assert found is not None
            page_scrolls, boxes = json.loads(html.unescape(found[1]))
            assert not page_scrolls
            assert width < 1200 or boxes == []
