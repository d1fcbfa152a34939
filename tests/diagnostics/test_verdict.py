"""Models made to have one illness each get the verdict for it; healthy ones get none."""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall import RecurrentLM, load
from longrecall.cli.main import build_parser
from longrecall.diagnostics import PARTS, Thresholds, diagnose, read_diagnosis, verdict
from longrecall.diagnostics.verdict import fill
from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.training.recipe import Recipe
from tests.conftest import MIXERS
from tests.diagnostics.conftest import ASSETS, FirstTokens, Ring, change_layer, tiny_model

RECIPES = Path(__file__).parents[2]


def base(name: str = "mamba2-base") -> RecurrentLM:
    return load(ASSETS / name, dtype="float32")


def run(model: Any, tokenizer: Any, text: str, parts: str, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"multiple": 4, "sequences": 3, "progress": False, "recall_samples": 10}
    result = diagnose(model, tokenizer, text, parts=parts.split(","), **(arguments | changes))
    # Whatever a model does, the result is plain JSON.
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    for finding in result["verdict"]:
        check_advice(finding["advice"])
    return result


@pytest.mark.parametrize(
    ("low", "high", "name", "words"),
    [
        (0.02, 0.06, "healthy", "perplexity: the loss stays within 0.06 nats of its 64-token level"),
        (-0.01, 0.004, "healthy", "the loss stays at its 64-token level"),
        (-0.09, -0.01, "healthy", "the loss stays at its 64-token level"),
        (
            0.12,
            0.2,
            "length",
            "perplexity rises above its 64-token level at 64: the loss is 0.16 (95% interval 0.12 to 0.20)",
        ),
        (-0.9, 1.1, "unsure", "the loss is 0.10 (95% interval -0.90 to 1.10) nats per token above it"),
        (None, None, "unsure", "is 0.60 (no interval from a single window) nats per token above it"),
    ],
)
def test_the_loss_is_told_as_its_interval_has_it(low: float | None, high: float | None, name: str, words: str) -> None:
    rise = 0.6 if low is None or high is None else (low + high) / 2
    entry = {"start": 64, "end": 128, "loss": 3.0, "rise": rise, "rise_low": low, "rise_high": high, "count": 3}
    result = {
        "checkpoint": {"path": "ckpt", "parameters": 1, "surgery": []},
        "settings": {"training_length": 64, "multiple": 2, "parts": ["perplexity"], "sequences": 8},
        "perplexity": [entry],
    }
    (finding,) = verdict(result)
    assert finding["finding"] == name and words in finding["text"]
    if name == "unsure":
        # Three windows of eight: the text had no more.
        assert "with a longer text" in finding["advice"] and "--text LONGER_TEXT" in finding["advice"]
    check_advice(finding["advice"])


def findings(result: dict[str, Any]) -> list[str]:
    return [finding["finding"] for finding in result["verdict"]]


@functools.cache
def check_advice(advice: str) -> None:
    """The commands of an advice are those that longrecall takes, down to the keys of the recipe."""
    found = re.findall(r"longrecall (?:train|expand|diagnose|eval) .*?(?=; or |$)", advice)
    assert found or "no method of expand enlarges" in advice
    for command in found:
        words = shlex.split(command)[1:]
        args = build_parser((words[0],)).parse_args(words)
        if words[0] == "train":
            Recipe.load(RECIPES / args.recipe, args.overrides)


@pytest.mark.parametrize("name", ["gla-base", "mamba2-base"])
def test_the_shipped_bases_are_healthy_at_twice_their_length(name: str, tokenizer: Any, held_out: str) -> None:
    result = run(base(name), tokenizer, held_out, "perplexity,state,remembrance,recall", multiple=2, recall_samples=20)
    assert findings(result) == ["healthy"]
    assert result["settings"]["training_length"] == 512
    assert "pass keys are recalled up to 1024 tokens" in result["verdict"][0]["text"]
    assert result["checkpoint"]["fingerprint"] == base(name).fingerprint()


def test_a_decay_that_almost_stops_makes_perplexity_leave_its_level(tokenizer: Any, held_out: str) -> None:
    model = base()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.A_log -= 4.0  # the state forgets 55 times slower, so it outgrows what the layer was trained on
    result = run(model, tokenizer, held_out, "perplexity", multiple=8)
    (finding,) = result["verdict"]
    assert finding["finding"] == "length" and "state passing" in finding["advice"]
    numbers = finding["numbers"]
    assert numbers["position"] >= 512 and numbers["rise_low"] > Thresholds().length_rise and numbers["rise_at_end"] > 1
    entry = next(entry for entry in result["perplexity"] if entry["start"] == numbers["position"])
    assert entry["rise"] == numbers["rise"] and f"at {entry['start']}" in finding["text"]


