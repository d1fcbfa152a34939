"""What docs/retrieval_evidence/mad.md says is what the recorded sweep says."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.common import pages
from experiments.retrieval import join_sweeps, report_mad
from longrecall.report.sweeps import published_mad
from longrecall.tasks.published import RESONA_TABLE_1_COLUMNS


def rows_of_mad() -> dict[tuple[str, str, bool], dict[str, Any]]:
    """The rows that ended by (task, mixer, with retrieval), of several the best."""
    return {(key[0][4:], *key[1:]): row for key, row in report_mad.best_rows().items()}


def pair(task: str, mixer: str, of: str = "accuracy") -> list[str]:
    """Accuracy or epochs of a mixer without and with retrieval, as the page shows them."""
    found = rows_of_mad()
    values = [found[task, mixer, with_it][of] for with_it in (False, True)]
    return [pages.share(value, 3) if of == "accuracy" else f"{value:.0f}" for value in values]


def test_the_mad_suite_of_the_prose(prose: str) -> None:
    found, stopped = rows_of_mad(), report_mad.open_runs()
    assert len({(key[0][4:], *key[1:]) for key in stopped} | set(found)) == 60
    assert f"{len(stopped)} of the 60 cells show a run that was cut off, all of fuzzy recall" in prose
    assert {task for task, _, _ in stopped} == {report_mad.FUZZY}

    def gains(task: str) -> dict[str, float]:
        both = {m: [found[task, m, with_it]["accuracy"] for with_it in (False, True)] for m in report_mad.MIXERS}
        return {mixer: with_it - without for mixer, (without, with_it) in both.items()}

    recall = {mixer: pair("in_context_recall", mixer) for mixer in report_mad.MIXERS}
    assert sum(without == ".999" for without, _ in recall.values()) == 4 and recall["gla"] == [".849", ".999"]
    assert (
        found["in_context_recall", "gla", True]["epochs"] == 9 and "in-context recall rises from .849 to .999" in prose
    )
    for task in ("in_context_recall", "memorization"):
        for mixer in report_mad.MIXERS:
            without, with_it = (found[task, mixer, flag]["epochs"] for flag in (False, True))
            assert with_it <= without, (task, mixer)
    for mixer, words in (("mamba", "Mamba {1} instead of {0}"), ("mamba2", "Mamba-2 {1} instead of {0}")):
        assert words.format(*pair("in_context_recall", mixer, "epochs")) in prose
    copying = gains("selective_copying")
    lifted = sorted(gain for gain in copying.values() if gain > 0.05)
    assert f"selective copying of three by {pages.number(lifted[0])} to {pages.number(lifted[-1])}" in prose
    for mixer, words in (
        ("gla", "GLA from {} to {}, RWKV-5"),
        ("rwkv5", "RWKV-5 from {} to {}, Mamba"),
        ("mamba", "Mamba from {} to {}."),
        ("mamba2", "Mamba-2 has {1} instead of {0}"),
        ("gated_delta_net", "Gated DeltaNet came to {1} instead of {0}"),
    ):
        assert words.format(*pair("selective_copying", mixer)) in prose
    alone = [value for _, _, value in found["selective_copying", "rwkv5", False]["history"]]
    assert max(alone[:18]) < 0.08 < min(alone[18:]) and "alone was at chance until epoch 18" in prose  # 1/14 = .071
    last = found["selective_copying", "gated_delta_net", True]["history"][-1][2]
    assert f"had fallen to {pages.number(last)} by its last epoch" in prose
    compressed = gains("compression")
    assert sorted(compressed, key=lambda mixer: compressed[mixer])[0] == "mamba"
    less, *more = sorted(compressed.values())
    assert f"gain {pages.number(more[0])} to {pages.number(more[-1])}, Mamba loses {pages.number(-less)}" in prose
    kept = {mixer: pair("memorization", mixer, "epochs") for mixer in report_mad.MIXERS}
    assert "needs {1} epochs instead of {0}".format(*kept.pop("gla")) in prose
    assert max(int(without) - int(with_it) for without, with_it in kept.values()) == 1
    assert all(pair("memorization", mixer) == [".999", ".999"] for mixer in report_mad.MIXERS)
    sizes = {key: row["parameters"] for key, row in found.items()}
    more_parameters = [
        sizes[(*key[:2], True)] / size - 1 for key, size in sizes.items() if not key[2] and (*key[:2], True) in sizes
    ]
    assert f"have {min(more_parameters):.0%} to {max(more_parameters):.0%} more parameters" in prose


def test_the_noisy_recall_of_the_prose(prose: str) -> None:
    noisy = {mixer: pair("noisy_recall", mixer) for mixer in report_mad.MIXERS}
    assert noisy.pop("gla") == [".861", ".999"] and "its noisy recall from .861 to .999" in prose
    assert set(map(tuple, noisy.values())) == {(".999", ".999")}
    needed = {mixer: pair("noisy_recall", mixer, "epochs") for mixer in report_mad.MIXERS}
    assert needed.pop("gla") == ["24", "20"] and "GLA is at .861 after 24, and with retrieval at .999 after 20" in prose
    first, last = (end(int(without) for without, _ in needed.values()) for end in (min, max))
    assert f"reach .999 without it, within {first} to {last} epochs" in prose
    fewer = "Mamba-2 needs {1} epochs instead of {0}, but RWKV-5 needs {3} instead of {2}"
    assert fewer.format(*needed.pop("mamba2"), *needed.pop("rwkv5")) in prose
    assert all(without == with_it for without, with_it in needed.values()) and len(needed) == 2


def test_the_fuzzy_recall_of_the_prose(prose: str) -> None:
    runs = {(run["mixer"], run["with_it"], run["most"]): run for run in report_mad.fuzzy_runs()}
    low = [(mixer, flag, 80) for mixer in ("mamba", "mamba2") for flag in (False, True)]
    assert "four runs of fuzzy recall have half the rate" in prose
    for key, run in runs.items():
        assert (run["rate"], run["decay"]) == ((0.0005, 0.1) if key in low else (0.001, 0.0))
    best = {key: pages.share(run["accuracy"], 3) for key, run in runs.items()}
    last = {key: pages.share(run["history"][-1][2], 3) for key, run in runs.items()}
    alone, later = [[(mixer, flag, 200) for mixer in ("mamba", "mamba2")] for flag in (False, True)]
    assert all(runs[key]["epochs"] == 200 for key in alone)
    losses = [[loss for _, loss, _ in runs[key]["history"]] for key in alone]
    assert all(loss == sorted(loss, reverse=True) for loss in losses) and "training loss falls on and on" in prose
    rows = [row for row in pages.read(report_mad.RECORD)["rows"] if row["task"] == report_mad.FUZZY]
    steps = {row["model"]["mixer"]: row["best_step"] / 100 for row in rows if row["epochs"] == 200}
    ends = " and ".join(last[key] for key in alone)
    shown = f"at {ends}, below their best of {best[alone[0]]} after {steps['mamba']:.0f} epochs and {best[alone[1]]}"
    assert f"{shown} after {steps['mamba2']:.0f}." in prose
    course = ", ".join(f"{best[key]} and then {last[key]}" for key in later)
    assert f"With it they take the same course: {course}." in prose

    words = "Mamba comes to {} without and {} with it, Mamba-2 to {} and {}."
    assert words.format(*(best[key] for key in low)) in prose
    names = {"rwkv5": "RWKV-5", "gated_delta_net": "Gated DeltaNet", "gla": "GLA"}
    shown = [f"{name} {best[mixer, False, 80]} to {best[mixer, True, 80]}" for mixer, name in names.items()]
    assert f"higher with it: {', '.join(shown)}." in prose
    gains = [runs[mixer, True, 80]["accuracy"] - runs[mixer, False, 80]["accuracy"] for mixer in names]
    assert {pages.number(gain) for gain in gains} == {".030"} and prose.count(" are .030 higher with it") == 2
    both = [(mixer, flag, 80) for mixer in names for flag in (False, True)]
    losses = [[loss for _, loss, _ in runs[key]["history"]] for key in [*both, *low]]
    assert all(loss == sorted(loss, reverse=True) for loss in losses) and all(runs[key]["ended"] for key in both)
    assert "They end at {} without and {} with it, {} and {}, {} and {}.".format(*(last[key] for key in both)) in prose
    keys = {s.key for s in join_sweeps.runs_again(pages.read(report_mad.RECORD)["calls"]) if s.training["epochs"] == 80}
    at = [row["best_step"] / 100 for row in rows if row["key"] in keys and row["model"]["mixer"] in names]
    assert len(at) == 6 and f"some epoch between {min(at):.0f} and {max(at):.0f} on in these three" in prose
    # Two runs of the same settings and seed: what they differ by is chance.
    other = (("rwkv5", False, 200), ("gated_delta_net", False, 24))
    assert "came to {} in RWKV-5 and to {} in Gated DeltaNet".format(*(best[key] for key in other)) in prose
    less = [runs[key[0], True, 80]["accuracy"] - runs[key]["accuracy"] for key in other]
    assert f"so that {pages.number(less[0])} and {pages.number(less[1])} are left" in prose
    values = [{step: value for step, _, value in runs["rwkv5", False, most]["history"]} for most in (200, 80)]
    epoch = max(values[0].keys() & values[1].keys(), key=lambda step: abs(values[0][step] - values[1][step]))
    apart = [pages.share(value, 3) for value in sorted(each[epoch] for each in values)]
    assert f"RWKV-5's two stood at {apart[0]} and {apart[1]} after {epoch // 100} epochs" in prose
    column = RESONA_TABLE_1_COLUMNS.index(report_mad.FUZZY)
    for mixer, name in (("mamba2", "Mamba-2"), ("mamba", "Mamba")):
        theirs = [pages.number(published_mad(mixer, flag)[column]) for flag in (False, True)]
        assert "{} from {} to {}".format(name, *theirs) in prose


def test_fuzzy_recall_by_class_in_the_prose(prose: str) -> None:
    found = rows_of_mad()
    said = []
    for mixer, name in (("mamba2", "Mamba-2 has"), ("rwkv5", "RWKV-5"), ("gated_delta_net", "Gated DeltaNet")):
        both = [pages.share(found["fuzzy_recall", mixer, flag]["macro_accuracy"], 3) for flag in (False, True)]
        said.append(" ".join([name, both[0], "without retrieval and" if not said else "and", both[1]]))
    assert f"{said[0]} with it, {said[1]}, {said[2]}" in prose


def test_the_tables_of_a_small_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of a cell, one of them stopped: the suite shows the better, the list of fuzzy recall both."""
    fuzzy = "tasks=[{name: mad_fuzzy_recall, settings: {vocab_size: 16, length: 128, key_tokens: 3, value_tokens: 3}}]"
    shared = ["models.mixers=[mamba2]", "training.learning_rates=[0.001]", "training.weight_decays=[0]"]
    groups = [[fuzzy, "training.epochs=24"]]
    calls = {"recipe": "recipes/sweeps/mad_baseline.yaml", "shared": shared, "groups": groups}
    calls["again"] = [[fuzzy, "training.epochs=200"]]
    (own, _), (longer, other) = ([s for s in specs if s.task == report_mad.FUZZY] for specs in split(calls))
    entry = {
        "task": report_mad.FUZZY,
        "mixer": "mamba2",
        "layer": 0,
        "key": other.key,
        "epochs": 30.5,
        "accuracy": 0.4567,
    }
    entry["history"] = [[100, 2.5, 0.4567], [200, 2.25, 0.4]]
    row = {**own.row(), "epochs": 24.0, "accuracy": 0.3333, "history": [[2400, 2.125, 0.25]], "macro_accuracy": 0.2}
    record = {"calls": calls, "rows": [row], "left": {"cut_off": [entry], "not_started": [], "again": [entry]}}
    monkeypatch.setattr(report_mad, "read", lambda name: record)
    lines = report_mad.mad_table().splitlines()
    assert len(lines) == 2 + 2 * 5 and "not run / .436 " in lines[4] and "| .333 / .211 |" in lines[4]
    assert "| .456, cut off at 30.5 / .629 |" in lines[5]
    assert report_mad.fuzzy_table().splitlines()[2:] == [
        "| mamba2 | without | .0010 | .0 | 24 | .333 | .200 | .250 | 2.12 |",
        "| mamba2 | with | .0010 | .0 | 30.5, cut off | .456 |  | .400 | 2.25 |",
    ]
    lines = report_mad.mad_table("macro_accuracy").splitlines()
    assert "| .200 / .211 |" in lines[4] and ".456" not in lines[5]
    record["rows"].append({**other.row(), "epochs": 200.0, "accuracy": 0.5, "history": [[20000, 2.0, 0.5]]})
    record["left"] = {"cut_off": [{**entry, "accuracy": 0.51}], "not_started": [], "again": []}
    assert "| .510, cut off at 30.5 / .629 |" in report_mad.mad_table()
    record["left"]["cut_off"] = []
    assert "| .500 / .629 |" in report_mad.mad_table()
    for accuracy, shown in ((0.4, ".400"), (0.2, ".333")):
        further = {**longer.row(), "epochs": 200.0, "accuracy": accuracy, "history": [[20000, 2.0, 0.1]]}
        record["rows"] = [row, further]
        assert f"| {shown} / .211 |" in report_mad.mad_table()
    # A run of the sweep itself was stopped, a further one of its cell is not known at all.
    record["left"]["cut_off"] = [{key: value for key, value in entry.items() if key != "key"}]
    epochs = [line.split("|")[5].strip() for line in report_mad.fuzzy_table().splitlines()[2:]]
    assert epochs == ["24", "200", "30.5, cut off"]


def split(calls: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The runs of the calls themselves (without retrieval, with it) and the further ones."""
    further = join_sweeps.runs_again(calls)
    keys = {spec.key for spec in further}
    return [spec for key, spec in join_sweeps.runs_by_key(calls).items() if key not in keys], further
