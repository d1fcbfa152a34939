"""Sweep files in a report: maps, the suite, published numbers beside ours, what went wrong, bad files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longrecall.cli.main import main
from longrecall.errors import UserError
from longrecall.report import build_report
from longrecall.report.blocks import Plot, Section, Table
from longrecall.report.inputs import read_inputs
from longrecall.report.sections import all_sections
from longrecall.report.sweeps import model_names, published_mad, published_mqar, setting_names
from longrecall.sweep.grid import runs_of
from longrecall.sweep.recipe import SweepRecipe
from longrecall.tasks.mad import mad_settings
from tests.report.test_page import Page

RETRIEVAL = {"layer": 0, "chunk": 2, "top_k": 1}


def model(mixer: str = "mamba2", width: int = 32, layers: int = 4, retrieval: Any = None) -> dict[str, Any]:
    return {"mixer": mixer, "hidden_size": width, "layers": layers, "retrieval": retrieval, "mlp": 0}


def row(task: str, settings: dict[str, Any], described: dict[str, Any], value: float | None, **more: Any) -> Any:
    base = {"task": task, "settings": settings, "model": described, "learning_rate": 1e-3, "weight_decay": 0.1}
    return base | {"seed": 0, "accuracy": value, "status": "done" if value is not None else "failed"} | more


def sweep(rows: list[Any], **more: Any) -> dict[str, Any]:
    training = {"metric": "accuracy", "epochs": 3}
    known = {"schema": 1, "kind": "sweep", "created": "2026-11-21T09:00:00+00:00", "runs": len(rows)}
    return known | {"recipe": {"training": training}, "rows": rows} | more


def mqar_sweep() -> dict[str, Any]:
    rows = []
    for retrieval in (None, RETRIEVAL):
        for width in (32, 64):
            for length in (64, 128):
                settings = {"length": length, "pairs": length // 16, "train": 20000}
                value = 1.0 if retrieval else width / length / 2
                described = model(width=width, retrieval=retrieval)
                rows.append(row("mqar", settings, described, value / 4, learning_rate=1e-2))
                rows.append(row("mqar", settings, described, value))
    return sweep(rows)


def mad_sweep() -> dict[str, Any]:
    """A model that has .5 in every baseline and .7 elsewhere, and one that was run on two tasks alone."""
    rows = []
    for cell in mad_settings():
        settings = {**cell.settings, "train": cell.train}
        described = model(width=128, layers=2)
        rows.append(row(cell.task, settings, described, 0.5 if cell.changed is None else 0.7))
        if cell.task in ("mad_compression", "mad_memorization"):
            rows.append(row(cell.task, settings, model("gla", 128, 2), None if cell.changed is None else 0.9))
    return sweep(rows)


def sections_of(paths: list[str]) -> dict[str, Section]:
    return {section.id: section for section in all_sections(read_inputs(paths))}


def test_mqar_maps_show_the_best_rate_and_the_published_number(synthetic: SimpleNamespace) -> None:
    section = sections_of(synthetic.write(grid=mqar_sweep()))["mqar"]
    (plot,) = section.blocks
    assert isinstance(plot, Plot)
    assert plot.data.header == ("model", "width", "length", "pairs", "accuracy", "published", "learning rate")
    found = {line[:4]: line[4:] for line in plot.data.rows}
    assert found == {
        ("mamba2", "32", "64", "4"): ("0.250", "0.990", "0.001"),
        ("mamba2", "64", "64", "4"): ("0.500", "0.992", "0.001"),
        ("mamba2", "32", "128", "8"): ("0.125", "0.974", "0.001"),
        ("mamba2", "64", "128", "8"): ("0.250", "0.969", "0.001"),
        ("mamba2+R0", "32", "64", "4"): ("1.000", "1.000", "0.001"),
        ("mamba2+R0", "64", "64", "4"): ("1.000", "1.000", "0.001"),
        ("mamba2+R0", "32", "128", "8"): ("1.000", "1.000", "0.001"),
        ("mamba2+R0", "64", "128", "8"): ("1.000", "1.000", "0.001"),
    }
    # Both maps: the shares in percent as texts, the lengths with their pairs, the widths.
    texts = Page(plot.svg).text["text"]
    assert texts.count("100") == 4 and texts.count("25") == 2 and "12" in texts and "50" in texts
    assert {"mamba2", "mamba2+R0", "width"} <= set(texts)
    assert re.search(r">128</|>128\n8</", plot.svg) and re.search(r">8</|>128\n8</", plot.svg)


def test_a_model_that_was_not_run_everywhere_leaves_gaps(synthetic: SimpleNamespace) -> None:
    data = mqar_sweep()
    data["rows"] = data["rows"][2:]
    (plot,) = sections_of(synthetic.write(grid=data))["mqar"].blocks
    assert isinstance(plot, Plot) and Page(plot.svg).text["text"].count("–") == 1


def test_the_mad_suite_averages_cells_then_tasks(synthetic: SimpleNamespace) -> None:
    section = sections_of(synthetic.write(mad=mad_sweep()))["mad"]
    tables = {block.caption: block for block in section.blocks if isinstance(block, Table)}
    lines = {line[0]: line[1:] for line in tables["MAD suite"].rows}
    whole = lines["mamba2 width 128"]
    assert whole[0] == f"{(0.5 + 10 * 0.7) / 11:.3f}\n11 cells"
    assert whole[5] == f"{(0.5 + 5 * 0.7) / 6:.3f}\n6 cells"
    counts = [11, 11, 14, 11, 13, 6]
    assert [int(text.split("\n")[1].split()[0]) for text in whole[:6]] == counts
    assert whole[6] == f"{sum((0.5 + (n - 1) * 0.7) / n for n in counts) / 6:.3f}"
    # A cell in which every run failed counts as 0; without all six tasks there is no mean.
    part = lines["gla width 128"]
    assert part[0].startswith(f"{0.9 * 10 / 11:.3f}") and part[1:5] == ("–",) * 4 and part[6] == "–"
    assert lines["published: mamba2"] == ("0.436", "0.964", "0.967", "0.211", "0.933", "0.869", "0.730")
    assert "published: gla" not in lines
    assert len(tables["MAD suite, cell by cell"].rows) == 66 + 17


def test_failures_are_counted_with_their_reasons(synthetic: SimpleNamespace) -> None:
    settings = {"length": 64, "pairs": 4, "train": 10}
    rows = [
        row("mqar", settings, model(), 0.5),
        row("mqar", settings, model(width=33), None, reason="33 channels are no multiple of 4 heads"),
        row("mqar", settings, model(width=34), None, reason="33 channels are no multiple of 4 heads"),
        row("mqar", settings, model(width=64), 0.1, status="diverged"),
    ]
    section = sections_of(synthetic.write(grid=sweep(rows, runs=7)))["sweeps"]
    tables = {block.caption: block.rows for block in section.blocks if isinstance(block, Table)}
    assert tables["Runs"] == (("grid", "4", "1", "1", "2", "3"),)
    assert tables["Why runs failed"] == (("grid", "33 channels are no multiple of 4 heads", "2"),)


def test_other_tasks_have_a_table(synthetic: SimpleNamespace) -> None:
    section = sections_of(synthetic.write(grid=sweep([row("echo", {"size": 3, "train": 9}, model(), 0.25)])))["sweeps"]
    first = section.blocks[0]
    assert isinstance(first, Table) and first.rows == (("mamba2", "32", "echo", "–", "0.250", "0.001"),)


def test_the_command_writes_a_whole_page_of_several_files(synthetic: SimpleNamespace) -> None:
    paths = synthetic.write(
        grid=mqar_sweep(), again=mqar_sweep(), mad=mad_sweep(), before=synthetic.evaluation(9), run=synthetic.training()
    )
    out = synthetic.folder / "report.html"
    assert main(["report", *paths, "-o", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    ids = page.ids()
    assert len(ids) == len(set(ids)) and {"mqar", "mad", "sweeps", "phonebook", "training"} <= set(ids)
    assert "://" not in text and "grid: mamba2+R0" in text and "again: mamba2+R0" in text
    assert "2026-11-21 09:00 UTC" in text
    assert "grid, sweep: recipe" in text and "training.metric" in text


def test_real_rows_are_understood(synthetic: SimpleNamespace) -> None:
    """What the sweep itself writes into a row before a run; only the results are made up."""
    recipe = SweepRecipe.load(Path(__file__).parent.parent.parent / "recipes" / "sweeps" / "mqar_smoke.yaml")
    rows = [spec.row() | {"accuracy": 0.5, "status": "done"} for spec in runs_of(recipe)]
    (plot,) = sections_of(synthetic.write(smoke=sweep(json.loads(json.dumps(rows)))))["mqar"].blocks
    assert isinstance(plot, Plot)
    assert [line[0] for line in plot.data.rows] == ["gla", "gla+R0"]


def test_names_say_what_differs() -> None:
    one, two = model(layers=2), model(layers=4, retrieval=RETRIEVAL)
    assert model_names([one, two]) == ["mamba2 layers 2", "mamba2+R0 layers 4"]
    both = RETRIEVAL | {"layer": [0, 2]}
    assert model_names([one, model(layers=2, retrieval=both)]) == ["mamba2", "mamba2+R0+R2"]
    chunks = [model(retrieval=RETRIEVAL | {"chunk": chunk}) for chunk in (2, 64)]
    assert model_names(chunks) == ["mamba2+R0 retrieval chunk 2", "mamba2+R0 retrieval chunk 64"]
    assert setting_names([{"length": 64, "train": 9}, {"length": 128, "train": 8}], ["length"]) == [
        "train 9",
        "train 8",
    ]


def test_published_numbers_stand_beside_their_own_cells_alone() -> None:
    cell = {"length": 512, "pairs": 32}
    assert published_mqar(model("mamba", 128), cell) == 0.968
    assert published_mqar(model("rwkv5", 256), cell) == 0.010
    assert published_mqar(model("mamba", 128, retrieval=RETRIEVAL | {"layer": 2}), cell) == 1.0
    assert published_mqar(model("mamba", 128, retrieval=RETRIEVAL | {"layer": 1}), cell) is None
    assert published_mqar(model("mamba", 128, layers=2), cell) is None
    assert published_mqar(model("mamba", 48), cell) is None
    assert published_mqar(model("gla", 128), cell) is None
    assert published_mqar(model("mamba", 128), cell | {"pairs": 64}) is None
    assert published_mad("hyena", True) == pytest.approx((0.426, 0.999, 0.999, 0.662, 0.743, 0.89))
    assert published_mad("transformer", True) is None and published_mad("gla", False) is None


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"rows": None}, '"rows" is missing or not a list of objects; run sweep again'),
        ({"rows": [3]}, '"rows" is missing or not a list of objects; run sweep again'),
        ({"rows": [{"task": "mqar"}]}, 'rows[0] has no valid "status"'),
        ({"rows": [row("mqar", {}, model() | {"retrieval": 3}, 0.5)]}, 'rows[0] has no valid "model.retrieval"'),
        ({"rows": [row("mqar", {}, model(), 1.5)]}, 'rows[0] has no valid "accuracy"'),
        ({"rows": [row("mqar", {}, model(), 0.5, learning_rate=True)]}, 'rows[0] has no valid "learning_rate"'),
    ],
)
def test_broken_files_are_refused(synthetic: SimpleNamespace, change: dict[str, Any], part: str) -> None:
    paths = synthetic.write(grid=mqar_sweep() | change)
    out = synthetic.folder / "report.html"
    with pytest.raises(UserError) as error:
        build_report(paths, out)
    assert part in str(error.value) and "grid.json" in str(error.value) and "\n" not in str(error.value)
    assert not out.exists()
