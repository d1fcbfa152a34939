"""What docs/retrieval_evidence/our_mixers.md says is what the recorded sweep says."""

from __future__ import annotations

import collections
import math

from experiments.common import pages
from experiments.retrieval import cells, join_sweeps
from tests.experiments.retrieval.page import cell_of


def test_the_mixers_of_this_toolkit_without_retrieval(prose: str) -> None:
    rows = {cell: row for cell, row in cells.rows_of(cells.OURS).items() if cell[1] is None}
    best = max(row["accuracy"] for row in rows.values())
    assert best < cells.REACHED and f"Gated DeltaNet comes to {pages.share(best)}." in prose
    assert len(rows) == 48 and "Without it none of the 48 reached .999 in 12 epochs" in prose
    assert "Without retrieval none of the 48 runs reached .999. GLA learned nothing" in prose
    gla = [row for cell, row in rows.items() if cell[0] == "gla"]
    assert f"its {len(gla)} end at {pages.share(max(row['accuracy'] for row in gla))} or less" in prose
    # Guessing among the 4,096 values costs ln 4096 = 8.318.
    losses = sorted(loss for row in gla if 8.25 < (loss := row["history"][-1][1]) < 8.33)
    words = f"{len(losses)} of them end with a training loss of {losses[0]:.2f} to {losses[-1]:.2f}"
    # The sentence calls that of guessing what it writes in the same way.
    assert words in prose and f"{losses[-1]:.2f}" == f"{math.log(4096):.2f}"
    delta = {cell: row["accuracy"] for cell, row in rows.items() if cell[0] == "gated_delta_net"}
    assert max(delta.values()) == best and f"Gated DeltaNet has {pages.share(best)} at its best" in prose
    wide = [value for cell, value in delta.items() if cell[3] >= 128 and cell[2] < 512]
    narrow = [value for cell, value in delta.items() if cell[3] < 128]
    words = f"has {pages.share(min(wide))} or more up to L 256, in narrower models {pages.share(min(narrow))} to"
    assert len(wide) == 6 and f"At d 128 and 256 it {words} {pages.share(max(narrow))}" in prose
    long = [value for cell, value in delta.items() if cell[2] == 512]
    assert len(long) == 4 and f"{pages.share(max(narrow))}, and at L 512 {pages.share(max(long))} or less." in prose
    more = {cell[1:]: row["accuracy"] for cell, row in rows.items() if cell[0] == "gated_delta_net_e4"}
    pairs = [(value, more[cell[1:]]) for cell, value in delta.items()]
    gaps = [plain - subheads for plain, subheads in pairs if max(plain, subheads) >= 0.01]
    words = f"In {len(pairs) - len(gaps)} of the {len(pairs)} cells neither it nor Gated DeltaNet with subheads comes"
    words += f" to .01. In the {len(gaps)} others it is ahead in {sum(gap > 0 for gap in gaps)}, by up to"
    words += f" {pages.number(max(gaps))}, and with subheads in {sum(gap < 0 for gap in gaps)}, by up to"
    assert f"{words} {pages.number(-min(gaps))}." in prose


def test_the_mixers_of_this_toolkit(prose: str) -> None:
    found = cells.rows_of(cells.OURS)
    rows = [row for cell, row in found.items() if cell[1] is not None]
    reached = [row for row in rows if row["reached_at_step"] is not None]
    quick, slowest = sum(row["epochs"] == 1 for row in reached), max(row["epochs"] for row in reached)
    words = (
        f"Of the {len(rows)} runs with retrieval that ended {len(reached)} reached .9995: {quick} in their first epoch"
    )
    assert f"{words}, the slowest after {slowest:.0f}" in prose
    late = {cell: run for cell, run in cells.stopped(cells.OURS).items() if cell[1] is not None}
    words = f"{len(reached)} of the {len(rows)} runs that ended reached .9995, within {slowest:.0f} epochs"
    words += f"; {len(late)} were cut off" * bool(late)
    assert f"{words}. Without it none of the" in prose and len(rows) + len(late) == 96
    short = {cell: row for cell, row in found.items() if cell[1] is not None and row["reached_at_step"] is None}
    lowest = pages.share(min(row["accuracy"] for row in short.values()))
    assert {cell[0] for cell in short} == {"gla"} and {row["epochs"] for row in short.values()} == {24}
    assert f"The other {len(short)}, all GLA, had {lowest} or more at their best in 24 epochs" in prose
    # One of them is far below its best at the end, the others are within .0005.
    fell = {
        cell: row["history"][-1][2] for cell, row in short.items() if row["history"][-1][2] < row["accuracy"] - 5e-4
    }
    place = ("gla", 0, 64, 256)
    assert set(fell) == {place}
    assert f"One of them, at L 64, d 256 with layer 0, fell to {pages.share(fell[place])} at the end." in prose
    places = [("gla", layer, 512, 256) for layer in (0, 2)]
    narrow = [(256, 0), (256, 2), (512, 2)]
    places += [(mixer, i, length, 32) for mixer in cells.OUR_MIXERS[1:] for length, i in narrow]
    assert set(late) == set(places)
    words = "GLA at L 512, d 256 with layer 0 and 2. The others are both kinds of Gated DeltaNet at d 32,"
    words += " at L 256 with layer 0 and 2"
    assert f"{len(late)} were cut off. Two are {words} and at L 512 with layer 2." in prose
    low = {cell: run["accuracy"] for cell, run in late.items() if run["accuracy"] < cells.REACHED}
    assert set(low) == {places[0]}
    words = f"{len(late) - 1} of them had reached .999; GLA with layer 0 had {pages.share(low[places[0]])}."
    assert words in prose
    wide = [cell for cell in found if cell[0] == "gla" and cell[1] is not None and cell[3] == 256]
    came = sum(found[cell]["reached_at_step"] is not None for cell in wide)
    assert f"GLA at d 256 is the slowest: {came} of its {len(wide)} runs that ended came to .9995" in prose
    record = pages.read(cells.OURS)
    specs = join_sweeps.runs_by_key(record["calls"])
    for row in record["rows"]:
        known, most = specs[row["key"]].row(), specs[row["key"]].training["epochs"]
        assert {key: row[key] for key in known} == known and most == (12 if row["model"]["retrieval"] is None else 24)
        assert row["status"] == "done" and row["matmul_precision"] == "high"
        assert (row["epochs"] == most) >= (row["reached_at_step"] is None)
    left = [c for state in ("cut_off", "not_started") for c in record["left"][state]]
    without = [(c["mixer"], c["layer"], c["length"], c["width"]) for c in left]
    assert collections.Counter([*without, *cells.rows_of(cells.OURS)]) == collections.Counter(
        map(cell_of, specs.values())
    )