def test_a_model_that_breaks_at_a_position_is_said_to_break_there(tokenizer: Any, held_out: str) -> None:
    def blow_up(y: Any, state: Any, position: Any) -> Any:
        return torch.where((position >= 861)[..., None], -9.0 * y, y), state

    result = run(change_layer(base(), 2, blow_up), tokenizer, held_out, "perplexity")
    assert findings(result) == ["length"] and result["verdict"][0]["numbers"]["position"] == 861


def test_a_state_that_forgets_nothing_drifts(tokenizer: Any, held_out: str) -> None:
    model = base("gla-base")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.gk_proj[1].bias += 30.0
    result = run(model, tokenizer, held_out, "state", multiple=8)
    (finding,) = result["verdict"]
    assert finding["finding"] == "state" and finding["numbers"]["growth"] > 4
    assert (finding["numbers"]["from"], finding["numbers"]["to"]) == (512, 4096)
    assert findings(run(base("gla-base"), tokenizer, held_out, "state", multiple=8)) == ["healthy"]


def test_first_tokens_that_rule_the_prediction(tokenizer: Any, held_out: str) -> None:
    result = run(FirstTokens(), tokenizer, held_out, "remembrance", sequences=8)
    (finding,) = result["verdict"]
    assert finding["finding"] == "remembrance" and finding["numbers"]["t"] == 128
    assert finding["numbers"]["low"] > 0.25 and "first 128 of 256 tokens" in finding["text"]


ENDS = (
    "recall ends between 256 and 1024 tokens: accuracy is 1.000 (95% interval 0.616 to 1.000, 10 keys) at 256 and "
    "0.200 (95% interval 0.064 to 0.479, 20 keys) at 1024 while the state is"
)


@pytest.mark.parametrize(
    ("slots", "keep", "text", "advice"),
    [
        (256, 256, f"{ENDS} full", "longrecall expand"),
        (512, 256, f"{ENDS} not full", "longer contexts"),
        (256, 1, "no recall: at 128 tokens, the shortest pass key prompt, accuracy is 0.000 (95% int", "dense recall"),
    ],
)
def test_recall_that_ends(slots: int, keep: int, text: str, advice: str, tokenizer: Any, held_out: str) -> None:
    result = run(Ring(slots, keep), tokenizer, held_out, "state,recall", sequences=2)
    assert findings(result) == ["recall"]
    assert result["verdict"][0]["text"].startswith(text) and advice in result["verdict"][0]["advice"]
    if keep > 1:
        filled = fill(result, 256)
        assert filled is not None and (filled["low"] > 0.75) == (slots == keep) and filled["position"] == 256
        assert f"{filled['value']:.0%} of the directions" in result["verdict"][0]["text"]
        # Within the training length it is a matter of training.
        (within,) = verdict(result | {"settings": result["settings"] | {"training_length": 1024}})
        assert ("dense recall within" in within["advice"]) == (slots != keep)
        # The same without the state, and with keys too few to say anything.
        alone = result | {"state": {"positions": [], "layers": []}}
        (finding,) = verdict(alone)
        assert "whether the state is full was not measured" in finding["text"]
        assert "--parts state,recall" in finding["advice"]
        few = [point | {"low": 0.1, "high": 0.8} for point in result["recall"]["points"]]
        open_end, healthy = verdict(result | {"recall": {"points": few}})
        assert open_end["finding"] == "unsure" and open_end["text"].startswith("it is unclear whether recall ends: at")
        assert "--parts recall --recall-doublings 5" in open_end["advice"] and healthy["text"] == "healthy in state"


