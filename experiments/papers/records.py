"""Our numbers for the pages of the papers: what stands in braces in the files of claims beside this one.

``{gain: mamba2, reinit, plain, phonebook, 32}`` calls `gain` with these five words. Every function here returns text
made from recorded JSON or, for counts of parameters, from a model's description. An interval is 95% over seeds
wherever there are two seeds or more.
"""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable
from typing import Any

from experiments.common.intervals import T_QUANTILES, line, t_interval
from experiments.common.pages import ROOT, number, read
from experiments.common.pages import share as cut_off
from experiments.evidence import records as evidence
from experiments.length import records as length
from experiments.retrieval import cells, report_controls, report_mad, report_perplexity, report_selector
from experiments.state_recall import records as states
from longrecall.models.outline import open_outline

BENCHMARKS = ROOT / "benchmarks" / "results"
CONFIGS = ROOT / "recipes" / "configs"
WIDTH = 128
"""Characters of a line of a page."""
CALL = re.compile(r"\{(\w+): ([^{}]*)\}")
LAYERS = {"gla": "layer gla of the 1.3B model", "mamba2": "layer mamba2 of the 1.3B model, N 128 and 512"}
"""Rows of gpu_layers.json, each with a plain and a larger state."""
STEPS = {
    "gla": ("step kernel, gla 4 x 256 x 512, float32", "step kernel, gla merged 4 x 256 x 2048, float32"),
    "mamba2": ("step kernel, mamba2 64 x 128 x 64, float32", "step kernel, mamba2 64 x 512 x 64, float32"),
}
"""Rows of gpu_decoding.json: the step of a layer with a plain and with a larger state."""
PEER = "gated_delta_rule, decay head, 8x4096 8/8 x (128, 128): forward and backward, "


def filled(text: str) -> str:
    """The text with every call in braces replaced by its number; an unknown name is an error."""
    return CALL.sub(lambda found: NUMBERS[found[1]](*(word.strip() for word in found[2].split(","))), text)


def wrapped(text: str, bullet: bool = False) -> str:
    """The same in lines of the width of a page."""
    lead = "- " if bullet else ""
    return textwrap.fill(
        lead + filled(text), WIDTH, subsequent_indent=" " * len(lead), break_long_words=False, break_on_hyphens=False
    )


def with_half(values: tuple[float, float], digits: int = 3, signed: bool = True) -> str:
    """Mean ± half of its interval."""
    return f"{number(values[0], signed, digits)} ± {number(values[1], digits=digits)}"


@functools.cache
def bench(file: str) -> dict[str, dict[str, Any]]:
    """The rows of a recorded benchmark by name."""
    rows = json.loads((BENCHMARKS / f"{file}.json").read_text(encoding="utf-8"))["rows"]
    return {row["name"]: row for row in rows}


# ---- post-training of enlarged models


def gain(study: str, arm: str, other: str, task: str, cell: str) -> str:
    """One arm minus another at equal tokens without state passing, seed by seed."""
    record = read(evidence.STUDIES[study])
    pairs = zip(*(evidence.rows_of(record, name, False) for name in (arm, other)), strict=True)
    return with_half(
        t_interval([evidence.value(record, a, task, cell) - evidence.value(record, b, task, cell) for a, b in pairs])
    )


def grown(study: str) -> str:
    """Numbers in the state before and after surgery."""
    sizes = read(evidence.STUDIES[study])["state_size"]
    return f"{sizes['before']:,} to {sizes['after']:,} numbers"


# ---- post-training from other initial states


def ill(model: str, arm: str, measure: str) -> str:
    """Mean of an arm over three seeds and its interval; the model before it is one."""
    values = [length.MEASURES[measure](row) for row in length.rows_of(length.record_of(model), model, arm)]
    signed = measure == "rise"
    return number(values[0], signed) if len(values) == 1 else with_half(t_interval(values), signed=signed)


