"""What docs/retrieval_evidence.md says of this toolkit's own mixers is what the recorded sweep says."""

from __future__ import annotations

import collections
from types import ModuleType

import pytest

from tests.experiments.retrieval_page import cell_of, experiment, page_prose


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return experiment("report_retrieval", monkeypatch)


@pytest.fixture
def prose() -> str:
    return page_prose()


def test_the_mixers_of_this_toolkit(script: ModuleType, prose: str) -> None:
    found = script.rows_of(script.OURS)
    rows, plain = ([row for cell, row in found.items() if (cell[1] is None) == flag] for flag in (False, True))
    reached = [row for row in rows if row["reached_at_step"] is not None]
    quick, slowest = sum(row["epochs"] == 1 for row in reached), max(row["epochs"] for row in reached)
    words = (
        f"Of the {len(rows)} runs with retrieval that ended {len(reached)} reached .9995: {quick} in their first epoch"
    )
    assert f"{words}, the slowest after {slowest:.0f}" in prose
    assert f"{len(reached)} of the {len(rows)} runs that ended reached .9995, within {slowest:.0f} epochs" in prose
    if short := [row["accuracy"] for row in rows if row["reached_at_step"] is None]:
        assert f"The other {len(short)}, all GLA, ended at {script.share(min(short))} or more after 24 epochs" in prose
    late = {cell: run for cell, run in script.stopped(script.OURS).items() if cell[1] is not None}
    high = [run["accuracy"] for run in late.values() if run["accuracy"] >= script.REACHED]
    low = {cell: run["accuracy"] for cell, run in late.items() if run["accuracy"] < script.REACHED}
    assert f"within {slowest:.0f} epochs; {len(late)} were cut off" in prose and len(rows) + len(late) == 96
    assert f"Of the {len(late)} that were cut off {len(high)} had reached .999; the other {len(low)} are GLA" in prose
    assert {cell[0] for cell in low} | {row["model"]["mixer"] for row in rows if row not in reached} == {"gla"}
    assert {cell[2] for cell in low} == {256, 512} and {cell[3] for cell in low} == {128, 256}
    assert f"with {script.share(min(low.values()))} to {script.share(max(low.values()))}." in prose
    wide = [cell for cell in found if cell[0] == "gla" and cell[1] is not None and cell[3] == 256]
    came = sum(found[cell]["reached_at_step"] is not None for cell in wide)
    assert f"GLA at d 256 is the slowest: {came} of these 8 runs came to .9995" in prose
    begun = [cell for cell in script.stopped(script.OURS) if cell[1] is None]
    assert not plain and f"{len(begun)} of these 48 cells had begun" in prose
    record = script.read(script.OURS)
    specs = script.runs_by_key(record["calls"])
    for row in record["rows"]:
        known, most = specs[row["key"]].row(), specs[row["key"]].training["epochs"]
        assert {key: row[key] for key in known} == known and most == (12 if row["model"]["retrieval"] is None else 24)
        assert row["status"] == "done" and row["matmul_precision"] == "high"
        assert (row["epochs"] == most) >= (row["reached_at_step"] is None)
    left = [c for state in ("cut_off", "not_started") for c in record["left"][state]]
    cells = [(c["mixer"], c["layer"], c["length"], c["width"]) for c in left]
    assert collections.Counter([*cells, *script.rows_of(script.OURS)]) == collections.Counter(
        map(cell_of, specs.values())
    )