@settings(max_examples=8, deadline=None)
@given(place=st.integers(0, 127), kind=st.sampled_from(["activations", "state", "both"]), segment=st.integers(1, 64))
def test_divergence_is_found_at_its_token_and_layer(place: int, kind: str, segment: int) -> None:
    def spoil(y: Any, state: Any, position: Any) -> Any:
        bad = position >= place
        if kind == "activations":
            return torch.where(bad[..., None], math.nan, y), state
        broken = torch.where(bad.any(1)[:, None, None, None], math.inf, state["recurrent"])
        return torch.where(bad[..., None], math.nan, y) if kind == "both" else y, state | {"recurrent": broken}

    model = change_layer(tiny_model(MIXERS["retnet"], MIXERS["gla"], MIXERS["mamba2"]), 1, spoil)
    result = run(model, byte_tokenizer(), "some text " * 60, "perplexity,state", segment_tokens=segment)
    first = result["verdict"][0]
    assert first["finding"] == "diverged"
    # Where both are bad the state is named: it is what the output was made from.
    made = "activations" if kind == "activations" else "state"
    assert (first["numbers"]["position"], first["numbers"]["layer"], first["numbers"]["place"]) == (place, 1, made)
    assert ("state passing" in first["advice"]) == (place >= 32)
    # A state that breaks shows in the logits from the next segment on.
    late = place + (segment if kind == "state" else 1)
    assert all(entry["loss"] is None for entry in result["perplexity"] if entry["start"] > late)
    # Chunks of the recurrences multiply NaN with zero, so the whole segment is lost, but no more.
    assert all(entry["loss"] is not None for entry in result["perplexity"] if entry["end"] <= place - segment)


@pytest.mark.parametrize(("parts", "position"), [("remembrance", 90), ("recall", 100)])
def test_every_part_reports_divergence(parts: str, position: int, tokenizer: Any) -> None:
    def spoil(y: Any, state: Any, at: Any) -> Any:
        return torch.where((at >= position)[..., None], math.nan, y), state

    model = change_layer(tiny_model(MIXERS["gla"]), 0, spoil)
    result = run(model, tokenizer, "some text " * 60, parts)
    assert findings(result)[0] == "diverged"
    assert result["divergence"] == [
        {"part": parts, "position": position, "layer": 0, "place": "activations"}
        | {"sequences": result["divergence"][0]["sequences"]}
    ]
    if parts == "remembrance":
        assert result["remembrance"]["points"][0]["value"] is None


def test_verdicts_are_a_function_of_the_result_and_of_the_thresholds(tokenizer: Any, held_out: str) -> None:
    result = run(base("gla-base"), tokenizer, held_out, "perplexity,state,remembrance", multiple=2)
    assert verdict(result) == result["verdict"]
    strict = Thresholds(length_rise=-9.0, remembrance=-1.0, growth=0.1)
    assert [f["finding"] for f in verdict(result, strict)] == ["length", "remembrance", "state"]


def test_one_window_has_no_intervals_and_settles_nothing(tokenizer: Any, held_out: str) -> None:
    result = run(base("gla-base"), tokenizer, held_out, "perplexity,state,remembrance", sequences=1, multiple=2)
    assert result["perplexity"][0]["low"] is None and findings(result) == ["unsure"] * 3
    assert [finding["numbers"]["part"] for finding in result["verdict"]] == ["perplexity", "remembrance", "state"]
    for finding in result["verdict"]:
        assert "no interval from a single window" in finding["text"] and "--sequences 4" in finding["advice"]


def test_a_grid_without_early_starts_is_not_judged(tokenizer: Any, held_out: str) -> None:
    result = run(tiny_model(MIXERS["gla"]), tokenizer, held_out, "remembrance", starts=[120])
    assert result["verdict"] == []
    result = run(tiny_model(MIXERS["gla"]), tokenizer, held_out, "state,remembrance", starts=[120])
    assert result["verdict"][-1]["text"] == "healthy in state (not judged: remembrance)"


