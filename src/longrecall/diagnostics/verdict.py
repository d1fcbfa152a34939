"""From the numbers of a diagnosis to plain words: what is wrong, the numbers it rests on, and the next command.

docs/diagnostics.md explains the rules. Each is a function of the result alone, so a result file can be judged again.
A rule speaks only where the whole interval lies on one side of its threshold; where it does not, it says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longrecall.diagnostics.advice import Advice

Finding = dict[str, Any]

UNSURE = "unsure"


@dataclass(frozen=True)
class Thresholds:
    """Where a number becomes a finding."""

    length_rise: float = 0.1
    """Nats per token above the level of the training length: a tenth more perplexity, several times less than where the
    literature's models end. The interval's low end must be above it."""

    length_steady: float = 0.25
    """A rise that is surely below this is none to mend. It is not `length_rise`: the usual number of windows leaves
    intervals of two tenths of a nat for healthy models too, which must not all be called unsure."""

    remembrance: float = 0.25
    """EffRem when the first half is left out: a quarter of the next token's probability then hangs on tokens at least
    half the sequence away. Healthy models have below 0.01 there. The interval's low end must be above it."""

    recall: float = 0.5
    """Accuracy at which recall counts as ended: the lowest of the published thresholds. The interval's high end must
    not be above it."""

    full: float = 0.75
    """Median over heads of effective rank / min(K, V). A heap of independent random associations has 0.84 (square) to 1
    (very oblong), states of trained models that still recall have 0.4 to 0.7."""

    growth: float = 4.0
    """Norm of a layer's state at the end over that at the training length. A state that forgets nothing grows by the
    square root of the multiple (4 at 16 times) when what it adds is unrelated; faster is drift. The interval's low end
    must be above it."""


def verdict(result: Mapping[str, Any], thresholds: Thresholds | None = None) -> list[Finding]:
    """Return the findings of a diagnosis, the most serious first.

    A finding is ``{"finding", "text", "advice", "numbers"}``. "finding" is "diverged", "length", "remembrance",
    "recall", "state", "unsure" or "healthy"; "text" is a sentence with the numbers, "advice" what to do, with the
    command. "unsure" stands for a part (its numbers' "part") whose intervals do not settle whether something is wrong.
    Where nothing is wrong, the last finding is "healthy", of the parts that are settled, if there are any.
    """
    limits = thresholds or Thresholds()
    advice = Advice.of(result)
    rules: tuple[Callable[[Mapping[str, Any], Thresholds, Advice], list[Finding]], ...]
    rules = (_diverged, _length, _remembrance, _recall, _state)
    found = [finding for rule in rules for finding in rule(result, limits, advice)]
    findings = [finding for finding in found if finding["finding"] != UNSURE]
    unsure = [finding for finding in found if finding["finding"] == UNSURE]
    if not findings:
        return unsure + _healthy(result, {finding["numbers"]["part"] for finding in unsure}, advice)
    return findings + unsure


def _finding(name: str, text: str, advice: str, **numbers: Any) -> Finding:
    return {"finding": name, "text": text, "advice": advice, "numbers": numbers}


def _side(entry: Mapping[str, Any], threshold: float, prefix: str = "") -> bool | None:
    """Return whether a number is above a threshold as far as its interval says; None where it does not say."""
    low, high = entry.get(f"{prefix}low"), entry.get(f"{prefix}high")
    if low is None or high is None:
        return None
    return True if low > threshold else False if high <= threshold else None


