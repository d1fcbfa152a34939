"""The figure of docs/state_recall.md, made to be read in black and white too."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from plotting import STYLE, finish, panels
from report_state_recall import KINDS, MIXERS, SINGLE, WHOLE, Record, by_factor, longest, reached

LOOKS: dict[str, tuple[str, str]] = {"gated_delta_net": ("#0053a6", "s"), "gla": ("#c2410c", "o")}
"""Colour and marker of each mixer."""
LINES: dict[str, tuple[str, str]] = {WHOLE: ("-", "whole values"), SINGLE: ("--", "characters")}
"""Line and name of what is recalled."""


def recall_figure(record: Record, path: Path) -> None:
    """Recall length at the lowest threshold by factor: lines through the means over seeds, a marker for every model."""
    with plt.rc_context(STYLE):
        figure, axes = panels(len(KINDS))
        for axis, (kind, name) in zip(axes, KINDS.items(), strict=True):
            panel(axis, record, f"needles:{kind}")
            axis.set_title(f"values are {name}", fontsize=9)
            axis.set_xlabel("expansion factor E")
        axes[0].set_ylabel("maximum recall length (bytes)")
        finish(figure, axes[0], path)


def panel(axis: Any, record: Record, haystack: str) -> None:
    """One kind of values; the grey line is the longest text that was tried."""
    factors, threshold = set[int](), record["thresholds"][0]
    for mixer, (colour, marker) in LOOKS.items():
        groups = by_factor(record, mixer)
        factors |= set(groups)
        places = [math.log2(many) for many in groups]
        for measure, (line, of) in LINES.items():
            lengths = [[reached(row, haystack, threshold, measure) for row in rows] for rows in groups.values()]
            label = f"{MIXERS[mixer]}, {of}"
            axis.plot(places, [statistics.mean(found) for found in lengths], color=colour, ls=line, label=label)
            filled = colour if measure == WHOLE else "white"
            for place, found in zip(places, lengths, strict=True):
                axis.plot([place] * len(found), found, marker, color=colour, mfc=filled)
    axis.set_xticks([math.log2(many) for many in sorted(factors)], [str(many) for many in sorted(factors)])
    axis.axhline(longest(record["results"][0], haystack), color="0.6", linewidth=0.8, zorder=0)
