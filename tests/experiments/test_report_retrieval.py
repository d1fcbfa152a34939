"""docs/retrieval_evidence.md says what the recorded sweeps and timings say, and no more."""

from __future__ import annotations

import collections
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from longrecall.cli.main import main
from longrecall.sweep.grid import RunSpec, runs_of, shard
from longrecall.sweep.recipe import SweepRecipe

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "retrieval_evidence.md"
PARALLEL, SHARDS = 6, 2
"""Runs at a time and GPUs of the present sweep, as its `about` says."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module: its folder is on the path when it runs."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import report_retrieval

    return report_retrieval


@pytest.fixture
def prose() -> str:
    """The page without its tables, as one line."""
    lines = PAGE.read_text(encoding="utf-8").split("\n")
    return " ".join(" ".join(line for line in lines if not line.startswith("|")).split()).replace("**", "")


def recipe(record: dict[str, Any], overrides: list[str]) -> SweepRecipe:
    return SweepRecipe.load(ROOT / record["calls"]["recipe"], overrides)


def cell_of(spec: RunSpec) -> tuple[Any, ...]:
    model = spec.model.description()
    layer = None if model["retrieval"] is None else model["retrieval"]["layer"]
    return model["mixer"], layer, spec.settings["length"], model["hidden_size"]


def test_committed_tables_are_what_the_script_makes(script: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert script.pages.renewed(page, script.tables()) == page, "run python experiments/report_retrieval.py"
    assert sorted(match[2] for match in script.pages.MARKED.finditer(page)) == sorted(script.tables())


def test_check_fails_on_a_stale_number_and_changes_nothing(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script.pages, "DOCS", tmp_path)
    page = tmp_path / "page.md"
    for text, code in (("| old |\n", 1), (f"\n{script.counts_table()}\n", 0)):
        page.write_text(f"<!-- table: counts -->\n{text}<!-- end -->\n", encoding="utf-8")
        before = page.read_text(encoding="utf-8")
        monkeypatch.setattr("sys.argv", ["report_retrieval.py", "--check"])
        with pytest.raises(SystemExit) as stopped:
            script.pages.write_page("about", "page.md", script.tables)
        assert (stopped.value.code, page.read_text(encoding="utf-8")) == (code, before)


def test_every_cell_ended_or_says_why_not(script: ModuleType) -> None:
    rows, left = script.rows_of(script.PRESENT), script.left()
    with_retrieval = [cell for cell in rows if cell[1] is not None]
    assert collections.Counter([*with_retrieval, *left]) == collections.Counter(script.grid())
    assert set(script.rows_of(script.BEFORE)) <= set(script.grid())
    assert {cell for cell in rows if cell[1] is None} <= set(script.grid((None,)))


def test_what_was_cut_off_follows_from_the_queues(script: ModuleType) -> None:
    record, rows, left = script.read(script.PRESENT), script.rows_of(script.PRESENT), script.left()
    seen = set()
    for call in record["calls"]["with_retrieval"]:
        runs = runs_of(recipe(record, [*record["calls"]["shared"], *call]))
        for index in range(1, SHARDS + 1):
            queue = [cell_of(spec) for spec in shard(runs, index, SHARDS)]
            seen |= set(queue)
            ended = sum(cell in rows for cell in queue)
            # A new run begins when one ends, so these had begun; a shard without a row never had its turn.
            begun = ended + PARALLEL if ended else 0
            expected = {c: "cut off" if i < begun else "not run" for i, c in enumerate(queue) if c not in rows}
            assert {cell: left[cell] for cell in queue if cell not in rows} == expected
            assert all(cell not in rows for cell in queue[begun:])
    assert seen == set(script.grid())


@pytest.mark.parametrize("file", ["PRESENT", "BEFORE"])
def test_rows_were_run_as_the_file_says(script: ModuleType, file: str) -> None:
    record, rows = script.read(getattr(script, file)), script.rows_of(getattr(script, file))
    calls = [[*record["calls"]["shared"], *call] for call in record["calls"]["with_retrieval"]]
    if "without_retrieval" in record["calls"]:
        calls.append(record["calls"]["without_retrieval"])
    specs = {cell_of(spec): (spec, spec.training["epochs"]) for call in calls for spec in runs_of(recipe(record, call))}
    for cell, row in rows.items():
        spec, epochs = specs[cell]
        known = spec.row()
        assert {key: row[key] for key in known if key != "key"} == {k: v for k, v in known.items() if k != "key"}
        assert row["status"] == "done" and row["epochs"] <= epochs
        # Only reaching the mark ends a run before its last epoch.
        assert (row["reached_at_step"] is not None) == (row["accuracy"] >= script.STOP)
        assert row["reached_at_step"] is not None or row["epochs"] == epochs


def test_the_counts_of_the_prose(script: ModuleType, prose: str) -> None:
    rows, left, before = script.rows_of(script.PRESENT), script.left(), script.rows_of(script.BEFORE)
    ended = [row for cell, row in rows.items() if cell[1] is not None]
    quick = sum(row["epochs"] == 1 for row in ended)
    assert min(row["accuracy"] for row in ended) >= script.STOP
    assert f"at least .9995 of the values: {len(ended)} runs, {quick} of them within one pass" in prose
    cut, waiting = (sum(state == word for state in left.values()) for word in ("cut off", "not run"))
    assert f"{cut} runs were still in training when the time was up, and {waiting} had not begun" in prose
    reached = sum(row["accuracy"] >= script.REACHED for row in before.values())
    pairs = script.both()
    shared = sum(a["accuracy"] >= script.REACHED for _, a, _ in pairs)
    assert f"reached .999 in {reached} of {len(before)} runs, and in {shared} of the {len(pairs)} cells" in prose
    assert f"Its worst was {script.share(min(row['accuracy'] for row in before.values()))}" in prose
    whole = [cell for cell in script.grid() if cell[3] in (64, 128)]
    assert all(cell in rows for cell in whole) and f"ended in all {len(whole)} cells" in prose
    known = [before[cell]["accuracy"] >= script.REACHED for cell in whole if cell in before]
    assert f"The first form ended in {len(known)} of them and reached it in {sum(known)}" in prose
    known = [before[cell]["accuracy"] for cell, state in left.items() if state == "cut off" and cell in before]
    assert len(known) == 9 and "nine of them ended, between .9887 and .9992" in prose
    assert (script.share(min(known)), script.share(max(known))) == (".9887", ".9992")
    untried = [c for c in script.grid() if c[1::2] == (2, 32) or c[2:] == (512, 256)]
    assert not any(cell in rows for cell in untried)
    tried = [before[cell]["accuracy"] >= script.STOP for cell in untried if cell in before]
    assert f"{len(untried)} cells. The earlier form ended {len(tried)} of them, {sum(tried)} at .9995" in prose


def test_the_baselines_of_the_prose(script: ModuleType, prose: str) -> None:
    rows = script.rows_of(script.PRESENT)
    found = {c: script.plain(row, c[0], *c[2:]) for c, row in rows.items() if c[1] is None}
    below = sum(float(ours) < float(published) for ours, published in found.values())
    assert f"in {below} of {len(found)} cells" in prose and f"{len(found)} of 96 cells were run" in prose
    for mixer, words in (
        ("mamba", "mamba has {} and {} at L 64 and {} at L 128, against {}, {} and {}."),
        ("h3", "h3 is at {}, {} and {} against {}, {} and {}."),
    ):
        cells = [found[mixer, None, *place] for place in ((64, 32), (64, 64), (128, 32))]
        assert words.format(*(ours for ours, _ in cells), *(published for _, published in cells)) in prose
    assert "rwkv5 at d 64, L 64 has {} against {}".format(*found["rwkv5", None, 64, 64]) in prose
    short = [float(b) - float(a) for cell, (a, b) in found.items() if cell[0] == "mamba2"]
    assert f"mamba2 is {script.number(min(short), digits=2)} to {script.number(max(short), digits=2)} below" in prose
    stuck = [loss for _, loss, _ in rows["rwkv5", None, 64, 64]["history"]]
    assert f"its loss fell from {stuck[0]:.1f} to {stuck[-1]:.1f} in 64 epochs" in prose


def test_the_timings_of_the_prose(script: ModuleType, prose: str) -> None:
    rows = script.timings()
    more, added = collections.defaultdict(list), collections.defaultdict(list)
    for name in script.MODELS:
        for tokens in script.TIMED:
            without, with_it = (rows[f"{name}{kind}: reading {tokens}"]["ms"] for kind in ("", " with retrieval"))
            assert rows[f"{name} with retrieval: reading {tokens}"]["overhead"] == pytest.approx(with_it / without - 1)
            more[tokens > 2048].append(with_it / without - 1)
            added[tokens].append(with_it - without)
    assert f"takes {min(more[True]):.1%} to {max(more[True]):.1%} longer in models" in prose
    assert f"At 2k it takes {min(more[False]):.1%} to {max(more[False]):.1%} longer" in prose
    short, longer = ((f"{min(added[n]):.1f}", f"{max(added[n]):.1f}") for n in (2048, 8192))
    assert "At 2k retrieval adds {} to {} ms, at 8k {} to {} ms".format(*short, *longer) in prose
    # What the page says was not measured is not in the file.
    assert all("error" in row for name, row in rows.items() if "with retrieval: continuing" in name)
    assert not any(name.startswith("transformer") for name in rows)


def test_shares_are_cut_off_and_not_rounded_up(script: ModuleType) -> None:
    shown = [script.share(value) for value in (1.0, 0.99996875, 0.9995, 0.2053125, 0.0)]
    assert shown == ["1.0000", ".9999", ".9995", ".2053", ".0000"]


def test_two_rows_of_one_cell_are_refused(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"model": {"mixer": "h3", "hidden_size": 32, "retrieval": None}, "settings": {"length": 64}}
    monkeypatch.setattr(script, "read", lambda name: {"rows": [row, row]})
    with pytest.raises(ValueError, match="two rows"):
        script.rows_of("x.json")


def test_the_report_reads_both_files(script: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [str(ROOT / "experiments" / "results" / name) for name in (script.PRESENT, script.BEFORE)]
    assert main(["report", *paths, "-o", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "base_conv+R2" in page and "Multi-query associative recall" in page