def _interval(low: float | None, high: float | None, form: str = ".2f") -> str:
    """Return the words for an interval."""
    if low is None or high is None:
        return "no interval from a single window"
    return f"95% interval {low:{form}} to {high:{form}}"


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
    past = [e for e in _ranges(result) if e["start"] >= training]
    level_of = f"the {training}-token level"
    if (entry := _two(past, lambda e: _side(e, limits.length_rise, "rise_") is True)) is not None:
        last = past[-1]
        level = last["loss"] - last["rise"]
        ratio = math.exp(min(last["rise"], 700.0))
        text = (
            f"perplexity rises above its {training}-token level at {entry['start']}: the loss is {_rise(entry)} nats "
            f"per token above the level's {level:.2f} there. At {last['end']} it is {_rise(last)} "
            f"({ratio:.3g} times the perplexity)"
        )
        numbers = {"position": entry["start"], "level": level, "rise": entry["rise"], "rise_low": entry["rise_low"]}
        numbers |= {"rise_at_end": last["rise"], "end": last["end"], "threshold": limits.length_rise}
        return [_finding("length", text, advice.state_passing(), **numbers)]
    if (entry := _two(past, lambda e: _side(e, limits.length_steady, "rise_") is not False)) is not None:
        text = (
            f"it is unclear whether perplexity rises above {level_of}: at {entry['start']} to {entry['end']} the "
            f"loss is {_rise(entry)} nats per token above it"
        )
        numbers = {"part": "perplexity", "position": entry["start"], "rise": entry["rise"]}
        numbers |= {"rise_low": entry["rise_low"], "rise_high": entry["rise_high"], "threshold": limits.length_rise}
        return [_finding(UNSURE, text, advice.more_windows("perplexity", entry["count"]), **numbers)]
    return []


def _ranges(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in result.get("perplexity") or [] if entry.get("rise") is not None]


def _two(entries: Sequence[Mapping[str, Any]], is_so: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any] | None:
    """Return the first of two neighbours that both are so; the last one may stand alone."""
    so = [is_so(entry) for entry in entries]
    return next((entry for index, entry in enumerate(entries) if all(so[index : index + 2])), None)


def _rise(entry: Mapping[str, Any]) -> str:
    return f"{entry['rise']:.2f} ({_interval(entry['rise_low'], entry['rise_high'])})"


def _remembrance(result: Mapping[str, Any], limits: Thresholds, advice: Advice) -> list[Finding]:
    """Leaving out the first half (or the point of the grid nearest before it) changes the prediction too much."""
    half = _half(result)
    side = False if half is None else _side(half, limits.remembrance)
    if half is None or side is False:
        return []
    length = result["remembrance"]["length"]
    moved = (
        f"without the first {half['t']} of {length} tokens the next-token prediction moves by {half['value']:.2f} "
        f"(total variation, 0 to 1; {_interval(half['low'], half['high'])})"
    )
    numbers = {key: half[key] for key in ("t", "value", "low", "high")} | {"length": length}
    numbers["threshold"] = limits.remembrance
    if side is None:
        text = f"it is unclear whether the first tokens weigh too much: {moved}"
        return [
            _finding(UNSURE, text, advice.more_windows("remembrance", half["count"]), part="remembrance", **numbers)
        ]
    return [_finding("remembrance", f"the first tokens weigh too much: {moved}", advice.state_passing(), **numbers)]


