"""Slopes, recall against the size of the state, other tasks by length, and what makes the page readable to all."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from longrecall.report import build_report, drawing, theme
from longrecall.report.blocks import Note, Plot, Table, spoken
from longrecall.report.inputs import read_inputs
from longrecall.report.length_sections import drawn, other_lengths
from longrecall.report.opening_sections import in_words, title_of
from longrecall.report.overview_plots import spread, state_plot
from longrecall.report.overview_sections import slopes, state_size
from longrecall.report.sections import headline
from longrecall.report.summaries import Number, headlines, recorded
from tests.report.conftest import accuracy, evaluation, write
from tests.report.test_page import Page


def with_needles(data: dict[str, Any], share: float, state: int, reach: int | None = None) -> dict[str, Any]:
    """Add a needle task with depths, one without, one without lengths, and a recall length."""
    results = [*data["results"]]
    for length in (512, 1024):
        for depth in (0.0, 1.0):
            cell = {"task": "niah_single_1", "cell": {"length": length, "depth": depth}}
            results.append({**cell, **accuracy(share * (1 if depth else 0.5), 100)})
            results.append({**cell, **accuracy(0.5, 100), "metric": "prefix_score", "value": 3.5, "high": 4.0})
        results.append({"task": "niah_multivalue", "cell": {"length": length}, **accuracy(share / 2, 100)})
    results.append({"task": "reading", "cell": {"dataset": "squad"}, **accuracy(share, 100)})
    summary = {**data["summary"], "phonebook.capacity": int(100 * share)}
    if reach is not None:
        summary |= {f"niah_single_3.recall_length.threshold={level}": reach for level in ("0.5", "0.6", "0.8")}
    intervals = {"phonebook.capacity": [1, 99]}
    checkpoint = data["checkpoint"] | {"state_size": state}
    return data | {"results": results, "summary": summary, "summary_intervals": intervals, "checkpoint": checkpoint}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write(
        tmp_path_factory.mktemp("results"),
        before=with_needles(evaluation(9), 0.3, 1024, 512),
        after=with_needles(evaluation(38), 0.8, 4096, 2048),
        plain=with_needles(evaluation(12, "control"), 0.4, 1024),
    )


@pytest.fixture(scope="module")
def text(files: list[str]) -> str:
    """The page of all files."""
    return build_report(files, Path(files[0]).parent / "r.html").read_text(encoding="utf-8")


def test_the_page_holds_the_new_sections(text: str) -> None:
    page = Page(text)
    sections = [attributes["id"] for attributes in page.all("section")]
    assert sections[3:5] == ["slopes", "state-size"] and "lengths" in sections
    assert "reading: accuracy" in page.text["caption"] and "niah_single_1: prefix score" in page.text["caption"]
    # A plot is told once: its table is folded beside it and stands nowhere else.
    assert page.text["caption"].count("niah_single_1: accuracy") == 1


def test_slopes_are_means_over_common_cells_and_leave_out_what_is_no_share(files: list[str]) -> None:
    section = slopes(read_inputs(files))
    assert section is not None
    (plot,) = section.blocks
    assert isinstance(plot, Plot)
    rows = {row[:2]: row[2:] for row in plot.data.rows}
    # niah_single_1: the mean of half the share and the share.
    first, second = rows["niah_single_1", "before to after"]
    assert (first.split("\n")[0], second.split("\n")[0]) == ("0.225", "0.600")
    assert rows["niah_multivalue", "before to control"][1].startswith("0.200\n")
    assert not any(task == "bits_per_byte" for task, _ in rows)
    assert "niah_single_1  22% to 60%" in plot.svg and "niah_single_1  22% to 30%" in plot.svg


def test_slopes_need_two_files_and_common_cells(synthetic: SimpleNamespace) -> None:
    (one,) = synthetic.write(a=synthetic.evaluation(9))
    assert slopes(read_inputs([one])) is None
    data = synthetic.evaluation(9)
    apart = [entry | {"cell": {"pairs": 7, "distance": 1}} for entry in data["results"][:1]]
    other = data | {"results": apart, "summary": {}}
    both = synthetic.write(a=data, b=other)
    assert slopes(read_inputs(both)) is None


def test_what_is_below_one_by_chance_is_no_share(synthetic: SimpleNamespace) -> None:
    data = synthetic.evaluation(9)
    bits = {"task": "bits_per_byte", "cell": {"start": 0, "end": 256}, "metric": "bits_per_byte", "value": 0.9}
    graded = {"task": "graded", "cell": {"length": 512}, "metric": "prefix_score", "value": 3.5}
    results = [entry | {"count": 9, "low": None, "high": None} for entry in (bits, graded)]
    inputs = read_inputs(synthetic.write(a=data | {"results": results}, b=data | {"results": results}))
    assert slopes(inputs) is None
    assert drawn(inputs.evaluations) == set() and other_lengths(inputs) is None


def test_state_sizes_are_told_with_capacity_and_reach(files: list[str]) -> None:
    section = state_size(read_inputs(files))
    assert section is not None
    # Three files of two sizes are three dots: numbers say more.
    (table,) = section.blocks
    assert isinstance(table, Table) and not table.hidden
    assert table.header[2:] == (
        "pairs recalled at 90%",
        "niah_single_3: tokens, above 50%",
        "niah_single_3: tokens, above 80%",
    )
    assert table.rows[0] == ("before", "1,024", "30\n1 to 99", "512", "512")
    # The control was not searched.
    assert table.rows[1][3:] == ("–", "–")
    assert state_size(read_inputs(files[::2])) is None, "one size only"


def test_state_sizes_are_drawn_from_three_sizes_and_four_files_on(synthetic: SimpleNamespace) -> None:
    states = {"a": 1024, "b": 2048, "c": 4096, "d": 4096}
    paths = synthetic.write(**{name: with_needles(evaluation(9), 0.3, size) for name, size in states.items()})
    assert state_size(read_inputs(paths[:3])) is None, "the capacity stands among the headline numbers"
    section = state_size(read_inputs(paths))
    assert section is not None
    (plot,) = section.blocks
    assert isinstance(plot, Plot) and plot.data.hidden and len(plot.data.rows) == 4


def test_the_legend_names_only_files_with_a_point(files: list[str]) -> None:
    evaluations = list(read_inputs(files).evaluations)
    labels = [entry.label for entry in evaluations]
    numbers = {label: Number(4.0 if label != labels[1] else None) for label in labels[:2]}
    svg = state_plot(evaluations, {"pairs": numbers}, "s")
    assert [label for label in labels if f">{label}<" in svg] == labels[:1]


def test_lengths_take_first_metrics_that_are_shares(files: list[str]) -> None:
    inputs = read_inputs(files)
    assert drawn(inputs.evaluations) == {("niah_single_1", "accuracy"), ("niah_multivalue", "accuracy")}
    section = other_lengths(inputs)
    assert section is not None
    *explained, lines, depths, table = section.blocks
    assert [block.text.split(":")[0] for block in explained if isinstance(block, Note)] == [
        "One needle in noise",
        "Four values of one needle",
    ]
    assert isinstance(lines, Plot) and isinstance(depths, Plot) and isinstance(table, Table)
    assert lines.data.rows[0][:2] == ("niah_single_1", "512") and lines.data.rows[0][2].startswith("0.225\n")
    assert len(depths.data.rows) == 4 and table.hidden


def test_a_recorded_interval_reaches_the_headline(files: list[str]) -> None:
    (before, *_) = read_inputs(files).evaluations
    assert recorded(before, "phonebook.capacity").high == 99
    row = headlines([before])[0].number(before)
    assert (row.value, row.low, row.high) == (30, 1, 99)
    assert recorded(before, "nothing").value is None


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.floats(0, 1), min_size=1, max_size=14))
def test_labels_keep_their_order_and_their_distance(wanted: dict[str, float]) -> None:
    places = spread(wanted, 0.05)
    ordered = sorted(places.values())
    # Sums of at most 14 numbers below 1 in float64.
    assert all(b - a >= 0.05 - 1e-9 for a, b in pairwise(ordered))
    assert min(ordered) >= -1e-9 and max(ordered) <= 1 + 1e-9
    keys = sorted(wanted, key=lambda key: wanted[key])
    assert [places[key] for key in keys] == ordered
    if len(wanted) == 1:
        assert places == wanted


def test_labels_that_fit_stay_where_they_are() -> None:
    assert spread({"a": 0.2, "b": 0.9, "c": 0.5}, 0.05) == {"a": 0.2, "b": 0.9, "c": 0.5}


# ---- readable without colour, and without eyes


def test_every_series_stands_out_from_the_paper_and_from_the_others() -> None:
    styles = [drawing.line_style(index) for index in range(16)]
    assert {style["color"] for style in styles} == {light for light, _ in theme.SERIES}
    for mode, paper in enumerate(theme.PAGE["paper"]):
        # WCAG 2: graphics need a contrast of 3 to 1, on white paper and in the dark.
        assert min(theme.contrast(pair[mode], paper) for pair in theme.SERIES) >= 3
    assert len({(style["marker"], str(style["linestyle"])) for style in styles}) == 16


def test_a_grid_of_maps_names_its_outer_axes_alone_and_hides_the_empty_place() -> None:
    maps = {name: np.array([[0.25, np.nan]]) for name in ("one", "two", "three")}
    seen: list[str] = []
    svg = drawing.heat_map_grid(
        maps,
        [512, 1024],
        ["row"],
        ("lengths", "rows"),
        "g",
        "Maps",
        across=2,
        finish=lambda _, title: seen.append(title),
    )
    assert seen == ["one", "two", "three"] and all(f">{title}<" in svg for title in maps)
    # Two lines of maps, each with its rows named at the left; lengths under the third and the second.
    assert svg.count(">rows<") == 2 and svg.count(">lengths<") == 2
    assert svg.count(">25<") == 3 and svg.count(">–<") == 3
    assert drawing.heat_map_grid(maps, [512, 1024], ["row"], ("", "rows"), "g", "Maps").count(">rows<") == 1


def test_numbers_on_a_heat_map_can_be_read_on_every_shade() -> None:
    axes = Figure().subplots()
    values = np.linspace(0, 1, 101)[None]
    drawing.heat_map(axes, values, [1] * 101, ["row"], "map")
    shades = axes.collections[0]
    shades.update_scalarmappable()
    assert len(axes.texts) == 101
    for text, share in zip(axes.texts, values[0], strict=True):
        inks = re.findall("#[0-9a-f]{6}", theme.themed(f"fill: {text.get_color()}"))[1:]
        shown = re.findall("#[0-9a-f]{6}", theme.themed(f"fill: {to_hex(theme.SHADES(share))}"))[1:]
        # WCAG 2: text needs 4.5 to 1. Black or white always reaches 4.58.
        assert len(inks) == len(shown) == 2
        assert min(theme.contrast(ink, shade) for ink, shade in zip(inks, shown, strict=True)) >= 4.5


def test_shades_fall_in_grey_too_and_what_is_unknown_is_hatched() -> None:
    axes = Figure().subplots()
    drawing.heat_map(axes, np.array([[0.0, 0.25, 0.5, 0.75, 1.0, np.nan]]), [1] * 6, ["row"], "map")
    shades = axes.collections[0]
    shades.update_scalarmappable()
    grey = [theme.contrast(colour, "k") for colour in shades.get_facecolors()[:5]]
    assert all(a > 1.2 * b for a, b in pairwise(grey))
    dark = [theme.contrast(theme.DARK_SHADES(share), "k") for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert all(1.2 * a < b for a, b in pairwise(dark))
    (hatched,) = axes.patches
    assert hatched.get_hatch() and hatched.get_xy() == (5, 0)
    assert axes.texts[5].get_text() == "–"


def test_contrast_is_wcags() -> None:
    assert theme.contrast("w", "k") == pytest.approx(21)
    # #767676 is the lightest grey that passes 4.5 on white.
    assert theme.contrast("#767676", "w") == pytest.approx(4.54, abs=0.005)


def test_text_can_be_read_in_the_light_and_in_the_dark(text: str) -> None:
    rules = re.findall(r":root {(.*?)}", text)
    assert "prefers-color-scheme: dark" in text and len(rules) == 3
    for rule in rules[:2]:
        colours = dict(re.findall(r"--(\w+): (#\w+)", rule))
        assert {"paper", "ink", "soft", "accent", "line", "s0", "s7"} <= set(colours)
        assert all(theme.contrast(colours[ink], colours["paper"]) >= 4.5 for ink in ("ink", "soft", "accent"))
    # What is printed is light: the dark is for screens.
    assert "@media screen and (prefers-color-scheme: dark)" in text and "color-scheme: light;" in rules[2]


def test_every_colour_of_a_plot_follows_the_page(text: str) -> None:
    """None is fixed: each has a name of the style sheet, or its dark colour beside it."""
    known = set(re.findall(r"--(\w+): #", text))
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        assert set(re.findall(r"var\(--(\w+)\)", svg)) <= known
        left = re.sub(r"(fill|stroke): (#\w+); \1: light-dark\(\2, #\w+\)", "", svg)
        assert re.findall(r"(?:fill|stroke)[:=] ?\"?#\w+", left) == []
        assert not re.search(r"<svg[^>]*font|font-family", svg)  # it has the page's


def test_plots_say_their_numbers(text: str) -> None:
    page = Page(text)
    described = [plot["aria-describedby"] for plot in page.all("svg")]
    assert described and all(described) and set(described) <= set(page.ids())
    told = " ".join(page.text["desc"])
    assert "pairs 4, distance 0, before 0.8" in told
    assert text.count("<desc ") == len(described)


def test_spoken_numbers_stop_somewhere() -> None:
    rows = tuple((f"{index}", f"{index / 100}\n0 to 1") for index in range(30))
    words = spoken(Plot("", "", "", Table("Loss", ("step", "a"), rows)))
    assert words.startswith("Loss. step 0, a 0.0. step 1, a 0.01.")
    assert words.endswith("step 23, a 0.23. 6 more rows are in the table that follows.") and "0 to 1" not in words


def test_the_page_can_be_walked_by_keyboard_and_by_headings(text: str) -> None:
    page = Page(text)
    body = [name for name, _ in page.elements].index("body")
    name, attributes = page.elements[body + 1]
    assert name == "a" and attributes["href"] == "#main" and page.all("main")[0]["id"] == "main"
    assert page.all("html")[0]["lang"] == "en"
    levels = [int(name[1]) for name, _ in page.elements if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.all("th"))
    # HTML lets a figcaption be the first or the last thing in its figure only.
    assert len(re.findall(r"</figcaption>\s*</figure>", text)) == len(page.all("figure"))
    assert ":focus-visible" in text
    # What scrolls can be reached, and says what it is.
    boxes = [attributes for _, attributes in page.elements if attributes.get("class") in ("plot", "scroll")]
    assert len(boxes) == len(page.all("svg")) + len(page.all("table"))
    assert all(box["tabindex"] == "0" and box["role"] and box["aria-label"] for box in boxes)
    assert len({box["aria-label"] for box in boxes if box["class"] == "plot"}) == len(page.all("svg"))


def test_nothing_of_the_page_is_wider_than_a_phone(text: str) -> None:
    """Widths are bounds or shares; only what scrolls in a box of its own may ask for more than 320 pixels."""
    style = text[text.index("<style>") : text.index("</style>")]
    wide = re.findall(r"([^{}]+){[^}]*(?<!max-)(?<!min-)width: (?!100%)[^;}]*", re.sub(r"@media[^{]*", "", style))
    assert wide == []
    least = re.findall(r"([^{};]+){[^}]*?min-width: ([0-9.]+)rem", style)
    assert {selector.strip() for selector, size in least if 16 * float(size) > 320} == {".plot svg"}


# ---- many checkpoints


@pytest.mark.parametrize("count", [4, 5, 12])
def test_many_checkpoints_get_a_row_each_and_words(count: int, synthetic: SimpleNamespace) -> None:
    names = [f"grown {index} of a family whose names are long" for index in range(count)]
    strengths = [6.0 + 5 * (index if index < 3 else 2) for index in range(count)]
    files = {f"f{i}": synthetic.evaluation(strengths[i], names[i]) for i in range(count)}
    inputs = read_inputs(synthetic.write(**files))
    table = headline(inputs).blocks[0]
    if count == 4:
        assert table.header[1:5] == tuple(names) and table.last_counts
        return
    assert [row[0] for row in table.rows] == names and not table.last_counts
    column = table.header.index("phone book: accuracy, all cells")
    assert [row[column].endswith("\nbest") for row in table.rows] == [False, False, *[True] * (count - 2)]
    # Nobody is best where all are alike.
    alike = table.header.index("bits per byte at positions 0 to 256")
    assert not any(row[alike].endswith("best") for row in table.rows)
    words = in_words(inputs).blocks[0]
    assert words.opening.startswith(f"Of {count} checkpoints {names[2]}, ")
    told = {name: sentence for name, sentence, _ in words.told}
    sentence = told["Phone book: accuracy, all cells"]
    assert f" and {names[-1]} alike (0." in sentence and f"next {names[1]} (0." in sentence
    assert sentence.endswith(f"clearly behind. Last: {names[0]} ({table.rows[0][column].splitlines()[0]}).")
    assert title_of(inputs) == f"What the model remembers: {names[0]} and {count - 1} others"


def test_plots_of_many_checkpoints_keep_their_legend_inside(synthetic: SimpleNamespace) -> None:
    """matplotlib warns where a legend or a title leaves no room for a plot; warnings are errors here."""
    name = "a checkpoint with a name that is rather long for a legend"
    files = {f"f{i}": synthetic.evaluation(4.0 + 3 * i, f"{name} {i}") for i in range(9)}  # more than there are colours
    # Two sizes of the state are no curve, however many files have them.
    assert state_size(read_inputs(synthetic.write(**files))) is None
    for i, data in enumerate(files.values()):
        data["checkpoint"]["state_size"] = 20480 + 4096 * i
    text = build_report(synthetic.write(**files), synthetic.folder / "many.html").read_text(encoding="utf-8")
    plots = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(plots) == 6
    for svg in plots:
        width = float(re.search(r'viewBox="0 0 ([0-9.]+) ', svg)[1])
        # A letter of ten points takes six at most, on average.
        starts = re.findall(r'anchor: start[^>]*x="([0-9.]+)"[^>]*>([^<]*)<', svg)
        reach = [float(x) + 6 * len(words) for x, words in starts]
        assert not reach or max(reach) <= width
    assert len(text) < 400_000
    assert drawing.shortened("abcdefghij", 5) == "ab…ij" and drawing.shortened("abc", 3) == "abc"
    assert drawing.folded("plain continued training", 14) == "plain\ncontinued…"