def ill_gain(model: str, arm: str, measure: str) -> str:
    """An arm minus plain continued training, seed by seed."""
    return with_half(length.differences(length.record_of(model), model, arm, measure))


def growth(model: str, arm: str) -> str:
    """How many times its norm at 512 tokens the state of the head that grows most has at 64k, mean over the seeds."""
    rows = length.rows_of(length.record_of(model), model, arm)
    return f"{statistics.mean(max(max(heads) for heads in length.growth(row)) for row in rows):.1f}"


def effrem(model: str, arm: str, start: str) -> str:
    """Effective remembrance at 4096 tokens when the first `start` are left out."""
    values = [
        length.remembrance(row, int(start))["value"] for row in length.rows_of(length.record_of(model), model, arm)
    ]
    return number(values[0], digits=4) if len(values) == 1 else with_half(t_interval(values), 4, signed=False)


def effrem_gain(model: str, arm: str, start: str) -> str:
    """The same, an arm minus plain continued training, seed by seed."""
    found = [length.rows_of(length.record_of(model), model, name) for name in (arm, "zero")]
    pairs = zip(*([length.remembrance(row, int(start))["value"] for row in rows] for rows in found), strict=True)
    return with_half(t_interval([a - b for a, b in pairs]), 4)


def lottery(which: str) -> str:
    """How many models were pretrained (`all`), and of how many the interval of the rise leaves out zero (`ill`)."""
    last = [model["perplexity"][-1] for file in length.RUNS.values() for model in read(file)["variants"].values()]
    return str(len(last) if which == "all" else sum(point["rise_low"] > 0 for point in last))


# ---- recall by state size


def exponent(mixer: str, kind: str, measure: str) -> str:
    """Of recall length by state size at threshold .5, by whole values or by single characters."""
    field = states.SINGLE if measure == "single" else states.WHOLE
    found = states.fitted(states.joined(states.TREND), mixer, kind, 0.5, field)[1]
    if found is None or found.half is None:
        raise ValueError(f"no line for {mixer}, {kind}, {measure}")
    return with_half((found.slope, found.half), 2, signed=False)


def exponents(measure: str) -> str:
    """How many exponents have an interval above zero: two mixers, two kinds of values, four thresholds."""
    record, field = states.joined(states.TREND), states.SINGLE if measure == "single" else states.WHOLE
    lines = [
        states.fitted(record, mixer, kind, threshold, field)[1]
        for mixer in ("gated_delta_net", "gla")
        for kind in states.KINDS
        for threshold in record["thresholds"]
    ]
    return str(sum(found is not None and found.half is not None and found.slope > found.half for found in lines))


def per_doubling(mixer: str, what: str) -> str:
    """Slope of bits per byte or of mean recall of numbers by the logarithm of the state, all sizes and seeds."""
    rows = states.models(states.joined(states.TREND), mixer)
    values = [row["bits_per_byte"][0] if what == "bits" else states.share(row, "needles:number") for row in rows]
    found = line([math.log2(row["state_size"]) for row in rows], values)
    if found is None or found.half is None:
        raise ValueError(f"no line for {mixer}, {what}")
    return with_half((found.slope, found.half))


def needles(mixer: str, factor: str, text: str) -> str:
    """Share of numbers recalled whole over so many bytes, mean over the seeds."""
    rows = states.by_factor(states.joined(states.TREND), mixer)[int(factor)]
    return number(statistics.mean(states.recall_at(row, "needles:number", int(text)) for row in rows), digits=2)


def ablation() -> states.Record:
    """The forms of expansion."""
    return states.joined(states.ABLATION)


def form(name: str) -> str:
    """Mean recall of a form minus that of head-wise expansion."""
    return with_half((states.difference(ablation(), name), half_of_forms()))


def half_of_forms() -> float:
    """Half of the interval of a difference of two forms."""
    half = states.difference_half(ablation())
    if half is None:
        raise ValueError("one seed has no interval")
    return half


