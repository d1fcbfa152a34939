"""The figures of docs/evidence.md, made to be read in black and white too; report.py calls this."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from experiments.common.pages import read
from experiments.common.plotting import STYLE, finish, panels
from experiments.evidence.records import STUDIES, Study, bits, rows_of, share, spans

LOOKS: dict[str, tuple[str, str, str]] = {
    "base": ("0.55", "", ":"),
    "plain": ("black", "o", "-"),
    "perturb": ("#7e22ce", "v", "-"),
    "preserve": ("#15803d", "^", "-"),
    "reinit": ("#0053a6", "s", "-"),
    "handover": ("#c2410c", "D", "--"),
    "inherit": ("0.45", "x", "--"),
}
"""Colour, marker and line of each arm: the marker alone tells them apart."""
NAMES = {"base": "before", "plain": "not enlarged"}
"""What a legend says instead of the arm's name."""


def draw_shares(axis: Any, study: Study, task: str, cells: list[str], passing: bool) -> None:
    """Share of right answers of every arm by cell (a number, on a scale of doublings), with 95% intervals."""
    places = [math.log2(int(cell)) for cell in cells]
    for rank, (arm, (colour, marker, line)) in enumerate(LOOKS.items()):
        found = [share(rows_of(study, arm, None if arm == "base" else passing), task, cell) for cell in cells]
        values = [value for value, *_ in found]
        axis.plot(places, values, color=colour, marker=marker, linestyle=line, label=NAMES.get(arm, arm))
        # Only the bars stand side by side, or they hide each other; moved lines would look like a difference.
        at = [place + 0.045 * (rank - len(LOOKS) // 2) for place in places]
        ends = [[v - low for v, low, _, _ in found], [high - v for v, _, high, _ in found]]
        axis.errorbar(at, values, ends, fmt="none", ecolor=colour, elinewidth=0.8)
    axis.set_xticks(places, cells)
    axis.set_ylim(0, 1.03)


def recall_figure(path: Path) -> None:
    """Recall of two-letter and one-letter phone books by number of pairs, without state passing."""
    study = read(STUDIES["mamba2"])
    figure, axes = panels()
    for axis, task, title in zip(axes, ("phonebook", "one_letter"), ("two", "one"), strict=True):
        cells = [cell for cell in study["results"][0][task] if int(cell) > 1]
        draw_shares(axis, study, task, cells, passing=False)
        axis.set_title(f"names of {title} letter{'s' if title == 'two' else ''}", fontsize=9)
        axis.set_xlabel("pairs in the phone book")
    axes[0].set_ylabel("share recalled")
    finish(figure, axes[0], path)


def passkey_figure(path: Path) -> None:
    """Pass keys found by length of the text, without and with state passing."""
    study = read(STUDIES["mamba2"])
    figure, axes = panels()
    for axis, passing in zip(axes, (False, True), strict=True):
        draw_shares(axis, study, "passkey", list(study["results"][0]["passkey"]), passing)
        axis.set_title(passing_title(passing), fontsize=9)
        axis.set_xlabel("length of the text (tokens)")
    axes[0].set_ylabel("pass keys found")
    finish(figure, axes[0], path)


def bits_figure(path: Path) -> None:
    """Bits per byte by position, without and with state passing."""
    study = read(STUDIES["mamba2"])
    figure, axes = panels()
    for axis, passing in zip(axes, (False, True), strict=True):
        for arm, (colour, marker, line) in LOOKS.items():
            found = bits(rows_of(study, arm, None if arm == "base" else passing))
            axis.plot(found, color=colour, marker=marker, linestyle=line, label=NAMES.get(arm, arm))
        axis.set_title(passing_title(passing), fontsize=9)
        axis.set_xticks(range(len(spans(study))), spans(study), rotation=35, ha="right", fontsize=8)
        axis.set_xlabel("position in the text (tokens)")
    axes[0].set_ylabel("bits per byte")
    finish(figure, axes[0], path)


def passing_title(passing: bool) -> str:
    """Title of a panel."""
    return f"state passing {'on, probability .25' if passing else 'off'}"


def draw(folder: Path) -> None:
    """Write recall.svg, passkey.svg and bits_per_byte.svg into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        recall_figure(folder / "recall.svg")
        passkey_figure(folder / "passkey.svg")
        bits_figure(folder / "bits_per_byte.svg")
