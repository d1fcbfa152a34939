"""The colours of a page and of its plots, in the light and in the dark; printed pages are light.

A plot is drawn in the light colours, and `themed` puts names in their place, which the style sheet of the page gives
both values. Shades of a map have no names, there are too many: each carries its dark colour beside the light one.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb

PAGE = {
    "paper": ("#ffffff", "#14181d"),
    "ink": ("#222222", "#e6e8eb"),
    "soft": ("#5a5a5a", "#aeb4bc"),
    "line": ("#d4d4d4", "#3d454e"),
    "accent": ("#00548f", "#7cbcf5"),
}
"""Name -> colour in the light, colour in the dark."""

SERIES = (
    ("#5b5b5b", "#a9a9a9"),
    ("#00558f", "#6cb2f0"),
    ("#c45a00", "#f0903c"),
    ("#00805f", "#3fc79a"),
    ("#a83a80", "#e684bf"),
    ("#2388bd", "#a5dcf7"),
    ("#8a6d00", "#d6b53f"),
    ("#1b1b1b", "#f2f2f2"),
)
"""The same of every line: neighbours differ in grey too; after Okabe and Ito's colours for every eye."""

SHADES = LinearSegmentedColormap.from_list("shares", ["#f7fbff", "#6aaed6", "#0b4f95"])
"""White to blue; its grey falls all the way, so that the order of shades survives a grey printer."""
DARK_SHADES = LinearSegmentedColormap.from_list("dark shares", ["#1c2833", "#3277ad", "#c4e6ff"])
"""Dark to light blue: more stands out more, as it does on paper."""

_MAP_INKS = {
    ("w", "w"): "#fefefe",
    ("w", "k"): "#fefeff",
    ("k", "w"): "#010102",
    ("k", "k"): "#010101",
}
"""White or black: what is read on a shade in the light and on its dark one -> the colour in which it is drawn.

It says both, and is no colour of the page."""

_LEVELS = 256
_COLOUR = re.compile(r"\b(fill|stroke): (#[0-9a-f]{6})")
_ATTRIBUTE = re.compile(r'\b(fill|stroke)="(#[0-9a-f]{6})"')


def contrast(one: Any, other: Any) -> float:
    """Return the contrast ratio, 1 to 21, of two colours (anything matplotlib takes), as WCAG 2 defines it."""
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: Any) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def map_ink(share: float) -> str:
    """Return the colour in which to draw a number on the shade of a share, from 0 to 1."""
    light, dark = (max("wk", key=lambda ink: contrast(ink, shades(share))) for shades in (SHADES, DARK_SHADES))
    return _MAP_INKS[light, dark]


def style_sheet() -> str:
    """Return the style rules that give every name its colour."""
    light, dark = ("; ".join(f"--{name}: {pair[mode]}" for name, pair in _named().items()) for mode in (0, 1))
    return (
        f":root {{ color-scheme: light dark; {light}; }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark}; }} }}\n"
        "@media print { :root { color-scheme: light; } }"
    )


def themed(svg: str) -> str:
    """Return a plot, drawn in the light colours, in colours that follow the page."""
    colours = _rules()
    # Presentation attributes take no names: they become style rules.
    styled = _ATTRIBUTE.sub(r'style="\1: \2"', svg)
    return _COLOUR.sub(lambda found: colours.get(found[2], found[0]).format(found[1]), styled)


@functools.cache
def _rules() -> dict[str, str]:
    """Colour in which something is drawn -> the style rule in its place, with ``{0}`` for what it colours."""
    rules = {light: f"{{0}}: var(--{name})" for name, (light, _) in _named().items()}
    for level in range(_LEVELS):
        light, dark = to_hex(SHADES(level)), to_hex(DARK_SHADES(level))
        rules[light] = _both(light, dark)
    return rules | {drawn: _both(to_hex(light), to_hex(dark)) for (light, dark), drawn in _MAP_INKS.items()}


def _both(light: str, dark: str) -> str:
    # Browsers without light-dark() skip the second rule, and show the light colour.
    return f"{{0}}: {light}; {{0}}: light-dark({light}, {dark})"


def _named() -> dict[str, tuple[str, str]]:
    return PAGE | {f"s{index}": pair for index, pair in enumerate(SERIES)}
