"""What docs/retrieval_evidence/without.md says is what the recorded sweep says."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from experiments.common import pages
from experiments.retrieval import cells, join_sweeps, report, report_controls

CONTROLS = [
    ["models.retrieval=[null]", "models.hidden_sizes=[32, 64]", "training.learning_rates=[0.00464]"],
    ["models.retrieval=[null]", "models.hidden_sizes=[128, 256]", "training.learning_rates=[0.00215]"],
]


def test_the_controls_of_the_prose(prose: str) -> None:
    (ended, left), beside = cells.controls(), report_controls.with_retrieval()
    reached = sum(row["accuracy"] >= cells.REACHED for row in ended.values())
    assert len(beside) == 96 and min(beside.values()) >= cells.REACHED
    assert (len(ended), len(left), reached) == (96, 0, 0)
    assert "All 96 ended. None of these reaches .999, and all 192 cells with the layer do." in prose

    def mean(length: int | None = None) -> str:
        values = [row["accuracy"] for cell, row in ended.items() if length in (None, cell[2])]
        return str(pages.number(statistics.mean(values)))

    with_it = pages.share(statistics.mean(beside[cell] for cell in ended))
    assert f"Their mean is {mean()}, with the layer {with_it}. By length: L 64" in prose
    assert f"By length: {'; '.join(f'L {length} {mean(length)}' for length in (64, 128, 256, 512))}." in prose
    words = f"none of the 96 cells reaches .999. Their mean is {mean()}, with the layer {with_it}"
    assert f"trained in the same way without it, {words}; at L 512 it is {mean(512)}." in prose
    dead = [cell for cell, row in ended.items() if row["accuracy"] < 0.01]
    theirs = sum(float(cells.published(cell[0], *cell[2:])) < 0.01 for cell in dead)
    words = f"{len(dead)} are below .01, where hardly anything has been learned"
    assert f"{words}; the paper has less than .01 in {theirs} of these too" in prose
    best, long = (
        max(values, key=lambda c: ended[c]["accuracy"]) for values in (ended, [c for c in ended if c[2] == 512])
    )
    assert f"The best is {best[0]} at L {best[2]}, d {best[3]} with {pages.share(ended[best]['accuracy'])}" in prose
    past = [value for _, _, value in ended[long]["history"]][-5:]
    assert past == sorted(set(past)) and past[-1] == ended[long]["accuracy"]
    words = f"at L 512 it is {long[0]} at d {long[3]} with {pages.share(past[-1])}, still rising."
    assert words in prose
    more = [
        row["parameters"] / ended[cell[0], None, *cell[2:]]["parameters"] - 1
        for cell, row in cells.best_rows(cells.PRESENT).items()
        if cell[1] is not None and (cell[0], None, *cell[2:]) in ended
    ]
    assert f"The layer adds {min(more):.0%} to {max(more):.0%} of parameters" in prose
    same = sum(
        row.get("matmul_precision") == "high"
        for cell, row in cells.rows_of(cells.PRESENT).items()
        if cell[1] is not None
    )
    assert f"products are in tensor-float-32, which {same} of the cells with the layer have too" in prose
    assert (
        all(row["matmul_precision"] == "high" for row in ended.values())
        and "all controls, and all further runs" in prose
    )


def test_the_paper_and_the_budgets_of_the_prose(prose: str) -> None:
    pairs, budgets = report_controls.paper_pairs(), report_controls.budget_pairs()
    above, same, near, far = report_controls.against_paper([ours - theirs for ours, theirs in pairs.values()])
    words = f"Of {len(pairs)} cells {above} are more than .02 above it, {same} within .02 and {near + far} below"
    assert f"{words}, {far} of them by more than .1." in prose
    words = f"of the {len(pairs)} cells {above} are more than .02 above the paper's, {same} within .02"
    assert f"{words}, {near} up to .1 below, and {far} further below" in prose
    assert far and "The paper's numbers are not reproduced" in prose
    assert f"with 64 epochs and larger batches, of which {len(report_controls.long_runs()[0])} ended." in prose
    late = sum(not ended for _, ended, _ in report_controls.best_runs().values())
    assert f"{late} cells show one that was cut off, for it is higher than the control." in prose
    higher = sum(short > long for short, long in budgets.values())
    lower = sum(short < long for short, long in budgets.values())
    if budgets:
        words = f"Both runs ended in {len(budgets)} cells; the control is higher in {higher} and lower in {lower}"
        assert f"{words} of them" in prose
    stuck = cells.controls()[0].get(("rwkv5", None, 64, 64))
    if stuck is not None:
        assert f"Its control, at .00464, has {pages.number(stuck['accuracy'])}." in prose


def test_how_controls_fail_in_the_prose(prose: str) -> None:
    ended, _ = cells.controls()
    losses = {cell: row["history"][-1][1] for cell, row in ended.items()}
    theirs = {cell: float(cells.published(cell[0], *cell[2:])) for cell in ended}
    heart = [cell for cell, loss in losses.items() if loss < 0.5]
    by_heart = [cell for cell in heart if ended[cell]["accuracy"] < 0.5]
    assert {cell[0] for cell in by_heart} == {"base_conv", "h3", "hyena"} and min(c[3] for c in by_heart) == 64
    words = f"{len(by_heart)} of the first recall less than .5 of the test values: rows learned by heart"
    assert f"{words}, all of base_conv, h3 and hyena, at d 64 or more." in prose
    stuck = [cell for cell, loss in losses.items() if loss > 8]
    words = f"{len(heart)} of the {len(ended)} have a training loss below .5, {len(stuck)} one above 8"
    assert f"{words}, {len(ended) - len(heart) - len(stuck)} lie between." in prose
    assert all(ended[cell]["accuracy"] < 0.01 for cell in stuck) and round(math.log(4096), 2) == 8.32
    *first, last = [mixer for mixer in cells.MIXERS if any(cell[0] == mixer for cell in stuck)]
    known = f"Those above 8, where guessing has 8.32, never began to learn; they are of {', '.join(first)} and {last}."
    assert known in prose
    well = [ended[cell]["learning_rate"] for cell in stuck if theirs[cell] >= 0.9]
    high, low = (sum(abs(rate - known) < 1e-5 for rate in well) for known in (0.00464, 0.00215))
    words = f"{len(well)} of these cells, {high} of them at our rate of .00464 and {low} at .00215"
    assert high + low == len(well) and f"The paper has .9 or more in {words}" in prose
    place = ("rwkv5", None, 128, 32)
    pair = (pages.number(ended[place]["accuracy"]), pages.number(cells.rows_of(cells.PRESENT)[place]["accuracy"]))
    assert "rwkv5 at L 128, d 32 has {} at .00464, and {} in 64 epochs at .00215".format(*pair) in prose
    alike = [cell for cell in ended if cell[0] == "base_conv" and cell[2] >= 128 and cell[3] <= 64]
    gap = max(abs(round(ended[cell]["accuracy"], 3) - theirs[cell]) for cell in alike)
    assert len(alike) == 6 and f"its six controls are within {pages.number(gap)}." in prose


def test_what_the_best_mixer_recalls_in_the_prose(prose: str) -> None:
    ended, _ = cells.controls()
    known = sorted(row["accuracy"] for cell, row in ended.items() if cell[0] == "mamba2" and cell[2] <= 256)
    words = f"mamba2, has {pages.number(known[0])} to {pages.number(known[-1])} up to L 256."
    assert f"The best of the six mixers without it, {words}" in prose
    means = {m: statistics.mean(row["accuracy"] for c, row in ended.items() if c[0] == m) for m in cells.MIXERS}
    assert max(means, key=means.__getitem__) == "mamba2"
    pairs = {cell: pair for cell, pair in report_controls.paper_pairs().items() if cell[0] == "mamba2"}
    above = [pairs.pop(("mamba2", None, *place)) for place in ((256, 64), (256, 256), (512, 64))]
    gaps = [ours - theirs for ours, theirs in pairs.values()]
    below = pages.number(-min(gaps))
    words = "{} against {}, {} against {} and {} against {}".format(*(pages.number(v) for pair in above for v in pair))
    words += f". None of the others is more than {pages.number(max(gaps))} above it or more than {below} below."
    assert f"{len(above)} of its {len(pairs) + len(above)} are far above the paper's, {words}" in prose
    assert f"mamba2's are at most {below} below." in prose
    # It is the closest by its mean distance, the two cells left out.
    every = {
        cell: abs(a - b)
        for cell, (a, b) in report_controls.paper_pairs().items()
        if cell in pairs or cell[0] != "mamba2"
    }
    means = {m: statistics.mean(gap for cell, gap in every.items() if cell[0] == m) for m in cells.MIXERS}
    assert min(means, key=means.__getitem__) == "mamba2"


def test_every_cell_has_a_control() -> None:
    controls, left = cells.controls()
    assert set(controls) == set(report_controls.best_runs(ended_only=True)) == set(cells.grid((None,))) and not left


def test_the_batch_in_the_prose(prose: str) -> None:
    (controls, _), (long, _) = cells.controls(), report_controls.long_runs()
    places = [("mamba", None, 64, 128), ("mamba2", None, 64, 256)]
    shown = [pages.number(runs[place]["accuracy"]) for place in places for runs in (controls, long)]
    words = "mamba at L 64, d 128 has {} with batches of 128 rows and {} with 512. mamba2 at L 64, d 256 has {} and {}."
    assert words.format(*shown) in prose
    pairs = [runs[place] for place in places for runs in (controls, long)]
    other = [runs["mamba", None, 128, 128] for runs in (controls, long)]
    words = "At L 128, d 128 it is the other way round: mamba has {} and {}."
    assert words.format(*(pages.number(row["accuracy"]) for row in other)) in prose
    assert {row["learning_rate"] for row in [*pairs, *other]} == {0.00215}
    assert "At the same rate, .00215, mamba" in prose
    losses = sorted(row["history"][-1][1] for row in pairs)
    assert f"with losses of {pages.number(losses[0])} to {pages.number(losses[-1])}." in prose
    both = report_controls.budget_pairs()
    higher = {mixer: [a > b for c, (a, b) in both.items() if c[0] == mixer] for mixer in cells.MIXERS}
    assert all(higher["mamba2"] + higher["h3"])
    words = f"mamba2's controls are higher in all {len(higher['mamba2'])} cells with both runs, h3's in all"
    places = {cell: a > b for cell, (a, b) in both.items() if cell[0] == "mamba"}
    assert {cell[2] for cell in places} == {64, 128}
    assert all(up == (cell[2] == 64) for cell, up in places.items())
    mamba = [sum(cell[2] == length for cell in places) for length in (64, 128)]
    words += " {}. mamba's are higher in the {} of L 64 and lower in the {} of L 128.".format(len(higher["h3"]), *mamba)
    assert words in prose
    assert not any(higher["hyena"] + higher["rwkv5"])
    words = f"hyena's are lower in all {len(higher['hyena'])}, rwkv5's in all {len(higher['rwkv5'])}."
    assert words in prose
    steps = [{(row["batch_size"], row["steps"]) for row in (runs[cell] for cell in both)} for runs in (controls, long)]
    assert steps == [{(128, 3768)}, {(512, 2560)}]
    assert "24 epochs of batches of 128 are 3,768 steps, 64 of 512 are 2,560." in prose


def test_the_runs_of_64_epochs_of_the_prose(prose: str) -> None:
    rows = cells.rows_of(cells.PRESENT)
    found = {
        cell: (pages.number(row["accuracy"]), cells.published(cell[0], *cell[2:]))
        for cell, row in rows.items()
        if cell[1] is None
    }
    late = {cell: run for cell, run in cells.stopped().items() if cell[1] is None}
    assert len(late) == 15
    known = late["h3", None, 64, 128]
    reached = (pages.share(known["accuracy"], 3), pages.number(known["epochs"], digits=1))
    assert "Of the 15 that were cut off, h3 was at {} after {} of 64 epochs".format(*reached) in prose
    wide = [("base_conv", None, 64, 128), ("hyena", None, 64, 128)]
    pairs = [found[cell] for cell in wide]
    words = "base_conv and hyena at d 128, L 64 have {} and {} against {} and {}."
    assert words.format(*(ours for ours, _ in pairs), *(theirs for _, theirs in pairs)) in prose
    tensor = [cell for cell in found if rows[cell].get("matmul_precision") == "high"]
    assert set(wide) <= set(tensor) and f"{len(tensor)} without it, all controls, and all further runs" in prose
    assert f"{len(found) - len(tensor)} without retrieval" in prose
    ends = {cell: rows[cell]["history"][-1][1] for cell in found}
    heart = [cell for cell, loss in ends.items() if cell[2] == 64 and loss < 0.12]
    values = sorted(float(found[cell][0]) for cell in heart)
    known = (
        f"{len(heart)} of the {sum(cell[2] == 64 for cell in found)} cells at L 64 end with a training loss below .12"
    )
    assert f"{known} and with {pages.number(values[0])} to {pages.number(values[-1])} of the test values" in prose
    slow = sorted(ends[mixer, None, 128, 32] for mixer in ("base_conv", "h3", "hyena"))
    assert f"base_conv, h3 and hyena end with training losses of {slow[0]:.1f} to {slow[-1]:.1f}" in prose
    for mixer, words in (
        ("mamba", "mamba has {} and {} at L 64 and {} at L 128, against {}, {} and {}."),
        ("h3", "h3 is at {}, {} and {} against {}, {} and {}."),
    ):
        known = [found[mixer, None, *place] for place in ((64, 32), (64, 64), (128, 32))]
        assert words.format(*(ours for ours, _ in known), *(published for _, published in known)) in prose
    assert "rwkv5 at d 64, L 64 has {} against {}".format(*found["rwkv5", None, 64, 64]) in prose
    known = [found["rwkv5", None, length, 32] for length in (64, 128)]
    words = "Our `rwkv5` at d 32 is above it, {} and {} against {} and {}, and hyena at L 128 a little."
    assert words.format(*(ours for ours, _ in known), *(theirs for _, theirs in known)) in prose
    assert float(found["hyena", None, 128, 32][0]) > float(found["hyena", None, 128, 32][1])
    short = [float(b) - float(a) for cell, (a, b) in found.items() if cell[0] == "mamba2"]
    assert f"mamba2 is {pages.number(min(short), digits=2)} to {pages.number(max(short), digits=2)} below" in prose
    stuck = [loss for _, loss, _ in rows["rwkv5", None, 64, 64]["history"]]
    assert f"its loss fell from {stuck[0]:.1f} to {stuck[-1]:.1f} in 64 epochs" in prose


def fields(table: str) -> list[list[str]]:
    return [[field.strip() for field in line.split("|")[1:-1]] for line in table.splitlines()]


def without_controls() -> dict[str, Any]:
    """The record as if no control had been begun."""
    own = pages.read(cells.PRESENT)
    calls = {**own["calls"], "controls": []}
    known = join_sweeps.runs_by_key(calls)
    left = {**own["left"], "controls": []}
    return {**own, "calls": calls, "left": left, "rows": [row for row in own["rows"] if row["key"] in known]}


def test_a_control_stands_beside_the_runs_of_the_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four controls: better and worse than the cell's other run, stopped, and of a cell that has no other."""
    own = without_controls()
    own["calls"] = {**own["calls"], "controls": CONTROLS}
    specs = {tuple(join_sweeps.cell(spec).values()): spec for spec in join_sweeps.control_runs(own["calls"])}
    assert set(specs) == set(cells.grid((None,))) and len(specs) == 96
    for spec in specs.values():
        wide = spec.model.hidden_size > 64
        assert spec.training["epochs"] == 24 and spec.learning_rate == (0.00215 if wide else 0.00464)
        assert spec.batch_size == (128 if spec.settings["length"] <= 128 else 64)

    def row(cell: tuple[Any, ...], accuracy: float) -> dict[str, Any]:
        return {**specs[cell].row(), "accuracy": accuracy, "epochs": 24.0, "reached_at_step": None}

    better, worse, alone = ("base_conv", None, 64, 32), ("h3", None, 64, 64), ("hyena", None, 512, 256)
    late = ("mamba", None, 64, 32)
    rows = [row(better, 0.9), row(worse, 0.009), row(alone, 0.9991)]
    entry = {**dict(zip(("mixer", "layer", "length", "width"), late, strict=True)), "key": specs[late].key}
    entry |= {"epochs": 10.5, "accuracy": 0.95}
    for path in (cells.PRESENT, cells.BEFORE):
        (tmp_path / path).write_bytes((pages.RESULTS / path).read_bytes())
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    present = tmp_path / cells.PRESENT

    def tables_of(record: dict[str, Any]) -> dict[str, str]:
        present.write_text(json.dumps(record), encoding="utf-8")
        found: dict[str, str] = report.tables()
        return found

    before = tables_of({**own, "calls": {k: v for k, v in own["calls"].items() if k != "controls"}})
    after = tables_of({**own, "rows": [*own["rows"], *rows], "left": {**own["left"], "controls": [entry]}})
    added = {"controls", "control counts", "beside the paper", "both budgets"}
    assert set(after) == {*before, *added} and {n for n in before if after[n] != before[n]} == {"without retrieval"}
    shown = {(line[0], None, int(line[1])): line[2:] for line in fields(after["controls"])[2:]}
    assert shown[better[:3]][0].startswith(".900 / .999") and shown[alone[:3]][3].startswith(".999 / 1.0000")
    assert shown[late[:3]][0].startswith(".950, cut off at 10.5 / ") and shown[late[:3]][1].startswith("not run / ")
    shown = {(line[0], None, int(line[1])): line[2:] for line in fields(after["without retrieval"])[2:]}
    assert shown[better[:3]][0] == ".900* / .401" and shown[worse[:3]][1] == ".306 / .892"
    assert shown[late[:3]][0] == ".950, cut off at 10.5* / .987" and shown[alone[:3]][3] == ".999* / .173"
    counts = {line[0]: line[1:] for line in fields(after["control counts"])[2:]}
    assert [*counts][6:10] == ["L 64", "L 128", "L 256", "L 512"] and counts["all"][:2] == ["96", "3"]
    assert counts["base_conv"][:7] == ["16", "1", "0", "0", "0", "1", "0"] and counts["base_conv"][7] == ".900"
    assert counts["L 64"][:7] == ["24", "2", "1", "0", "0", "1", "0"] and len(counts["L 64"]) == 9
    assert counts["all"][2:7] == ["1", "0", "0", "1", "1"]
    budgets = {line[0]: line[1:] for line in fields(after["both budgets"])[2:]}
    assert budgets["all"][:3] == ["2", "1", "1"] and budgets["h3"] == ["1", "0", "1", ".009", ".306"]
    assert budgets["rwkv5"] == ["0", "0", "0", "", ""]


