"""Text of the program as Markdown."""

from __future__ import annotations

import re

_CODE = re.compile(r"(``.+?``|`[^`]*`)", re.DOTALL)


def escaped(text: str) -> str:
    """Text in which neither Markdown nor HTML finds anything of theirs; code between back ticks stays."""
    parts = _CODE.split(text)
    return "".join(part if index % 2 else _escaped(part) for index, part in enumerate(parts))


def _escaped(prose: str) -> str:
    # A back slash does not hide < from every reader of Markdown.
    return re.sub(r"([*_\[\]])", r"\\\1", prose).replace("<", "&lt;")
