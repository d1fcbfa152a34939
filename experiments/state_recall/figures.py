"""The figure of docs/state_recall.md, made to be read in black and white too."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from experiments.common.plotting import STYLE, finish, panels
from experiments.state_recall.records import KINDS, MIXERS, SINGLE, WHOLE, Record, by_factor, reached

LOOKS: dict[str, tuple[str, str]] = {"gated_delta_net": ("#0053a6", "s"), "gla": ("#c2410c", "o")}
"""Colour and marker of each mixer."""
LINES: dict[str, str] = {"number": "-", "uuid": "--"}
PANELS: dict[str, str] = {WHOLE: "values recalled whole", SINGLE: "single characters"}


def recall_figure(record: Record, path: Path) -> None:
    """Recall length at the lowest threshold by factor: lines through the means over seeds, a marker for every model.

    Both axes are linear and begin at zero, so in proportion to the state is a straight line through the corner.
    """
    with plt.rc_context(STYLE):
        figure, axes = panels(len(PANELS), one_scale=False)
        for axis, (measure, name) in zip(axes, PANELS.items(), strict=True):
            panel(axis, record, measure)
            axis.set_title(name, fontsize=9)
            axis.set_xlabel("expansion factor E")
        axes[0].set_ylabel("maximum recall length (bytes)")
        finish(figure, axes[0], path)


def panel(axis: Any, record: Record, measure: str) -> None:
    """Both kinds of values by one measure."""
    factors, threshold = set[int](), record["thresholds"][0]
    for mixer, (colour, marker) in LOOKS.items():
        groups = by_factor(record, mixer)
        factors |= set(groups)
        for kind, name in KINDS.items():
            lengths = [
                [reached(row, f"needles:{kind}", threshold, measure) for row in rows] for rows in groups.values()
            ]
            means = [statistics.mean(found) for found in lengths]
            axis.plot(list(groups), means, color=colour, ls=LINES[kind], label=f"{MIXERS[mixer]}, {name}")
            filled = colour if kind == "number" else "white"
            for many, found in zip(groups, lengths, strict=True):
                axis.plot([many] * len(found), found, marker, color=colour, mfc=filled)
    axis.set_xticks(sorted(factors))
    axis.set_xlim(left=0)
    # A little below zero, where markers of models stand that recall nothing.
    axis.set_ylim(bottom=-0.03 * axis.get_ylim()[1])