def test_expand_is_advised_for_the_layers_that_fit(tokenizer: Any) -> None:
    heads = [{"effective_rank": [3.9], "norm": [1.0]}]
    names = ("mamba2", "gated_delta_net", "mamba2")
    layers = [
        {"layer": index, "mixer": name, "key_dim": 4, "value_dim": 8, "heads": heads}
        for index, name in enumerate(names)
    ]
    points = [{"length": n, "value": v, "low": v, "high": v, "count": 9} for n, v in ((128, 1.0), (256, 0.1))]
    full = {"position": 1024, "value": 0.9, "low": 0.8, "high": 0.95, "count": 8}
    result: dict[str, Any] = {
        "checkpoint": {"path": "my model", "layers": 4},
        "settings": {"training_length": 64, "multiple": 16, "parts": ["state", "recall"], "text": "a.txt"},
        "state": {"positions": [1024], "layers": layers, "fill": [full]},
        "recall": {"points": points, "maximum": {"0.5": 128}},
    }
    (finding,) = verdict(result)
    commands = finding["advice"].split("; or ")
    assert commands[0].endswith("longrecall expand 'my model' bigger/ --method grow_state --layers all")
    retrieval = "longrecall expand 'my model' retrieving/ --method add_retrieval --layers "
    assert commands[1].endswith(f"{retrieval}0,1,2 --chunk 8") and len(commands) == 2
    check_advice(finding["advice"])

    def advice_for(*mixers: str) -> str:
        result["state"]["layers"] = [layers[0] | {"layer": n, "mixer": mixer} for n, mixer in enumerate(mixers)]
        advice: str = verdict(result)[0]["advice"]
        check_advice(advice)
        return advice

    lstm = advice_for("lstm")
    assert "no method of expand enlarges the state of lstm; add retrieval" in lstm
    assert lstm.endswith(f"{retrieval}0 --chunk 8")
    assert "finish the handover" in advice_for("gla (old)", "gla (new)")
    # Mixers inside retrieval layers can grow; retrieval comes once.
    inside = advice_for("gla (base)", "gla (base)", "mamba2")
    assert "--method merge_heads --layers all; or " in inside and inside.endswith(f"{retrieval}2 --chunk 8")
    assert "retrieving/" not in advice_for("gla (base)")
    # So can branches, but no second block of a layer.
    branches = advice_for("mamba2 (ssm)", "mamba2 (base.ssm)", "retnet")
    assert "--method grow_state --layers all" in branches and branches.endswith(f"{retrieval}0,2 --chunk 8")
    assert "no method of expand enlarges" in advice_for("mamba2 (second)")


def test_a_model_of_attention_alone_has_no_state_to_look_at(tokenizer: Any) -> None:
    model, text = tiny_model(MIXERS["attention_window"]), "some text " * 60
    result = diagnose(model, tokenizer, text, multiple=4, sequences=2, progress=False, recall_samples=5)
    assert result["settings"]["parts"] == ["perplexity", "remembrance", "recall"]
    assert result["state"] == {"positions": [], "fill": [], "layers": []}
    with pytest.raises(UserError, match="no recurrent layers"):
        run(model, tokenizer, text, "state")


