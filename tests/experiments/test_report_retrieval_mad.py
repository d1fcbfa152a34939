"""What docs/retrieval_evidence.md says of the MAD suite is what the recorded sweep says."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.experiments.retrieval_page import experiment, page_prose


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return experiment("report_retrieval", monkeypatch)


@pytest.fixture
def prose() -> str:
    return page_prose()


def rows_of_mad(script: ModuleType) -> dict[tuple[str, str, bool], dict[str, Any]]:
    """The rows that ended by (task, mixer, with retrieval)."""
    rows = script.read(script.MAD)["rows"]
    return {(r["task"][4:], r["model"]["mixer"], r["model"]["retrieval"] is not None): r for r in rows}


def pair(script: ModuleType, task: str, mixer: str, of: str = "accuracy") -> list[str]:
    """Accuracy or epochs of a mixer without and with retrieval, as the page shows them."""
    found = rows_of_mad(script)
    values = [found[task, mixer, with_it][of] for with_it in (False, True)]
    return [script.share(value, 3) if of == "accuracy" else f"{value:.0f}" for value in values]


def test_the_mad_suite_of_the_prose(script: ModuleType, prose: str) -> None:
    record = script.read(script.MAD)
    found = rows_of_mad(script)
    missing = record["left"]["cut_off"] + record["left"]["not_started"]
    assert len(found) + len(missing) == record["runs"] == 60
    stopped = len(record["left"]["cut_off"])
    assert f"{len(missing)} of the 60 runs are missing, all of fuzzy recall: {stopped} were cut off" in prose
    assert {entry["task"] for entry in missing} == {"mad_fuzzy_recall"}
    assert {entry["mixer"] for entry in record["left"]["not_started"]} == {"mamba"} and len(missing) - stopped == 2

    def gains(task: str) -> dict[str, float]:
        both = {m: [found[task, m, with_it]["accuracy"] for with_it in (False, True)] for m in script.MAD_MIXERS}
        return {mixer: with_it - without for mixer, (without, with_it) in both.items()}

    recall = {mixer: pair(script, "in_context_recall", mixer) for mixer in script.MAD_MIXERS}
    assert sum(without == ".999" for without, _ in recall.values()) == 4 and recall["gla"] == [".849", ".999"]
    assert found["in_context_recall", "gla", True]["epochs"] == 9 and "in-context recall from .849 to .999" in prose
    for task in ("in_context_recall", "memorization"):
        for mixer in script.MAD_MIXERS:
            without, with_it = (found[task, mixer, flag]["epochs"] for flag in (False, True))
            assert with_it <= without, (task, mixer)
    for mixer, words in (("mamba", "Mamba {1} instead of {0}"), ("mamba2", "Mamba-2 {1} instead of {0}")):
        assert words.format(*pair(script, "in_context_recall", mixer, "epochs")) in prose
    copying = gains("selective_copying")
    lifted = sorted(gain for gain in copying.values() if gain > 0.05)
    assert f"selective copying of three by {script.number(lifted[0])} to {script.number(lifted[-1])}" in prose
    for mixer, words in (
        ("gla", "GLA from {} to {}, RWKV-5"),
        ("rwkv5", "RWKV-5 from {} to {}, Mamba"),
        ("mamba", "Mamba from {} to {}."),
        ("mamba2", "Mamba-2 has {1} instead of {0}"),
        ("gated_delta_net", "Gated DeltaNet came to {1} instead of {0}"),
    ):
        assert words.format(*pair(script, "selective_copying", mixer)) in prose
    alone = [value for _, _, value in found["selective_copying", "rwkv5", False]["history"]]
    assert max(alone[:18]) < 0.08 < min(alone[18:]) and "alone was at chance until epoch 18" in prose  # 1/14 = .071
    last = found["selective_copying", "gated_delta_net", True]["history"][-1][2]
    assert f"had fallen to {script.number(last)} by its last epoch" in prose
    compressed = gains("compression")
    assert sorted(compressed, key=lambda mixer: compressed[mixer])[0] == "mamba"
    less, *more = sorted(compressed.values())
    assert f"gain {script.number(more[0])} to {script.number(more[-1])}, Mamba loses {script.number(-less)}" in prose
    kept = {mixer: pair(script, "memorization", mixer, "epochs") for mixer in script.MAD_MIXERS}
    assert "needs {1} epochs instead of {0}".format(*kept.pop("gla")) in prose
    assert max(int(without) - int(with_it) for without, with_it in kept.values()) == 1
    assert all(pair(script, "memorization", mixer) == [".999", ".999"] for mixer in script.MAD_MIXERS)
    sizes = {key: row["parameters"] for key, row in found.items()}
    more_parameters = [
        sizes[(*key[:2], True)] / size - 1 for key, size in sizes.items() if not key[2] and (*key[:2], True) in sizes
    ]
    assert f"have {min(more_parameters):.0%} to {max(more_parameters):.0%} more parameters" in prose


def test_the_noisy_recall_of_the_prose(script: ModuleType, prose: str) -> None:
    noisy = {mixer: pair(script, "noisy_recall", mixer) for mixer in script.MAD_MIXERS}
    assert noisy.pop("gla") == [".861", ".999"] and "its noisy recall from .861 to .999" in prose
    assert set(map(tuple, noisy.values())) == {(".999", ".999")}
    needed = {mixer: pair(script, "noisy_recall", mixer, "epochs") for mixer in script.MAD_MIXERS}
    assert needed.pop("gla") == ["24", "20"] and "GLA is at .861 after 24, and with retrieval at .999 after 20" in prose
    first, last = (end(int(without) for without, _ in needed.values()) for end in (min, max))
    assert f"reach .999 without it, within {first} to {last} epochs" in prose
    fewer = "Mamba-2 needs {1} epochs instead of {0}, but RWKV-5 needs {3} instead of {2}"
    assert fewer.format(*needed.pop("mamba2"), *needed.pop("rwkv5")) in prose
    assert all(without == with_it for without, with_it in needed.values()) and len(needed) == 2


def test_the_fuzzy_recall_of_the_prose(script: ModuleType, prose: str) -> None:
    record, fuzzy = script.read(script.MAD), "mad_fuzzy_recall"
    runs = {(r["model"]["mixer"], r["model"]["retrieval"] is not None): r for r in record["rows"] if r["task"] == fuzzy}
    ended = set(runs)
    assert ended == {("mamba2", False), ("mamba2", True), ("gla", False), ("gated_delta_net", False)}
    runs |= {(c["mixer"], c["layer"] is not None): c for c in record["left"]["cut_off"]}
    past = {key: [value for _, _, value in run["history"]] for key, run in runs.items()}
    best = {key: script.share(max(values), 3) for key, values in past.items()}
    assert best == {key: script.share(run["accuracy"], 3) for key, run in runs.items()}
    without, with_it = ("mamba2", False), ("mamba2", True)
    assert f"Mamba-2 has {best[without]} after 24 epochs without it and {best[with_it]} with it" in prose
    assert max(past[with_it][:15]) < 0.18 <= max(past[with_it][:16]) and "stays below .18 for 15 epochs" in prose
    begun = script.share(past[without][14], 3)
    assert f"rises to {best[with_it]}; without it, it has {begun} by then and {best[without]} at best" in prose
    without, with_it = ("gated_delta_net", False), ("gated_delta_net", True)
    assert f"Gated DeltaNet {best[without]}, and {best[with_it]} when it was cut off" in prose
    ahead = [a > b for a, b in zip(past[with_it], past[without], strict=False)]
    assert all(ahead[8:21]) and not ahead[21]
    pair = [script.number(past[key][13]) for key in (with_it, without)]
    assert "ahead with it for long ({} and {} after 14 epochs)".format(*pair) in prose
    epochs = script.number(runs[with_it]["epochs"], digits=1)
    assert f"{best[with_it]} with it at its best in {epochs} epochs, {best[without]} without" in prose
    epochs = script.number(runs["gla", True]["epochs"], digits=1)
    assert f"GLA with it was at {best['gla', True]} when it was cut off at {epochs}" in prose
    other = script.share(max(past["gla", False][: len(past["gla", True])]), 3)
    assert f"without it at {other} at its best in as many" in prose
    assert max(runs["rwkv5", flag]["epochs"] for flag in (False, True)) < 7
    assert {key[0] for key, values in past.items() if max(values) > 0.5} == {"gated_delta_net"}
    column = script.RESONA_TABLE_1_COLUMNS.index(fuzzy)
    for mixer, name in (("mamba2", "Mamba-2"), ("mamba", "Mamba")):
        theirs = [script.number(script.published_mad(mixer, flag)[column]) for flag in (False, True)]
        assert "{} from {} to {}".format(name, *theirs) in prose
        assert mixer == "mamba" or "The paper's {} goes from {} to {}".format(name, *theirs) in prose
