"""The tool that joins recorded sweeps: which rows count, and what it says of cells without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.retrieval import join_sweeps

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "experiments" / "results" / "mqar_table11.json"
CALLS = {
    "recipe": "recipes/sweeps/mqar_smoke.yaml",
    "shared": ["models.retrieval=[{layer: 0, chunk: 2},{layer: 1, chunk: 2}]", "training.learning_rates=[0.01]"],
    "with_retrieval": [["models.hidden_sizes=[16]"], ["models.hidden_sizes=[32]"]],
    "without_retrieval": ["models.retrieval=[null]"],
}


def row(spec: Any, accuracy: float = 1.0, epochs: float = 1.0) -> dict[str, Any]:
    return {**spec.row(), "accuracy": accuracy, "epochs": epochs, "history": [[1, 2.0, accuracy]]}


def name(layer: int, width: int) -> dict[str, Any]:
    return {"mixer": "gla", "layer": layer, "length": 32, "width": width}


@pytest.fixture
def record() -> dict[str, Any]:
    """Two of five rows; of the other three one was cut off."""
    specs = list(join_sweeps.runs_by_key(CALLS).values())
    assert [(s.model.hidden_size, s.model.retrieval and s.model.retrieval["layer"]) for s in specs] == [
        *((16, 0), (16, 1), (32, 0), (32, 1), (32, None))
    ]
    left = {"cut_off": [name(1, 16)], "not_started": [name(1, 32)]}
    head = {"longrecall": "0", "environment": {"hardware": "one"}, "about": "First."}
    return {**head, "calls": CALLS, "left": left, "rows": [row(specs[4], 0.5), row(specs[0])]}


def test_rows_by_key_and_what_is_left(record: dict[str, Any]) -> None:
    specs = list(join_sweeps.runs_by_key(CALLS).values())
    stranger = {**row(specs[1]), "key": "another"}
    later = {
        "environment": {"hardware": "two"},
        "rows": [row(specs[0], 0.1), row(specs[2], 0.9), stranger],
        "running": [row(specs[3], 0.7, 5.5), stranger],
    }
    result, strange = join_sweeps.joined(record, [later], "Second.")
    assert [(r["key"], r["accuracy"]) for r in result["rows"]] == [
        *((specs[0].key, 1.0), (specs[2].key, 0.9), (specs[4].key, 0.5))
    ]
    assert strange == [stranger] and not result["complete"] and result["runs"] == 5
    # Only those without a row; what a file knows of a stopped run goes in.
    stopped = {**name(1, 32), "epochs": 5.5, "accuracy": 0.7, "history": [[1, 2.0, 0.7]]}
    assert result["left"] == {"cut_off": [name(1, 16), stopped], "not_started": []}
    assert result["about"] == "First. Second." and result["environment"] == {"hardware": "two"}
    # A later run of a cell that was stopped early does not hide what an earlier one reached.
    later_one = {**stopped, "accuracy": 0.8, "history": [[1, 2.0, 0.8]]}
    for accuracy, best in ((0.2, stopped), (0.8, later_one)):
        again, _ = join_sweeps.joined(result, [{"rows": [], "running": [row(specs[3], accuracy, 5.5)]}])
        assert again["left"]["cut_off"] == [name(1, 16), best]
    # A run that ended stands for its cell, also where a stopped one had been higher.
    whole, _ = join_sweeps.joined(result, [{"rows": [row(specs[1]), row(specs[3], 0.3)]}])
    assert whole["complete"] and whole["left"] == {"cut_off": [], "not_started": []}
    assert [r["accuracy"] for r in whole["rows"] if r["key"] == specs[3].key] == [0.3]


def test_another_recipe_begins_empty(record: dict[str, Any]) -> None:
    result, strange = join_sweeps.joined(record, [record], "", "recipes/sweeps/mqar_smoke.yaml")
    assert len(result["rows"]) == 2 and not strange
    result, strange = join_sweeps.joined(record, [{"rows": record["rows"]}], "", "recipes/sweeps/mqar_ours.yaml")
    assert result["rows"] == [] and len(strange) == 2
    assert len(result["left"]["not_started"]) == 3 * 2 * 2 * 4  # mixers, layers, widths, lengths


def test_a_record_begins_with_groups() -> None:
    """A suite of several tasks, each with its epochs; here what has no retrieval is open too."""
    shared = ["models.mixers=[mamba2]", "training.learning_rates=[0.001]", "training.weight_decays=[0]"]
    task = "tasks=[{{name: {}, settings: {{vocab_size: 16, length: 32}}}}]"
    names = ("mad_compression", "mad_in_context_recall")
    groups = [[task.format(name), f"training.epochs={n}"] for name, n in zip(names, (5, 7), strict=True)]
    beginning = {"calls": {"recipe": "recipes/sweeps/mad_baseline.yaml", "shared": shared, "groups": groups}}
    specs = list(join_sweeps.runs_by_key(beginning["calls"]).values())
    assert [(s.training["epochs"], s.model.retrieval is not None) for s in specs] == [
        *((5, False), (5, True), (7, False), (7, True))
    ]
    calls = [
        {"rows": [row(specs[0])], "running": [row(specs[3], 0.5, 2.5)]},
        {"rows": [], "environment": {"torch": "2"}},
    ]
    result, strange = join_sweeps.joined(beginning, calls, "All.")
    assert not strange and [r["key"] for r in result["rows"]] == [specs[0].key]
    assert (result["about"], result["runs"], result["environment"]) == ("All.", 4, {"torch": "2"})
    first, second = ({"task": name, "mixer": "mamba2", "length": 32, "width": 128} for name in names)
    stopped = {**second, "layer": 0, "epochs": 2.5, "accuracy": 0.5, "history": [[1, 2.0, 0.5]]}
    assert result["left"]["cut_off"] == [stopped]
    assert result["left"]["not_started"] == [{**first, "layer": 0}, {**second, "layer": None}]


AGAIN = ["models.retrieval=[{layer: 1, chunk: 2}]", "models.hidden_sizes=[32]", "training.learning_rates=[0.1,0.2]"]


def test_further_runs_of_a_cell(record: dict[str, Any]) -> None:
    """A cell at three rates: the rows of all stay, and it is open while none of them is there."""
    specs = list(join_sweeps.runs_by_key(CALLS).values())
    further = join_sweeps.runs_again({**CALLS, "again": [AGAIN]})
    assert [(s.learning_rate, join_sweeps.cell(s)) for s in further] == [(0.1, name(1, 32)), (0.2, name(1, 32))]

    def joined(record: dict[str, Any], **later: list[dict[str, Any]]) -> dict[str, Any]:
        return join_sweeps.joined(record, [{"rows": [], **later}], "", None, [AGAIN])[0]

    def stopped(accuracy: float, key: str) -> dict[str, Any]:
        return {**name(1, 32), "epochs": 4.5, "accuracy": accuracy, "history": [[1, 2.0, accuracy]], "key": key}

    begun = joined(record, running=[row(further[0], 0.3, 4.5), row(further[1], 0.7, 4.5)])
    both = [stopped(0.3, further[0].key), stopped(0.7, further[1].key)]
    assert begun["calls"]["again"] == [AGAIN] and begun["runs"] == 7
    assert begun["left"]["again"] == both and begun["left"]["cut_off"][1:] == both[1:]
    assert begun["left"]["not_started"] == [name(0, 32)]
    # That of the cell's own run goes without a key, and is none of the further ones when it is read again.
    own = {k: v for k, v in stopped(0.9, "").items() if k != "key"}
    third = joined(begun, running=[row(specs[3], 0.9, 4.5)])
    for result in (third, joined(third)):
        assert result["left"]["again"] == both and result["left"]["cut_off"][1:] == [own]
    # A row closes the cell unless a stopped run came further; what was stopped stays known by its key.
    for accuracy, open_cells in ((0.6, both[1:]), (0.8, [])):
        ended = joined(begun, rows=[row(specs[3], accuracy)])
        assert ended["calls"]["again"] == [AGAIN]
        assert ended["left"]["again"] == both and ended["left"]["cut_off"][1:] == open_cells
    whole = joined(ended, rows=[row(further[0], 0.9), row(further[1], 0.4)])
    assert [r["accuracy"] for r in whole["rows"] if r["model"]["hidden_size"] == 32 and r["model"]["retrieval"]] == [
        *(0.8, 0.9, 0.4)
    ]
    assert whole["left"]["again"] == [] and len(whole["left"]["cut_off"]) == 1
    # They are no part of another recipe's record, and a run of no cell of the record is refused.
    other, _ = join_sweeps.joined(whole, [{"rows": []}], "", "recipes/sweeps/mqar_smoke.yaml")
    assert "again" not in other["calls"] and other["runs"] == 5
    with pytest.raises(ValueError, match="no further one"):
        join_sweeps.joined(record, [{"rows": []}], "", None, [["models.hidden_sizes=[48]"]])


CONTROL = ["models.retrieval=[null]", "models.hidden_sizes=[32]", "training.learning_rates=[0.02]"]


def test_controls_stand_beside_the_runs_of_their_cells(record: dict[str, Any]) -> None:
    """A cell without retrieval and its control: neither one's row or stop says anything of the other."""
    own, control = list(join_sweeps.runs_by_key({**CALLS, "controls": [CONTROL]}).values())[-2:]
    place = {**name(0, 32), "layer": None}
    assert join_sweeps.cell(own) == join_sweeps.cell(control) == place and control.learning_rate == 0.02
    assert [spec.key for spec in join_sweeps.control_runs({**CALLS, "controls": [CONTROL]})] == [control.key]

    def joined(record: dict[str, Any], **later: list[dict[str, Any]]) -> dict[str, Any]:
        return join_sweeps.joined(record, [{"rows": [], **later}], controls=[CONTROL])[0]

    begun = joined(record, running=[row(control, 0.9, 4.5)])
    entry = {**place, "epochs": 4.5, "accuracy": 0.9, "history": [[1, 2.0, 0.9]], "key": control.key}
    assert begun["calls"]["controls"] == [CONTROL] and begun["runs"] == 6 and len(begun["rows"]) == 2
    assert begun["left"]["controls"] == [entry] and begun["left"]["cut_off"] == record["left"]["cut_off"]
    # Read again it is the same, and the cell's own run without a row is stopped for itself.
    record = {**begun, "rows": begun["rows"][:1]}
    third = joined(record, running=[row(own, 0.4, 2.5)])
    assert third["left"]["controls"] == [entry]
    assert [(c["layer"], c["accuracy"], "key" in c) for c in third["left"]["cut_off"][1:]] == [(None, 0.4, False)]
    ended = joined(third, rows=[row(control, 0.95)])
    assert [r["key"] for r in ended["rows"]][-1] == control.key and ended["left"]["controls"] == []
    assert ended["left"]["cut_off"] == third["left"]["cut_off"]
    # They are no part of another recipe's record; what has retrieval, or belongs to no cell, is none.
    other, _ = join_sweeps.joined(ended, [{"rows": []}], "", "recipes/sweeps/mqar_smoke.yaml")
    assert "controls" not in other["calls"] and other["runs"] == 5
    for wrong, why in ((CONTROL[1:], "it has retrieval"), ([CONTROL[0], "models.hidden_sizes=[48]"], "no further one")):
        with pytest.raises(ValueError, match=why):
            join_sweeps.joined(record, [{"rows": []}], controls=[wrong])