def test_the_paper_beside_cells_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = [0.5, 0.02 + 1e-12, 0.021, 0.0, -0.02, -0.03, -0.1, -0.101]
    assert report_controls.against_paper(gaps) == [2, 3, 2, 1] and report_controls.against_paper([]) == [0, 0, 0, 0]
    pairs = report_controls.paper_pairs()
    ended = {c for c in [*cells.rows_of(cells.PRESENT), *cells.controls()[0]] if c[1] is None}
    assert set(pairs) == ended
    line = fields(report_controls.tables()["without retrieval"])[2]
    assert line[2].split(" / ")[0].rstrip("*") == pages.number(pairs["base_conv", None, 64, 32][0])
    assert line[2].endswith(pages.number(pairs["base_conv", None, 64, 32][1]))


def test_every_control_differs_by_the_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded controls have the settings of the rows with retrieval of the same cell."""
    record = pages.read(cells.PRESENT)
    shared = {**record["calls"], "controls": record["calls"].get("controls", CONTROLS)}
    own = {
        tuple(join_sweeps.cell(s).values()): s
        for s in join_sweeps.runs_by_key({**shared, "controls": [], "again": []}).values()
    }
    for control in join_sweeps.control_runs(shared):
        mixer, _, length, width = join_sweeps.cell(control).values()
        for layer in cells.LAYERS:
            beside = own[mixer, layer, length, width]
            assert control.training == beside.training and control.settings == beside.settings
            known, wanted = control.row(), beside.row()
            assert {k for k in known if known[k] != wanted[k]} == {"key", "model"}
            assert {k for k in known["model"] if known["model"][k] != wanted["model"][k]} == {"retrieval"}