def _half(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the point of effective remembrance that is judged; None where there is none."""
    part = result.get("remembrance") or {"points": []}
    length = part.get("length", 0)
    points = [p for p in part["points"] if p["value"] is not None and 0 < p["t"] <= length // 2]
    half = max(points, key=lambda point: int(point["t"]), default=None)
    return None if half is None or length - half["t"] < result["settings"]["training_length"] else half


def _recall(result: Mapping[str, Any], limits: Thresholds, advice: Advice) -> list[Finding]:
    """Recall never begins, or ends before the longest length; the state's fill says which remedy fits."""
    points = sorted((result.get("recall") or {"points": []})["points"], key=lambda point: int(point["length"]))
    if not points:
        return []
    sides = [_side(point, limits.recall) for point in points]
    shortest = points[0]
    # Up to here every length is surely above; from `lost` on it surely is not.
    held = next((points[i - 1] if i else None for i, side in enumerate(sides) if side is not True), points[-1])
    lost = next((point for point, side in zip(points, sides, strict=True) if side is False), None)
    numbers: dict[str, Any] = {"maximum": None if held is None else held["length"], "threshold": limits.recall}
    numbers["shortest"] = shortest["length"]
    if lost is None:
        return [] if held is points[-1] else [_unsure_recall(points[sides.index(None)], held, numbers, advice)]
    numbers |= {"length": lost["length"], "accuracy": lost["value"], "low": lost["low"], "high": lost["high"]}
    if lost is shortest:
        text = f"no recall: at {lost['length']} tokens, the shortest pass key prompt, accuracy is {_accuracy(lost)}"
        return [_finding("recall", text, advice.learn_recall(), **numbers)]
    if held is None:
        fact = (
            f"recall ends before {lost['length']} tokens: accuracy is {_accuracy(lost)} there. At "
            f"{shortest['length']}, the shortest pass key prompt, it is {_accuracy(shortest)}, which leaves it unclear "
            f"whether there is any recall"
        )
    else:
        fact = (
            f"recall ends between {held['length']} and {lost['length']} tokens: accuracy is {_accuracy(held)} at "
            f"{held['length']} and {_accuracy(lost)} at {lost['length']}"
        )
    return [_ended(result, fact, held, lost, numbers, limits, advice)]


def _accuracy(point: Mapping[str, Any]) -> str:
    # Three digits: an interval that ends at 0.501 must not read as if it held 0.5.
    interval = _interval(point["low"], point["high"], ".3f")
    return f"{point['value']:.3f} ({interval}, {point['count']} keys)"


def _unsure_recall(
    point: Mapping[str, Any], held: Mapping[str, Any] | None, numbers: Mapping[str, Any], advice: Advice
) -> Finding:
    value = "unknown" if point["value"] is None else _accuracy(point)
    sure = "" if held is None else f"; up to {held['length']} tokens it surely is above"
    text = (
        f"it is unclear whether recall ends: at {point['length']} tokens accuracy is {value}, which may be above "
        f"{numbers['threshold']:g} or not{sure}"
    )
    found = {"length": point["length"], "accuracy": point["value"], "low": point["low"], "high": point["high"]}
    return _finding(UNSURE, text, advice.more_keys(), part="recall", **numbers, **found)


def _ended(
    result: Mapping[str, Any],
    fact: str,
    held: Mapping[str, Any] | None,
    lost: Mapping[str, Any],
    numbers: Mapping[str, Any],
    limits: Thresholds,
    advice: Advice,
) -> Finding:
    """Return the finding for recall that ends, with the remedy that fits the state there."""
    found = [fill(result, point["length"]) for point in (held, lost) if point is not None]
    entries = [entry for entry in found if entry is not None]
    if not entries:
        text = f"{fact}; whether the state is full was not measured"
        return _finding("recall", text, advice.measure_state(), **numbers, fill=None)
    first, *others = {entry["position"]: entry for entry in entries}.values()
    used = f"{first['value']:.0%} of the directions of the median head are in use at {_where(first)}"
    used += "".join(f", {entry['value']:.0%} at {_where(entry)}" for entry in others)
    numbers = {**numbers, "fill": first["value"], "fill_low": first["low"], "fill_high": first["high"]}
    numbers |= {"fill_position": first["position"], "full": limits.full}
    full = {_side(entry, limits.full) for entry in entries}
    if full == {True}:
        return _finding("recall", f"{fact} while the state is full ({used})", advice.expand(), **numbers)
    if full == {False}:
        learnt = held is not None and held["length"] >= result["settings"]["training_length"]
        remedy = advice.longer_recall() if learnt else advice.learn_recall()
        return _finding("recall", f"{fact} while the state is not full ({used})", remedy, **numbers)
    text = f"{fact}; it is unclear whether the state is full there ({used})"
    return _finding("recall", text, advice.full_or_not(min(entry["count"] for entry in entries)), **numbers)


def _where(entry: Mapping[str, Any]) -> str:
    return f"{entry['position']} ({_interval(entry['low'], entry['high'], '.0%')})"


def fill(result: Mapping[str, Any], position: int) -> Mapping[str, Any] | None:
    """Return how full the state is at the first measured position >= `position`, or at the last one.

    ``{"position", "value", "low", "high", "count"}``, as `state_statistics` returns it under "fill"; None where the
    state was not measured or is not finite.
    """
    entries = (result.get("state") or {}).get("fill") or []
    later = [entry for entry in entries if entry["position"] >= position]
    found = later[0] if later else entries[-1] if entries else None
    return None if found is None or found["value"] is None else found


def _state(result: Mapping[str, Any], limits: Thresholds, advice: Advice) -> list[Finding]:
    """The norm of a layer's state keeps growing past the training length."""
    grown = sorted(_grown(result), key=lambda entry: -float(entry["value"]))
    for wanted, begin in ((True, "the state drifts"), (None, "it is unclear whether the state drifts")):
        entry = next((entry for entry in grown if _side(entry, limits.growth) is wanted), None)
        if entry is None:
            continue
        text = (
            f"{begin}: its norm in layer {entry['layer']} grows {entry['value']:.3g} times "
            f"({_interval(entry['low'], entry['high'], '.3g')}) from {entry['from']} to {entry['to']} tokens"
        )
        numbers = {"layer": entry["layer"], "growth": entry["value"], "low": entry["low"], "high": entry["high"]}
        numbers |= {"from": entry["from"], "to": entry["to"], "threshold": limits.growth}
        if wanted:
            return [_finding("state", text, advice.state_passing(), **numbers)]
        windows = max((filled["count"] for filled in result["state"].get("fill") or []), default=None)
        return [_finding(UNSURE, text, advice.more_windows("state", windows), part="state", **numbers)]
    return []


def _grown(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return by how much each layer's state grows from the training length to the end, where that is known."""
    state = result.get("state") or {"positions": [], "layers": []}
    positions, training = state["positions"], result["settings"]["training_length"]
    places = [index for index, place in enumerate(positions) if place >= training]
    if len(places) < 2:
        return []
    ends = {"from": positions[places[0]], "to": positions[-1]}
    grown = [
        {name: layer["growth"][name][places[0]] for name in ("value", "low", "high")} | {"layer": int(layer["layer"])}
        for layer in state["layers"]
        if layer.get("growth")
    ]
    return [entry | ends for entry in grown if entry["value"] is not None]


def _healthy(result: Mapping[str, Any], unsettled: Collection[str], advice: Advice) -> list[Finding]:
    """Name what was measured and settled, so that "healthy" does not claim more; nothing where nothing was."""
    settings = result["settings"]
    training, facts = settings["training_length"], []
    rises = [entry for entry in _ranges(result) if entry["rise_high"] is not None]
    points = (result.get("recall") or {"points": []})["points"]
    judged = {"perplexity": rises, "state": _grown(result), "remembrance": _half(result), "recall": points}
    parts = [part for part in settings["parts"] if judged[part] and part not in unsettled]
    left = [part for part in settings["parts"] if not judged[part] and part not in unsettled]
    if not parts:
        return []
    numbers: dict[str, Any] = {"training_length": training}
    if "perplexity" in parts:
        worst = max(rises, key=lambda entry: float(entry["rise_high"]))
        rise = f"{worst['rise_high']:.2f}"
        words = f"within {rise} nats of" if float(rise) > 0 else "at"
        facts.append(f"the loss stays {words} its {training}-token level")
        numbers |= {"rise": worst["rise"], "rise_high": worst["rise_high"]}
    if "recall" in parts:
        facts.append(f"more than half of the pass keys are recalled up to {points[-1]['length']} tokens")
        numbers["recall"] = points[-1]["length"]
    text = f"healthy in {', '.join(parts)}" + (f": {'; '.join(facts)}" if facts else "")
    text += f" (not judged: {', '.join(left)})" if left else ""
    return [_finding("healthy", text, advice.nothing(), **numbers)]
