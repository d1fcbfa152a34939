"""The figures of docs/length_generalization.md, made to be read in black and white too."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from experiments.common.intervals import t_interval
from experiments.common.plotting import STYLE, finish, panels
from experiments.length.records import ARMS, ILL, NAMES, TRAINED, Record, Row, letters, record_of, rows_of

LOOKS: dict[str, tuple[str, str, Any]] = {
    "before": ("0.55", "", ":"),
    "zero": ("black", "o", "-"),
    "noise": ("0.45", "x", "--"),
    "fitted_noise": ("#c2410c", "D", "--"),
    "state_passing": ("#0053a6", "s", "-"),
    "state_passing_text": ("#15803d", "^", "-"),
    "truncated_bptt": ("#7e22ce", "v", "-"),
}
"""Colour, marker and line of each arm: the marker alone tells them apart."""
LAYERS = (("black", "o", "-"), ("#0053a6", "^", "--"), ("0.55", "s", ":"))
"""The same for the layers, the first one first."""
SHOWN = (*ILL[:2], "gla_k16:1")
"""An ill Mamba-2, an ill GLA and, last, the healthy one beside which most figures show them."""
LONGEST_COPY = 20
"""Letters of the longest string of training."""


def positions_axis(axis: Any, positions: list[int]) -> None:
    """Name `positions` on a scale of doublings and mark the training length."""
    names = [f"{p // 1024}k" if p >= 1024 else str(p) for p in positions]
    axis.set_xticks([math.log2(p) for p in positions], names, fontsize=8)
    axis.axvline(math.log2(TRAINED), color="0.8", linewidth=0.8, zorder=0)


def mean_of(rows: list[Row], *path: Any) -> float:
    """Mean over the models of the number at the end of `path`."""
    values = []
    for row in rows:
        found: Any = row
        for key in path:
            found = found[key]
        values.append(float(found))
    return statistics.mean(values)


def bits_figure(path: Path) -> None:
    """Bits per byte by position for all arms: ill models and a healthy one, the Mamba-2 on a scale of its own."""
    figure, axes = panels(len(SHOWN), one_scale=False)
    axes[1].sharey(axes[2])
    for axis, model in zip(axes, SHOWN, strict=True):
        record = record_of(model)
        ranges = record["variants"][model]["perplexity"]
        middles = [math.log2((e["start"] + e["end"]) / 2) for e in ranges]
        for rank, (arm, (colour, marker, line)) in enumerate(LOOKS.items()):
            rows = rows_of(record, model, arm)
            values = [mean_of(rows, "perplexity", i, "bits_per_byte") for i in range(len(ranges))]
            # Each arm has its markers elsewhere, or those of equal curves hide each other.
            axis.plot(middles, values, color=colour, marker=marker, ls=line, markevery=(rank, 7), label=NAMES[arm])
        axis.set_title(model, fontsize=9)
        axis.set_xlabel("position in the text (tokens)")
        positions_axis(axis, [2**n for n in range(6, 17, 2)])
    axes[0].set_ylabel("bits per byte")
    finish(figure, axes[0], path)


def head_norms(record: Record, model: str, arm: str) -> list[list[list[float]]]:
    """[layer][head][position]: norm of the state over its norm after a training length, mean over the models."""
    rows = rows_of(record, model, arm)
    state = rows[0]["state"]
    at, count = state["positions"].index(TRAINED), len(state["positions"])
    return [
        [
            [
                statistics.mean(
                    norms[i] / norms[at] for norms in (r["state"]["layers"][n]["heads"][h]["norm"] for r in rows)
                )
                for i in range(count)
            ]
            for h in range(len(layer["heads"]))
        ]
        for n, layer in enumerate(state["layers"])
    ]


def state_figure(path: Path) -> None:
    """Norm of every head's state by position: ill models before and after passing into text."""
    shown = [(model, arm) for model in SHOWN[:-1] for arm in ("before", "state_passing_text")]
    figure, axes = panels(len(shown))
    for axis, (model, arm) in zip(axes, shown, strict=True):
        record = record_of(model)
        positions = record["variants"][model]["state"]["positions"]
        for number, (layer, (colour, marker, line)) in enumerate(
            zip(head_norms(record, model, arm), LAYERS, strict=True), start=1
        ):
            for rank, values in enumerate(layer):
                label = None if rank else f"layer {number}, one line a head"
                places = [math.log2(p) for p in positions]
                axis.plot(places, values, color=colour, marker=marker, ls=line, markersize=3, linewidth=1, label=label)
        axis.set_yscale("log")
        axis.set_title(f"{model}\n{NAMES[arm]}", fontsize=9)
        axis.set_xlabel("position (tokens)")
        positions_axis(axis, positions[1::4])
    axes[0].set_ylabel("norm of the state over that at 512")
    finish(figure, axes[0], path)