def test_a_file_is_read_back_and_a_broken_one_refused(tokenizer: Any, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "diagnosis.json"
    result = run(tiny_model(MIXERS["gla"]), tokenizer, "some text " * 60, "perplexity", out=out)
    assert read_diagnosis(out) == result
    for change, message in (
        ({"schema": 9}, "schema 9"),
        ({"kind": "evaluation"}, "kind \"evaluation\"|kind 'evaluation'"),
        ({"recall": 3}, '"recall" is missing'),
        ({"state": {}}, '"state" has no list'),
    ):
        out.write_text(json.dumps(result | change))
        with pytest.raises(UserError, match=message):
            read_diagnosis(out)


NUMBERS = st.floats(-1, 1).map(lambda number: round(number, 2))
SHARES = st.floats(0, 1).map(lambda number: round(number, 2))


@st.composite
def intervals(draw: st.DrawFn, numbers: st.SearchStrategy[float]) -> dict[str, Any]:
    """A value with its interval; sometimes, as from one window, without."""
    low, value, high = sorted(draw(st.lists(numbers, min_size=3, max_size=3)))
    return (
        {"value": value, "low": low, "high": high}
        if draw(st.integers(0, 9))
        else dict.fromkeys(("low", "high"), None) | {"value": value}
    )


@st.composite
def diagnoses(draw: st.DrawFn) -> dict[str, Any]:
    """Any numbers that a diagnosis may come to, training length 64, multiple 8."""
    parts = draw(st.lists(st.sampled_from(PARTS), unique=True, min_size=1))
    result: dict[str, Any] = {"checkpoint": {"path": "ckpt", "layers": 2, "context_length": 64}}
    result["settings"] = {"training_length": 64, "multiple": 8, "parts": parts, "text": "a", "sequences": 8}
    if "perplexity" in parts:
        result["perplexity"] = [
            {"start": start, "end": 2 * start, "loss": 3.0, "count": 8, "rise": found["value"]}
            | {"rise_low": found["low"], "rise_high": found["high"]}
            for start in (64, 128, 256)
            for found in [draw(intervals(NUMBERS))]
        ]
    if "remembrance" in parts:
        points = [draw(intervals(SHARES)) | {"t": t, "count": 8} for t in (0, 64, 128, 200)]
        result["remembrance"] = {"length": 256, "points": points}
    if "recall" in parts:
        lengths = draw(st.sets(st.sampled_from([128, 256, 384, 512]), min_size=1))
        result["recall"] = {"points": [draw(intervals(SHARES)) | {"length": n, "count": 9} for n in sorted(lengths)]}
    if "state" in parts:
        layers = []
        for layer in range(2):
            grown = draw(intervals(st.floats(1, 9).map(lambda number: round(number, 1))))
            growth = {name: [9.0, grown[name], 1.0] for name in grown}
            layers.append({"layer": layer, "mixer": "gla", "growth": growth, "heads": []})
        filled = [draw(intervals(SHARES)) | {"position": position, "count": 8} for position in (32, 64, 512)]
        result["state"] = {"positions": [32, 64, 512], "layers": layers, "fill": filled}
    return result


def side(low: float | None, high: float | None, threshold: float) -> str:
    if low is None or high is None:
        return "open"
    return "above" if low > threshold else "below" if high <= threshold else "open"


@settings(max_examples=200, deadline=None)
@given(result=diagnoses())
def test_a_verdict_says_nothing_that_an_interval_does_not_support(result: dict[str, Any]) -> None:
    """Independently of the rules' code: what each sentence claims, looked up in the intervals."""
    found = {finding["finding"]: finding for finding in verdict(result)}
    open_parts = {f["numbers"]["part"] for f in verdict(result) if f["finding"] == "unsure"}
    rises = [(e["rise_low"], e["rise_high"]) for e in result.get("perplexity", [])]
    half = next((p for p in result.get("remembrance", {"points": []})["points"] if p["t"] == 128), None)
    recall = {p["length"]: side(p["low"], p["high"], 0.5) for p in result.get("recall", {"points": []})["points"]}
    growth = [layer["growth"] for layer in result.get("state", {"layers": []})["layers"]]
    grown = [side(g["low"][1], g["high"][1], 4.0) for g in growth]

    if "length" in found:
        start = found["length"]["numbers"]["position"]
        place = [64, 128, 256].index(start)
        assert all(side(*rise, 0.1) == "above" for rise in rises[place : place + 2])
    if "remembrance" in found:
        assert half is not None and side(half["low"], half["high"], 0.25) == "above"
    if "state" in found:
        layer = found["state"]["numbers"]["layer"]
        assert grown[layer] == "above" and f"in layer {layer} grows" in found["state"]["text"]
    if "recall" in found:
        text = found["recall"]["text"]
        if match := re.match(r"recall ends between (\d+) and (\d+) tokens", text):
            held, lost = map(int, match.groups())
            assert recall[lost] == "below" and all(recall[n] == "above" for n in recall if n <= held)
        elif match := re.match(r"recall ends before (\d+) tokens", text):
            assert recall[int(match[1])] == "below" and recall[min(recall)] == "open" and "leaves it unclear" in text
        else:
            assert text.startswith("no recall") and recall[min(recall)] == "below"
        if "while the state is" in text:
            said = "below" if "is not full" in text else "above"
            ends = [int(number) for number in re.findall(r"\d+", text.split(" tokens")[0])]
            for end in ends:
                filled = result["state"]["fill"][-1 if end > 64 else 1]
                assert side(filled["low"], filled["high"], 0.75) == said
    if "healthy" in found:
        assert not found.keys() - {"healthy", "unsure"}
        named = found["healthy"]["text"].removeprefix("healthy in ").split(":")[0].split(" (not")[0].split(", ")
        assert not set(named) & open_parts
        assert set(named) | open_parts == set(result["settings"]["parts"])
        if "perplexity" in named:
            assert not any(
                all(high is None or high > 0.25 for _, high in rises[place : place + 2]) for place in range(3)
            )
            words = re.search(r"within (\d\.\d\d) nats", found["healthy"]["text"])
            assert all(high is None or high <= (float(words[1]) if words else 0.0) for _, high in rises)
        if "remembrance" in named:
            assert half is not None and side(half["low"], half["high"], 0.25) == "below"
        if "recall" in named:
            assert set(recall.values()) == {"above"} and f"up to {max(recall)} tokens" in found["healthy"]["text"]
        if "state" in named:
            assert set(grown) == {"below"}
    # And nothing that was measured is passed over in silence.
    ill = {"length": "perplexity"}
    spoken = {ill.get(name, name) for name in found} | open_parts
    assert "healthy" in found or spoken - {"unsure"} <= set(result["settings"]["parts"])
    for part in result["settings"]["parts"]:
        assert part in spoken or "healthy" in found or spoken - {"unsure"} - open_parts
    for finding in verdict(result):
        check_advice(finding["advice"])