def forms(what: str) -> str:
    """Of the differences of forms: `half` of an interval, their `range`, the rank correlation (`order`)."""
    if what == "half":
        return f"± {number(half_of_forms())}"
    if what == "order":
        return number(states.against_paper(ablation()), digits=2)
    values = [states.difference(ablation(), name) for name in states.forms(ablation()) if name != "headwise"]
    return f"{number(min(values), True)} to {number(max(values), True)}"


# ---- retrieval


def cells_with(what: str) -> str:
    """Of the cells of table 11 with retrieval: the `line` (.999), how many `reached` it, the `lowest`, the `mean`.

    A length in place of `mean` is the mean at that length.
    """
    if what == "line":
        return number(cells.REACHED)
    rows = cells.best_rows(cells.PRESENT)
    found = {cell: rows[cell]["accuracy"] for cell in cells.grid()}
    if what == "reached":
        return f"{sum(value >= cells.REACHED for value in found.values())} of {len(found)}"
    if what == "lowest":
        return cut_off(min(found.values()))
    return cut_off(statistics.mean(v for cell, v in found.items() if what in ("mean", str(cell[2]))))


def controls(what: str) -> str:
    """The same of the runs that were trained alike without the layer."""
    found = {cell: row["accuracy"] for cell, row in cells.controls()[0].items()}
    if what == "reached":
        return f"{sum(value >= cells.REACHED for value in found.values())} of {len(found)}"
    return number(statistics.mean(v for cell, v in found.items() if what in ("mean", str(cell[2]))))


def beside(what: str) -> str:
    """Of the cells without retrieval against the paper's: `all`, the `same` within .02, and those `far` below."""
    pairs = report_controls.paper_pairs()
    counts = report_controls.against_paper([a - b for a, b in pairs.values()])
    return str({"all": len(pairs), "same": counts[1], "far": counts[3]}[what])


def selector(layer: str, what: str) -> str:
    """Of the cells by the paper's own selector at that index: the `range`, or the mean at a length."""
    found = report_selector.accuracies(int(layer))
    if what == "range":
        return f"{cut_off(min(found.values()))} to {cut_off(max(found.values()))}"
    return cut_off(statistics.mean(value for cell, value in found.items() if what == str(cell[2])))


def mad(task: str, mixer: str) -> str:
    """Best accuracy of the runs without and with retrieval, those that were cut off too."""
    keys = [(f"mad_{task}", mixer, with_it) for with_it in (False, True)]
    known = [report_mad.best_rows(), report_mad.open_runs()]
    found = [max(runs[key]["accuracy"] for runs in known if key in runs) for key in keys]
    return " to ".join(cut_off(value, 3) for value in found)


