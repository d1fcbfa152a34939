from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.report import build_report
from longrecall.report.blocks import Table
from longrecall.report.inputs import read_inputs
from longrecall.report.sections import sizes
from tests.report.conftest import evaluation, training, write

VOID = {"meta", "link", "br", "img", "input", "hr", "wbr"}


class Page(HTMLParser):
    """Elements with their attributes and text; insists on proper nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], "unclosed elements"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.text.setdefault(self._open[-1], []).append(data.strip())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def ids(self) -> list[str]:
        return [attributes["id"] or "" for _, attributes in self.elements if "id" in attributes]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    """The page of a whole demo run: before, after, control and two training runs."""
    folder = tmp_path_factory.mktemp("full")
    paths = write(
        folder,
        before=evaluation(9),
        after=evaluation(38),
        plain=evaluation(12, "control"),
        training=training("after"),
        plain_training=training("control"),
    )
    text = build_report(paths, folder / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


def test_the_page_asks_nothing_of_the_network(full: tuple[str, Page]) -> None:
    text, page = full
    for attributes in (attributes for _, attributes in page.elements):
        for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            assert (attributes.get(name) or "#").startswith("#"), attributes
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.elements}
    assert "://" not in text and "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\((.*?)\)", text))


def test_every_reference_within_the_page_leads_somewhere(full: tuple[str, Page]) -> None:
    text, page = full
    ids = page.ids()
    assert len(ids) == len(set(ids))
    wanted = [a["href"][1:] for _, a in page.elements if (a.get("href") or "").startswith("#")]
    wanted += [a["xlink:href"][1:] for _, a in page.elements if a.get("xlink:href")]
    wanted += [a["aria-labelledby"] for _, a in page.elements if a.get("aria-labelledby")]
    wanted += re.findall(r"url\(#(.*?)\)", text)
    assert wanted and set(wanted) <= set(ids)


def test_plots_have_names_and_tables_for_those_who_do_not_see_them(full: tuple[str, Page]) -> None:
    _, page = full
    plots = page.all("svg")
    # slopes, phone book, pass key by length, pass key map, positions, training
    assert len(plots) == 6
    assert all(plot["role"] == "img" and plot["aria-labelledby"] for plot in plots)
    assert len(page.all("figure")) == len(page.all("figcaption")) == 6
    readings = [text for text in page.text["span"] if text.startswith("How to read it: ")]
    assert len(readings) == 6 and all(text.count(". ") <= 1 and text.endswith(".") for text in readings)
    assert len(page.all("table")) == len(page.all("caption"))
    assert len(page.all("details")) >= 6
    assert page.text["title"][0] == page.text["h1"][0]


def test_sections_say_what_there_is(full: tuple[str, Page]) -> None:
    _, page = full
    sections = [attributes["id"] for attributes in page.all("section")]
    assert sections == [
        "in-words",
        "headline",
        "control",
        "slopes",
        "phonebook",
        "passkey",
        "positions",
        "sizes",
        "training",
        "more",
        "provenance",
    ]
    cells = page.text["td"]
    assert "81,920 (×4)" in cells and "20,480 → 81,920" in cells
    assert "grow_state" in cells


@pytest.mark.usefixtures("undrawn")
def test_a_transformers_cache_stands_beside_the_state_where_it_is_recorded(synthetic: SimpleNamespace) -> None:
    data = synthetic.evaluation(9)
    files = {
        # Width 160, 4 layers: 2 * 160 * 4 numbers a token, of 2 bytes each, over 512 tokens.
        "whole": {"transformer_cache": 1280, "context_length": 512},
        "unknown_context": {"transformer_cache": 1280, "context_length": None},
        "stateless": {"transformer_cache": 1280, "context_length": 512, "state_size": 0},
        "older": {},
    }
    paths = synthetic.write(**{name: data | {"checkpoint": data["checkpoint"] | more} for name, more in files.items()})
    section = sizes(read_inputs(paths))
    assert section is not None
    table = section.blocks[0]
    assert isinstance(table, Table) and "Transformer's cache" in table.header[4]
    assert {row[0]: row[3:] for row in table.rows} == {
        # Half of 1280 * 512 numbers against 20,480.
        "whole": ("80.0 KiB", "1.2 MiB at 512 tokens", "×16.00"),
        "unknown_context": ("80.0 KiB", "2.5 KiB a token", "–"),
        "stateless": ("0 B", "1.2 MiB at 512 tokens", "–"),
        "older": ("80.0 KiB", "not recorded", "–"),
    }
    text = build_report(paths, synthetic.folder / "r.html").read_text(encoding="utf-8")
    assert {"1.2 MiB at 512 tokens", "not recorded"} <= set(Page(text).text["td"])


def test_the_same_files_give_the_same_page(synthetic: SimpleNamespace) -> None:
    paths = synthetic.write(a=synthetic.evaluation(5), b=synthetic.evaluation(9))
    pages = [build_report(paths, synthetic.folder / name).read_bytes() for name in ("x.html", "y.html")]
    assert pages[0] == pages[1]


def test_labels_and_titles_are_text_not_markup(synthetic: SimpleNamespace) -> None:
    paths = synthetic.write(
        a=synthetic.evaluation(5, "<b>&\"'"), b=synthetic.evaluation(9, "$x_1$"), c=synthetic.evaluation(9, "_c")
    )
    text = build_report(paths, synthetic.folder / "r.html", title="<i>t</i>").read_text(encoding="utf-8")
    page = Page(text)
    assert not {"b", "i"} & {tag for tag, _ in page.elements}
    assert "&lt;i&gt;t&lt;/i&gt;" in text
    assert "<b>&\"'" in page.text["th"] and "$x_1$" in page.text["th"]
    # In the plots too: dollars must not start a formula, and an underscore must not hide a line from the legend.
    assert {"$x_1$", "<b>&\"'", "_c"} <= set(page.text["text"])


def test_missing_and_diverged_values_are_dashes(synthetic: SimpleNamespace) -> None:
    data = synthetic.evaluation(5)
    for entry in data["results"]:
        if entry["task"] == "bits_per_byte" and entry["cell"]["start"] >= 1024:
            entry.update(value=None, low=None, high=None)
    paths = synthetic.write(a=data, b=synthetic.evaluation(9, distances=(0,)))
    page = Page(build_report(paths, synthetic.folder / "r.html").read_text(encoding="utf-8"))
    assert "–" in page.text["td"]


@pytest.mark.parametrize(
    "results",
    [
        [],
        [{"task": "mqar", "cell": {"pairs": 4, "kind": "hard"}, "metric": "accuracy", "value": 0.5, "count": 9}],
        [{"task": "passkey", "cell": {"length": 512, "depth": 0.5}, "metric": "accuracy", "value": 0.5, "count": 9}],
        [{"task": "phonebook", "cell": {"pairs": 4}, "metric": "accuracy", "value": 0.5, "count": 9}],
        [{"task": "bits_per_byte", "cell": {"start": 0, "end": 9}, "metric": "bits_per_byte", "value": 2, "count": 9}],
    ],
)
def test_one_cell_alone_makes_a_page(synthetic: SimpleNamespace, results: list[dict[str, Any]]) -> None:
    whole = [entry | {"low": None, "high": None} for entry in results]
    (path,) = synthetic.write(a=synthetic.evaluation(5) | {"results": whole, "summary": {}})
    page = Page(build_report([path], synthetic.folder / "r.html").read_text(encoding="utf-8"))
    for entry in whole:
        assert any(entry["task"] in caption for caption in page.text["caption"])


def test_training_alone_makes_a_page(synthetic: SimpleNamespace) -> None:
    data = synthetic.training(steps=2)
    for row in data["log"]:
        del row["tokens"], row["learning_rate"]
    page = Page(build_report(synthetic.write(t=data), synthetic.folder / "r.html").read_text(encoding="utf-8"))
    assert [attributes["id"] for attributes in page.all("section")] == ["in-words", "training", "provenance"]


def test_without_a_package_the_error_says_what_to_install(
    synthetic: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match=r"jinja2, which .*pip install .*matplotlib"):
        build_report(synthetic.write(a=synthetic.evaluation(5)), synthetic.folder / "r.html")


def test_a_place_that_cannot_be_written(synthetic: SimpleNamespace) -> None:
    paths = synthetic.write(a=synthetic.evaluation(5))
    (synthetic.folder / "file").write_text("")
    for out in (synthetic.folder, synthetic.folder / "file" / "r.html"):
        with pytest.raises(UserError, match="cannot write"):
            build_report(paths, out)
    assert not list(synthetic.folder.glob("*.tmp")) and not list(synthetic.folder.glob(".*.tmp"))


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_the_page_and_says_so(
    synthetic: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = synthetic.write(a=synthetic.evaluation(5), b=synthetic.evaluation(9))
    out = synthetic.folder / "deep" / "r.html"
    assert main(["report", a, b, "-o", str(out), "--label", f"before={a}", "--label", f"after={b}"]) == 0
    assert str(out) in capsys.readouterr().out
    assert {"before", "after", "after − before"} <= set(Page(out.read_text(encoding="utf-8")).text["th"])


def test_a_result_file_is_never_replaced_by_the_page(
    synthetic: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = synthetic.write(a=synthetic.evaluation(5), b=synthetic.evaluation(9))
    Path(synthetic.folder, "link").symlink_to(b)
    before = Path(b).read_bytes()
    for out in (b, str(Path(synthetic.folder, "link"))):
        assert main(["report", a, b, "-o", out]) == 2
        told = capsys.readouterr().err
        assert "would be overwritten; choose another -o" in told and told.count("\n") == 1
    assert Path(b).read_bytes() == before


@pytest.mark.parametrize("label", ["before", "=x.json", "before="])
def test_a_wrong_label_is_refused(
    synthetic: SimpleNamespace, capsys: pytest.CaptureFixture[str], label: str, tmp_path: Path
) -> None:
    (path,) = synthetic.write(a=synthetic.evaluation(5))
    assert main(["report", path, "-o", str(tmp_path / "r.html"), "--label", label]) == 2
    assert "NAME=FILE" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()