def test_a_stopped_baseline_is_named(record: dict[str, Any]) -> None:
    specs = list(join_sweeps.runs_by_key(CALLS).values())
    record["rows"].pop(0)
    result, _ = join_sweeps.joined(record, [{"rows": []}])
    assert all(entry["layer"] is not None for entry in result["left"]["not_started"])
    result, _ = join_sweeps.joined(record, [{"rows": [], "running": [row(specs[4], 0.25, 3.5)]}])
    assert [(c["layer"], c["accuracy"]) for c in result["left"]["cut_off"][1:]] == [(None, 0.25)]


def test_table_11_joins_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every recorded row is a run of the recorded calls, and what is open stays as it is."""
    out = tmp_path / "joined.json"
    assert join_sweeps.main([str(RECORD), str(RECORD), "-o", str(out)]) == 0
    before, after = json.loads(RECORD.read_text()), json.loads(out.read_text())
    assert sorted(r["key"] for r in after["rows"]) == sorted(r["key"] for r in before["rows"])
    assert " 0 rows of other runs" in capsys.readouterr().out
    for state in ("cut_off", "not_started"):
        known = sorted(map(str, before["left"][state]))
        assert sorted(map(str, after["left"][state])) == known


def test_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text('{"rows": []}')
    assert join_sweeps.main([str(tmp_path / "x.json"), str(RECORD), "-o", str(tmp_path / "y.json")]) == 2
    assert "calls" in capsys.readouterr().err and not (tmp_path / "y.json").exists()
