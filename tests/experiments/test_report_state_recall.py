"""docs/state_recall.md says what the recorded runs say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "state_recall.md"
MEASURES = (("recall_length", "right", "asked"), ("character_recall_length", "characters_right", "characters"))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module: its folder is on the path when it runs."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import report_state_recall

    return report_state_recall


def test_committed_tables_are_what_the_script_makes(script: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert script.pages.renewed(page, script.tables()) == page, "run python experiments/report_state_recall.py"
    assert sorted(match[2] for match in script.pages.MARKED.finditer(page)) == sorted(script.tables())


def test_recall_lengths_follow_from_the_points(script: ModuleType) -> None:
    from longrecall.evaluation.recall_search import maximum_lengths

    for file in (script.TREND, script.ABLATION):
        for row in script.joined(file)["results"]:
            for haystack, points in row["points"].items():
                for measure, right, asked in MEASURES:
                    shares = [{"length": p["length"], "value": p[right] / p[asked]} for p in points]
                    found = {threshold: length or 0 for threshold, length in maximum_lengths(shares).items()}
                    assert row[measure][haystack] == found


def test_every_model_was_run(script: ModuleType) -> None:
    record = script.joined(script.TREND)
    names = [f"{mixer}:{factor}" for mixer in ("gated_delta_net", "gla") for factor in (1, 2, 4, 8)] + ["transformer"]
    found = sorted((row["model"], row["seed"]) for row in record["results"])
    assert found == sorted((name, seed) for name in names for seed in (0, 1))
    assert {row["model"] for row in script.joined(script.ABLATION)["results"]} == set(script.FORMS)


def test_runs_differ_in_their_seed_alone(script: ModuleType) -> None:
    """Settings of all runs of a study are the same but for the seed and when training had to end."""
    others = dict.fromkeys(("first_seed", "until", "seconds", "steps"))
    for pattern in (script.TREND, script.ABLATION):
        settings = [run["settings"] for run in script.joined(pattern)["runs"]]
        assert all({**one, **others} == {**settings[0], **others} for one in settings)


@pytest.fixture
def prose() -> str:
    """The page without its tables, as one line."""
    lines = PAGE.read_text(encoding="utf-8").split("\n")
    return " ".join(" ".join(line for line in lines if not line.startswith("|")).split()).replace("**", "")


def lengths(script: ModuleType, mixer: str, measure: str, kind: str = "number") -> dict[int, list[int]]:
    """Factor -> recall lengths at the lowest threshold, seed by seed."""
    groups = script.by_factor(script.joined(script.TREND), mixer)
    return {
        many: [script.reached(row, f"needles:{kind}", 0.5, measure) for row in rows] for many, rows in groups.items()
    }


def test_what_the_prose_says_of_the_exponents(script: ModuleType, prose: str) -> None:
    record = script.joined(script.TREND)
    powers = {
        (measure, mixer, kind, threshold): script.fitted(record, mixer, kind, threshold, measure)[1]
        for measure in (script.WHOLE, script.SINGLE)
        for mixer in ("gated_delta_net", "gla")
        for kind in script.KINDS
        for threshold in record["thresholds"]
    }
    for (*_, threshold), power in powers.items():
        if threshold == 0.5 and power is not None:
            assert power.slope - power.half < 0 < power.slope + power.half < 1
    single = {key: power for key, power in powers.items() if key[0] == script.SINGLE}
    assert len(single) == 16 and "Of the 16 intervals for characters one leaves out zero" in prose
    (found,) = [key for key, power in single.items() if abs(power.slope) > power.half]
    assert found == (script.SINGLE, "gla", "number", 0.7) and single[found].points == 7
    shown = script.with_half(single[found].slope, single[found].half, 2)
    assert f"{shown} for GLA, numbers, threshold .7, without the one model that has length 0" in prose


def test_the_lengths_of_the_prose(script: ModuleType, prose: str) -> None:
    gla, delta = lengths(script, "gla", script.SINGLE), lengths(script, "gated_delta_net", script.SINGLE)
    mean = {name: {many: sum(both) // 2 for many, both in of.items()} for name, of in (("gla", gla), ("delta", delta))}
    for seed in (0, 1):
        assert min(gla[4][seed], gla[8][seed]) > max(gla[1][seed], gla[2][seed])
        assert delta[4][seed] == max(both[seed] for both in delta.values())
        assert delta[8][seed] < delta[1][seed]
    assert (
        "to {} and {} bytes instead of {} and {}, in the mean".format(*(mean["gla"][many] for many in (4, 8, 1, 2)))
        in prose
    )
    assert (
        "E = 4, {} bytes, and with E = 8, {} bytes, less far than without expansion, {} bytes; in both".format(
            *(mean["delta"][many] for many in (4, 8, 1))
        )
        in prose
    )
    assert "Gated DeltaNet with E = 2 has {} bytes in one and {} in the other".format(*delta[2]) in prose
    rows = script.joined(script.TREND)["results"]
    best = max(rows, key=lambda row: script.reached(row, "needles:number", 0.5))
    furthest = script.reached(best, "needles:number", 0.5)
    (needles,) = [p["needles"] for p in best["points"]["needles:number"] if p["length"] == furthest]
    assert f"more than half of the numbers among {needles} needles ({furthest} bytes)" in prose
    (alone,) = [row for row in rows if script.reached(row, "needles:uuid", 0.5)]
    assert script.reached(alone, "needles:uuid", 0.5) == 64 and alone["points"]["needles:uuid"][0]["needles"] == 1
    assert f"one of the {len(rows)} models alone, at 64 bytes, which is one needle" in prose


def test_who_learned_to_recall(script: ModuleType, prose: str) -> None:
    record, found = script.joined(script.TREND), {}
    for mixer in script.MIXERS:
        shares = [script.share(row, "prose:number") for row in script.models(record, mixer)]
        found[mixer] = tuple(script.number(share, digits=2) for share in (min(shares), max(shares)))
    delta, gla = found["gated_delta_net"], found["gla"]
    assert f"{delta[0]} to {delta[1]} of the time by Gated DeltaNet and {gla[0]} to {gla[1]} by GLA" in prose
    for row in script.models(record, "transformer"):
        assert max(script.share(row, name) for name in row["points"]) < 0.005
    steps = [f"{run['training']['steps']:,}" for run in record["runs"]]
    assert f"did not learn to recall at all in {steps[0]} and {steps[1]} steps" in prose


def test_the_ablation_of_the_prose(script: ModuleType, prose: str) -> None:
    rows = {row["model"]: row for row in script.joined(script.ABLATION)["results"]}
    mean = {form: script.share(row, "needles:number") for form, row in rows.items()}
    shown = {form: script.number(value, digits=2) for form, value in mean.items()}
    assert max(mean, key=mean.__getitem__) == "whole" and min(mean, key=mean.__getitem__) == "1+elu"
    assert f"without subheads recalls most ({shown['whole']} of" in prose and f"least ({shown['1+elu']})" in prose
    assert f"without subheads {shown['whole']} against {shown['headwise']} with them" in prose
    whole, headwise = (script.reached(rows[form], "needles:number", 0.5) for form in ("whole", "headwise"))
    assert f"longest recall length too, {whole} bytes against {headwise}" in prose
    assert whole == max(script.reached(row, "needles:number", 0.5) for row in rows.values())
    assert f"({shown['identity']} and {shown['headwise']}; in the paper" in prose
    assert f"LFM ({shown['lfm']}), ReLU and DPFP ({shown['dpfp']} each)" in prose and shown["dpfp"] == shown["relu"]
    assert max(abs(mean[form] - mean["headwise"]) for form in ("low_rank", "heads", "identity")) < 0.03
    below = {form for form in mean if mean[form] < mean["none"]}
    assert below == {"1+elu", "dpfp", "relu"} and mean["none"] - mean["1+elu"] < 0.035
    of = script.joined(script.TREND)
    pairs = [rows for mixer in script.MIXERS for rows in script.by_factor(of, mixer).values()]
    spread = max(abs(script.share(a, "needles:number") - script.share(b, "needles:number")) for a, b in pairs)
    assert f"differ by up to {script.number(spread, digits=2)} in the mean recall" in prose
    assert {form for form in mean if abs(mean[form] - mean["headwise"]) > spread} == {"whole"}
    assert f"that without subheads, by {script.number(mean['whole'] - mean['headwise'], digits=2)}." in prose
    bits = {form: script.number(row["bits_per_byte"][0]) for form, row in rows.items()}
    best, *others = sorted(bits.values())
    assert bits["heads"] == best and f"({best}; the others {others[0]} to {others[-1]})" in prose
    assert f"{rows['heads']['parameters'] / rows['headwise']['parameters'] - 1:.0%} more parameters" in prose


def test_what_stands_in_the_way(script: ModuleType, prose: str) -> None:
    trend, ablation = script.joined(script.TREND), script.joined(script.ABLATION)
    steps = [f"{record['runs'][0]['training']['steps']:,}" for record in (ablation, trend)]
    assert f"the ablation have {steps[0]} steps and those of the trend {steps[1]}" in prose
    rows = {(row["model"], row["seed"]): row for row in trend["results"]}
    later = {row["model"]: row for row in ablation["results"]}
    found = []
    for before, after in (
        (rows["gated_delta_net:1", 0], later["none"]),
        (rows["gated_delta_net:4", 0], later["headwise"]),
    ):
        assert before["parameters"] == after["parameters"]
        found += [script.number(script.share(row, "needles:number")) for row in (after, before)]
        found += [script.reached(row, "needles:number", 0.5, script.SINGLE) for row in (after, before)]
    assert (
        "E = 1 recalls {} of the numbers instead of {} and half of the characters over {} bytes instead of {}; "
        "with E = 4 it is {} instead of {}, and {} instead of {}."
    ).format(*found) in prose
    fell = [dict(row["losses"])[2200] - row["losses"][-1][1] for row in trend["results"]]
    assert f"by {script.number(min(fell), digits=2)} to {script.number(max(fell), digits=2)} (single" in prose
    runs = [run["training"] for run in trend["runs"]]
    assert {f"{1000 * run['seconds'] / run['steps']:.0f}" for run in runs} == {"107"} and "took 107 ms" in prose
    assert "and {:.0f} to {:.0f} ms at the end".format(*sorted(1000 * run["step_seconds"] for run in runs)) in prose
