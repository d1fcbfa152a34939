"""From the numbers of a diagnosis to plain words: what is wrong, the numbers it rests on, and the next command.

docs/diagnostics.md explains the rules. Each is a function of the result alone, so a result file can be judged again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from longrecall.diagnostics.advice import Advice

Finding = dict[str, Any]


@dataclass(frozen=True)
class Thresholds:
    """Where a number becomes a finding."""

    length_rise: float = 0.1
    """Nats per token above the level of the training length: a tenth more perplexity, several times less than where the
    literature's models end. The interval's low end must be above it."""

    remembrance: float = 0.25
    """EffRem when the first half is left out: a quarter of the next token's probability then hangs on tokens at least
    half the sequence away. Healthy models have below 0.01 there. The interval's low end must be above it."""

    recall: float = 0.5
    """Accuracy at which recall counts as ended: the lowest of the published thresholds."""

    full: float = 0.75
    """Median over heads of effective rank / min(K, V). A heap of independent random associations has 0.84 (square) to 1
    (very oblong), states of trained models that still recall have 0.4 to 0.7."""

    growth: float = 4.0
    """Norm of a layer's state at the end over that at the training length. A state that forgets nothing grows by the
    square root of the multiple (4 at 16 times) when what it adds is unrelated; faster is drift."""


def verdict(result: Mapping[str, Any], thresholds: Thresholds | None = None) -> list[Finding]:
    """Return the findings of a diagnosis, the most serious first; one finding "healthy" when there is none.

    A finding is ``{"finding", "text", "advice", "numbers"}``. "finding" is "diverged", "length", "remembrance",
    "recall", "state" or "healthy"; "text" is a sentence with the numbers, "advice" what to do, with the command.
    """
    limits = thresholds or Thresholds()
    advice = Advice.of(result)
    rules: tuple[Callable[[Mapping[str, Any], Thresholds, Advice], list[Finding]], ...]
    rules = (_diverged, _length, _remembrance, _recall, _state)
    findings = [finding for rule in rules for finding in rule(result, limits, advice)]
    return findings or [_healthy(result, advice)]


def _finding(name: str, text: str, advice: str, **numbers: Any) -> Finding:
    return {"finding": name, "text": text, "advice": advice, "numbers": numbers}


def _diverged(result: Mapping[str, Any], limits: Thresholds, advice: Advice) -> list[Finding]:
    """One finding for the earliest NaN or infinity of all parts."""
    found = sorted(result.get("divergence", []), key=lambda item: int(item["position"]))
    if not found:
        return []
    first = found[0]
    layer, place, position = first["layer"], first["place"], first["position"]
    where = f"the {place}" + (f" of layer {layer}" if layer is not None else "")
    if place == "logits":
        where = "the output head"
    text = f"the model diverges: {where} is not finite after {position} tokens (part {first['part']})"
    late = position >= result["settings"]["training_length"]
    return [_finding("diverged", text, advice.diverged(late), **first)]


def _length(result: Mapping[str, Any], limits: Thresholds, advice: Advice) -> list[Finding]:
    """Perplexity leaves its level: two neighbouring ranges past the training length whose rise is surely too large."""
    training = result["settings"]["training_length"]
    entries = result.get("perplexity") or []
    past = [e for e in entries if e["start"] >= training and e.get("rise") is not None]
    high = [_sure(entry, "rise") > limits.length_rise for entry in past]
    for index, entry in enumerate(past):
        if not high[index] or not all(high[index : index + 2]):
            continue
        last = past[-1]
        level = last["loss"] - last["rise"]
        ratio = math.exp(min(last["rise"], 700.0))
        text = (
            f"perplexity leaves its {training}-token level at {entry['start']}: the loss is {entry['rise']:.2f} nats "
            f"per token above the level's {level:.2f} there and {last['rise']:.2f} at {last['end']} "
            f"({ratio:.3g} times the perplexity)"
        )
        numbers = {"position": entry["start"], "level": level, "rise": entry["rise"], "rise_low": entry["rise_low"]}
        numbers |= {"rise_at_end": last["rise"], "end": last["end"], "threshold": limits.length_rise}
        return [_finding("length", text, advice.state_passing(), **numbers)]
    return []


def _sure(entry: Mapping[str, Any], name: str) -> float:
    """Return the low end of an interval, or the value itself where one sequence gave no interval."""
    low = entry.get(f"{name}_low" if name != "value" else "low")
    return float(entry[name] if low is None else low)


