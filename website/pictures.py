"""The pictures of docs/concepts/, drawn by code: from recorded numbers, from a small simulation, or as a plan.

Each has a ground of its own, light or dark as the reader's system is, so that it can be read on any page.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "concepts" / "pictures"
DEMO = ROOT / "experiments" / "results" / "demo"
WIDTH = 720
STYLE = """
.ground { fill: #ffffff; stroke: #d0d4da } .text { fill: #1f2430 } .faint { fill: #667085 }
.a { fill: #3b6fd4 } .b { fill: #d9822b } .none { fill: #e6e9ee } .line { stroke: #667085; fill: none }
.la { stroke: #3b6fd4; fill: none } .lb { stroke: #d9822b; fill: none } .on { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  .ground { fill: #1b1f27; stroke: #3a4150 } .text { fill: #e8eaf0 } .faint { fill: #a2abbb }
  .a { fill: #7ea6f4 } .b { fill: #eda65f } .none { fill: #303744 } .line { stroke: #a2abbb }
  .la { stroke: #7ea6f4 } .lb { stroke: #eda65f } .on { fill: #11151c }
}
text { font: 14px system-ui, sans-serif } .small { font-size: 12px } .bold { font-weight: 600 }
path, polyline, line { stroke-width: 2 }
"""


class Picture:
    """An SVG of fixed width, filled from the top."""

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title = height, title
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "text", anchor: str = "start") -> None:
        """Words that begin, end or stand in the middle at x."""
        self.parts.append(
            f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}" text-anchor="{anchor}">{html.escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """A filled rectangle."""
        self.parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="3" class="{kind}"/>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line with a head at its end."""
        self.parts.append(f'<path d="M{x:.0f} {y:.0f} L{to_x:.0f} {to_y:.0f}" class="line" marker-end="url(#head)"/>')

    def line(self, points: Sequence[tuple[float, float]], kind: str, dashes: str = "") -> None:
        """A line through points."""
        places = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        extra = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(f'<polyline points="{places}" class="{kind}"{extra}/>')

    def svg(self) -> str:
        """The whole file."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img">',
                f"<title>{html.escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
                'orient="auto"><path d="M0 0 L8 4 L0 8 z" class="faint"/></marker></defs>',
                f'<rect x="1" y="1" width="{WIDTH - 2}" height="{self.height - 2}" rx="8" class="ground"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def state() -> str:
    """What a Transformer and a recurrent layer keep after each of eight tokens."""
    picture = Picture(270, "A cache grows with every token, a state does not")
    for index in range(8):
        x = 170 + index * 66
        picture.text(x + 22, 30, f"token {index + 1}", "faint small", "middle")
        for stored in range(index + 1):
            picture.box(x, 118 - stored * 10, 44, 8, "b")
        picture.box(x, 170, 44, 44, "a")
        if index:
            picture.arrow(x - 20, 192, x - 3, 192)
    picture.text(20, 90, "Transformer:", "text bold")
    picture.text(20, 110, "cache of all tokens", "faint")
    picture.text(20, 188, "recurrent layer:", "text bold")
    picture.text(20, 208, "state of fixed size", "faint")
    picture.text(170, 248, "Each token changes what is in the box. The box never grows.", "text")
    return picture.svg()


def recall() -> str:
    """Recall of the demo's recorded model by number of pairs, before and after."""
    picture = Picture(300, "Share of numbers recalled by number of pairs in the list, before and after")
    shares = {name: phonebook(DEMO / f"{name}.json") for name in ("before", "after")}
    pairs = sorted(shares["before"])
    left, bottom, height, step = 90, 240, 180, 600 / len(pairs)
    for tenth in (0, 5, 10):
        y = bottom - height * tenth / 10
        picture.line([(left, y), (left + 600, y)], "line", "2 6")
        picture.text(left - 10, y + 5, f"{tenth * 10}%", "faint small", "end")
    for index, count in enumerate(pairs):
        x = left + index * step + step / 2
        for shift, (name, kind) in ((-26, ("before", "b")), (2, ("after", "a"))):
            tall = height * shares[name][count]
            picture.box(x + shift, bottom - tall, 24, tall, kind)
        picture.text(x, bottom + 20, str(count), "text", "middle")
    picture.text(left + 300, bottom + 44, "pairs in the list", "faint", "middle")
    picture.box(left, 18, 14, 14, "b")
    picture.text(left + 20, 30, "before", "text")
    picture.box(left + 100, 18, 14, 14, "a")
    picture.text(left + 120, 30, "after: four times the state, trained on", "text")
    return picture.svg()


def phonebook(path: Path) -> dict[int, float]:
    """The share of right numbers in a result file, by the number of pairs."""
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    return {
        row["cell"]["pairs"]: row["value"] for row in rows if row["task"] == "phonebook" and row["metric"] == "accuracy"
    }


def overflow() -> str:
    """Simulated: how many of n stored pairs come back right, for states of three sizes."""
    picture = Picture(320, "Share of stored pairs that come back right, by how many were stored")
    left, bottom, height = 80, 250, 190
    counts = [1, 2, 4, 8, 16, 32, 64, 128]
    for tenth in (0, 5, 10):
        y = bottom - height * tenth / 10
        picture.line([(left, y), (left + 560, y)], "line", "2 6")
        picture.text(left - 10, y + 5, f"{tenth * 10}%", "faint small", "end")
    for index, count in enumerate(counts):
        picture.text(left + index * 80, bottom + 20, str(count), "text", "middle")
    for channels, kind, dashes in ((8, "lb", "2 4"), (32, "lb", ""), (128, "la", "")):
        shares = recalled(channels, counts)
        points = [(left + index * 80, bottom - height * share) for index, share in enumerate(shares)]
        picture.line(points, kind, dashes)
        x, y = points[next(index for index, share in enumerate(shares) if share < 0.9 or index == len(shares) - 1)]
        picture.text(x + 8, y - 6, f"{channels} x 16", "text small")
    picture.text(left + 280, bottom + 46, "pairs stored", "faint", "middle")
    picture.text(left, 34, "state of 8, 32 and 128 key channels", "text")
    return picture.svg()


def recalled(channels: int, counts: Sequence[int], values: int = 16, trials: int = 200) -> list[float]:
    """Share of pairs that a state S = sum of k v^T gives back: the value nearest to k S is the right one."""
    random = np.random.default_rng(0)
    shares = []
    for count in counts:
        right = 0
        for _ in range(trials):
            keys = random.standard_normal((count, channels)) / channels**0.5
            stored = random.choice([-1.0, 1.0], (count, values))
            read = keys @ (keys.T @ stored)
            right += int((np.argmax(read @ stored.T, axis=1) == np.arange(count)).sum())
        shares.append(right / (count * trials))
    return shares


def surgery() -> str:
    """A state that gets more rows, of which the model makes no use yet."""
    picture = Picture(270, "Surgery adds rows to the state that the model does not read yet")
    for x, rows, title in ((60, 4, "before"), (300, 16, "after surgery"), (540, 16, "after training")):
        picture.text(x, 34, title, "text bold")
        for row in range(rows):
            kind = "a" if row < 4 else ("none" if x == 300 else "b")
            picture.box(x, 48 + row * 11, 110, 9, kind)
    picture.arrow(190, 92, 280, 92)
    picture.arrow(430, 92, 520, 92)
    picture.text(60, 250, "written and read", "text")
    picture.text(300, 250, "written, not read", "text")
    picture.text(540, 250, "written and read", "text")
    return picture.svg()


def passing() -> str:
    """Where training sequences begin, without and with state passing."""
    picture = Picture(290, "Without passing every sequence starts from an empty state, with it from the last one's")
    for top, passed, title in ((40, False, "usual training"), (165, True, "state passing")):
        picture.text(20, top + 40, title, "text bold")
        for index in range(3):
            x = 160 + index * 190
            kind = "b" if passed and index else "none"
            picture.box(x, top + 14, 34, 40, kind)
            picture.text(x + 17, top + 72, "filled" if kind == "b" else "empty", "faint small", "middle")
            picture.box(x + 40, top + 24, 96, 20, "a")
            picture.text(x + 88, top + 39, f"text {index + 1}", "on small", "middle")
            if passed and index < 2:
                picture.arrow(x + 140, top + 34, x + 186, top + 34)
    picture.text(160, 272, "The texts have nothing to do with each other. No gradient flows back.", "faint")
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "state": state,
    "recall": recall,
    "overflow": overflow,
    "surgery": surgery,
    "passing": passing,
}


def stale(write: bool) -> list[str]:
    """Names of the pictures that are not what the code draws; `write` makes them so."""
    found = []
    for name, draw in PICTURES.items():
        path, drawn = FOLDER / f"{name}.svg", draw()
        if not path.is_file() or path.read_text(encoding="utf-8") != drawn:
            found.append(name)
            if write:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(drawn, encoding="utf-8")
    return found


def main() -> int:
    """Draw, or compare; 1 when a picture differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a picture is not up to date")
    args = parser.parse_args()
    found = stale(write=not args.check)
    print(f"{'differ' if args.check else 'drew'}: {', '.join(found) or 'none'}")
    return 1 if args.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
