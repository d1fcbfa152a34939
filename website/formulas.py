"""Formulas as MathML, which browsers draw themselves: the site needs no script of another server."""

from __future__ import annotations

import re

_BLOCK = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
_INLINE = re.compile(r"(?<![\\$\w])\$([^$\n]+?)\$(?![\w$])")


def with_mathml(prose: str) -> str:
    """Prose whose ``$$...$$`` and ``$...$`` are MathML; needs latex2mathml where there are any."""
    if "$" not in prose:
        return prose
    from latex2mathml.converter import convert

    # A block of HTML stands alone between empty lines.
    prose = _BLOCK.sub(lambda found: f"\n<div>{convert(found[1].strip(), display='block')}</div>\n", prose)
    return _INLINE.sub(lambda found: convert(found[1]), prose)