def _remembrance(result: Mapping[str, Any], limits: Thresholds, advice: Advice) -> list[Finding]:
    """Leaving out the first half (or the point of the grid nearest before it) changes the prediction too much."""
    part = result.get("remembrance") or {"points": []}
    length = part.get("length", 0)
    points = [p for p in part["points"] if p["value"] is not None and 0 < p["t"] <= length // 2]
    if not points or length - points[-1]["t"] < result["settings"]["training_length"]:
        return []
    half = max(points, key=lambda point: int(point["t"]))
    if _sure(half, "value") <= limits.remembrance:
        return []
    text = (
        f"the first tokens weigh too much: without the first {half['t']} of {length} tokens the next-token prediction "
        f"moves by {half['value']:.2f} (total variation, 0 to 1)"
    )
    numbers = {"t": half["t"], "length": length, "value": half["value"], "low": half["low"]}
    return [_finding("remembrance", text, advice.state_passing(), **numbers, threshold=limits.remembrance)]


def fill(result: Mapping[str, Any], position: int) -> tuple[float, int] | None:
    """Return (median over heads of effective rank / min(K, V), position) at the first measured position >= `position`.

    None where the state was not measured or is not finite. Heads whose state has a single row or column are left out:
    their rank is 1 whatever they hold.
    """
    state = result.get("state") or {"positions": [], "layers": []}
    places = [index for index, place in enumerate(state["positions"]) if place >= position]
    index = places[0] if places else len(state["positions"]) - 1
    shares = [
        head["effective_rank"][index] / ceiling
        for layer in state["layers"]
        if (ceiling := min(layer["key_dim"], layer["value_dim"])) > 1
        for head in layer["heads"]
        if head["effective_rank"][index] is not None
    ]
    return (median(shares), state["positions"][index]) if shares else None


def _recall(result: Mapping[str, Any], limits: Thresholds, advice: Advice) -> list[Finding]:
    """Recall never begins, or ends before the longest length; the state's fill says which remedy fits."""
    part = result.get("recall") or {"points": []}
    points = part["points"]
    if not points:
        return []
    training = result["settings"]["training_length"]
    longest, shortest = points[-1], points[0]
    end = part["maximum"].get(str(limits.recall))
    numbers = {"maximum": end, "threshold": limits.recall, "shortest": shortest["length"]}
    if end is None:
        text = (
            f"no recall: at {shortest['length']} tokens, the shortest pass key prompt, accuracy is "
            f"{shortest['value']:.2f} ({shortest['count']} keys)"
        )
        return [_finding("recall", text, advice.learn_recall(), **numbers, accuracy=shortest["value"])]
    if end >= longest["length"]:
        return []
    bad = next(point for point in points if point["length"] > end)
    fact = f"recall ends at {end}: accuracy is {bad['value']:.2f} at {bad['length']} ({bad['count']} keys)"
    numbers |= {"length": bad["length"], "accuracy": bad["value"]}
    filled = fill(result, end)
    if filled is None:
        text = f"{fact}; whether the state is full was not measured"
        return [_finding("recall", text, advice.measure_state(), **numbers, fill=None)]
    share, position = filled
    numbers |= {"fill": share, "fill_position": position, "full": limits.full}
    used = f"{100 * share:.0f}% of the directions of the median head are in use at {position}"
    if share >= limits.full:
        text = f"{fact} while the state is full ({used})"
        return [_finding("recall", text, advice.expand(), **numbers)]
    text = f"{fact} while the state is not full ({used})"
    remedy = advice.longer_recall() if end >= training else advice.learn_recall()
    return [_finding("recall", text, remedy, **numbers)]


def _state(result: Mapping[str, Any], limits: Thresholds, advice: Advice) -> list[Finding]:
    """The norm of a layer's state keeps growing past the training length."""
    state = result.get("state") or {"positions": [], "layers": []}
    training = result["settings"]["training_length"]
    places = [index for index, place in enumerate(state["positions"]) if place >= training]
    if len(places) < 2:
        return []
    worst: tuple[float, int] = (0.0, -1)
    for layer in state["layers"]:
        ends = [[head["norm"][index] for head in layer["heads"]] for index in (places[0], places[-1])]
        if any(norm is None for norms in ends for norm in norms) or not sum(ends[0]):
            continue
        worst = max(worst, (sum(ends[1]) / sum(ends[0]), int(layer["layer"])))
    growth, layer_index = worst
    if growth <= limits.growth:
        return []
    first, last = state["positions"][places[0]], state["positions"][places[-1]]
    text = f"the state drifts: its norm in layer {layer_index} grows {growth:.3g} times from {first} to {last} tokens"
    numbers = {"layer": layer_index, "growth": growth, "from": first, "to": last, "threshold": limits.growth}
    return [_finding("state", text, advice.state_passing(), **numbers)]


def _healthy(result: Mapping[str, Any], advice: Advice) -> Finding:
    """Name what was measured, so that "healthy" does not claim more."""
    settings = result["settings"]
    facts = []
    rises = [entry for entry in result.get("perplexity") or [] if entry.get("rise") is not None]
    numbers: dict[str, Any] = {"training_length": settings["training_length"]}
    if rises:
        worst = max(rises, key=lambda entry: float(entry["rise"]))
        level = f"its {settings['training_length']}-token level"
        rise = f"{worst['rise']:.2f}"
        facts.append(
            f"the loss stays within {rise} nats of {level}" if float(rise) > 0 else f"the loss stays at {level}"
        )
        numbers["rise"] = worst["rise"]
    points = (result.get("recall") or {"points": []})["points"]
    if points:
        facts.append(f"pass keys are recalled up to {points[-1]['length']} tokens")
        numbers["recall"] = points[-1]["length"]
    parts = ", ".join(settings["parts"])
    text = f"healthy in {parts}" + (f": {'; '.join(facts)}" if facts else "")
    return _finding("healthy", text, advice.nothing(), **numbers)