def remembrance_figure(path: Path) -> None:
    """EffRem_4096(t) before and after, with the band over the windows: the ill models and a healthy one."""
    figure, axes = panels(len(SHOWN))
    for axis, model in zip(axes, SHOWN, strict=True):
        record = record_of(model)
        starts = [p["t"] for p in record["variants"][model]["remembrance"]]
        chosen = [i for i, t in enumerate(starts) if t]
        for arm in ("before", "zero", "state_passing", "state_passing_text", "truncated_bptt"):
            colour, marker, line = LOOKS[arm]
            rows = rows_of(record, model, arm)
            low, value, high = (
                [mean_of(rows, "remembrance", i, name) for i in chosen] for name in ("low", "value", "high")
            )
            places = range(len(chosen))
            axis.plot(places, value, color=colour, marker=marker, ls=line, markersize=4, label=NAMES[arm])
            axis.fill_between(places, low, high, color=colour, alpha=0.12, linewidth=0)
        axis.set_yscale("log")
        axis.set_title(model, fontsize=9)
        ticks = list(range(0, len(chosen), 2))
        axis.set_xticks(ticks, [str(starts[chosen[i]]) for i in ticks], rotation=35, ha="right", fontsize=8)
        axis.set_xlabel("t: the tokens left out")
    axes[0].set_ylabel("EffRem$_{4096}$(t)")
    finish(figure, axes[0], path)


def copying_figure(path: Path) -> None:
    """Right letters by length of the string, with the interval over the seeds: models trained on it, ill ones last."""
    shown = ("mamba2_n64", "gla_k16", "gla_k16:1", *ILL[1:])
    figure, axes = panels(len(shown))
    for axis, model in zip(axes, shown, strict=True):
        record = record_of(model)
        lengths = [int(n) for n in record["variants"][model]["copying"]]
        places = [math.log2(n) for n in lengths]
        for rank, (arm, (colour, marker, line)) in enumerate(LOOKS.items()):
            rows = rows_of(record, model, arm)
            values = [[letters(n)(row) for row in rows] for n in lengths]
            means = [statistics.mean(v) for v in values]
            axis.plot(places, means, color=colour, marker=marker, ls=line, markersize=4, label=NAMES[arm])
            if arm in ARMS:
                # Only the bars stand side by side, or they hide each other.
                at = [place + 0.06 * (rank - len(LOOKS) // 2) for place in places]
                axis.errorbar(at, means, [t_interval(v)[1] for v in values], fmt="none", ecolor=colour, elinewidth=0.8)
        axis.axvline(math.log2(LONGEST_COPY), color="0.8", linewidth=0.8, zorder=0)
        axis.set_title(model, fontsize=9)
        axis.set_xticks(places, [str(n) if n not in (40, 96) else "" for n in lengths], fontsize=8)
        axis.set_xlabel("letters of the string")
        axis.set_ylim(0, 1.03)
    axes[0].set_ylabel("share of letters right")
    finish(figure, axes[0], path)


def draw(folder: Path) -> None:
    """Write length_bits.svg, length_state.svg, length_remembrance.svg and length_copying.svg into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        bits_figure(folder / "length_bits.svg")
        state_figure(folder / "length_state.svg")
        remembrance_figure(folder / "length_remembrance.svg")
        copying_figure(folder / "length_copying.svg")