def bits(mixer: str, pair: str) -> str:
    """A difference in bits per byte: its mean over the seeds and the t interval over them."""
    values = [mean for mean, _ in report_perplexity.difference(read(report_perplexity.RECORD), mixer, pair)[0]]
    half = T_QUANTILES[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return with_half((statistics.mean(values), half), digits=4)


def overhead(what: str) -> str:
    """The smallest and the largest overhead of retrieval in `reading` or `continuing`."""
    values = [row["overhead"] for name, row in bench("gpu_retrieval").items() if what in name and "overhead" in row]
    return f"{min(values):.1%} to {max(values):.1%}"


def attention_times(what: str) -> str:
    """What the Transformer takes after 128k tokens in units of the recurrent models with retrieval."""
    rows = bench("gpu_retrieval")
    whole = rows[f"transformer_1.5b: {what} after 131072"]["ms"]
    values = [whole / row["ms"] for name, row in rows.items() if f"with retrieval: {what} after 131072" in name]
    return f"{min(values):.1f} to {max(values):.1f}"


def peak(which: str) -> str:
    """GiB at the peak of reading 128k tokens, of the models with retrieval (a range) or of the Transformer."""
    name = "with retrieval: reading 131072" if which == "with" else "transformer_1.5b: reading 131072"
    values = [row["peak_gib"] for row_name, row in bench("gpu_retrieval").items() if row_name.endswith(name)]
    return " to ".join(f"{value:.1f}" for value in sorted({min(values), max(values)}))


# ---- speed, size and the time of small runs


def minutes(file: str, seeds: str) -> str:
    """What so many further seeds of a small study take on one H200, by its recorded training."""
    record = read(file)
    recorded = len({row["seed"] for row in record["results"]})
    return f"{record['training']['seconds'] / recorded * int(seeds) / 60:.0f} minutes"


def layer_ratio(mixer: str, field: str) -> float:
    """Time of a layer with the larger state over that with the plain one."""
    rows = bench("gpu_layers")
    return float(rows[f"{LAYERS[mixer]}, larger state"][field] / rows[f"{LAYERS[mixer]}, plain"][field])


def layer_times(mixer: str, field: str) -> str:
    """The same as text."""
    return f"{layer_ratio(mixer, field):.2f}"


def diluted(mixer: str, field: str, larger: str, layers: str) -> str:
    """Time of all mixers of a model, some of them larger, over that of plain ones."""
    return f"{1 + int(larger) / int(layers) * (layer_ratio(mixer, field) - 1):.2f}"


def step_times(mixer: str) -> str:
    """Time of a step of the larger layer over that of the plain one."""
    plain, larger = (bench("gpu_decoding")[name]["ms"] for name in STEPS[mixer])
    return f"{larger / plain:.1f}"


def expanded_ms(factor: str) -> str:
    """Forward and backward of a Gated DeltaNet layer with that expansion, ms."""
    return f"{bench('gpu_layers')[f'layer E={factor} ours']['both_ms']:.1f}"


def expanded_times(factor: str) -> str:
    """The same over the layer without expansion."""
    rows = bench("gpu_layers")
    return f"{rows[f'layer E={factor} ours']['both_ms'] / rows['layer E=1 ours']['both_ms']:.1f}"


def step_share(factor: str) -> str:
    """Speed of a training step of the 400M model with expansion over that without: 24 layers take longer."""
    rows, base = bench("gpu_layers"), bench("gpu_training")["gated_delta_net_400m: step, loss alone"]["ms"]
    more = rows[f"layer E={factor} ours"]["both_ms"] - rows["layer E=1 ours"]["both_ms"]
    return number(base / (base + 24 * more), digits=2)


def peer_ms(which: str) -> str:
    """The recurrence forward and backward, ours and fla's; softmax attention, the faster of two kernels."""
    rows = bench("gpu_peers")
    if which != "attention":
        return f"{rows[PEER + which]['ms']:.2f}"
    return f"{min(row['both_ms'] for name, row in rows.items() if name.startswith('softmax attention')):.2f}"


@functools.cache
def sizes(config: str) -> tuple[int, int]:
    """Parameters and numbers of state of a description."""
    found = open_outline(str(CONFIGS / f"{config}.json")).config
    return sum(math.prod(shape) for shape in found.tensor_shapes().values()), found.state_size()


def parameters(config: str) -> str:
    """Parameters of a description."""
    count = sizes(config)[0]
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def size(config: str) -> str:
    """Parameters and state of a description."""
    return f"{sizes(config)[0] / 1e9:.3f}B, {sizes(config)[1] / 1e6:.1f}M"


NUMBERS: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        *(
            gain,
            grown,
            ill,
            ill_gain,
            growth,
            effrem,
            effrem_gain,
            lottery,
            exponent,
            exponents,
            per_doubling,
            needles,
            form,
            forms,
        ),
        *(
            cells_with,
            controls,
            beside,
            selector,
            mad,
            bits,
            minutes,
            overhead,
            attention_times,
            peak,
            layer_times,
            diluted,
            step_times,
        ),
        *(expanded_ms, expanded_times, step_share, peer_ms, parameters, size),
    )
}
