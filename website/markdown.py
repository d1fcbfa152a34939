"""Text of the program as Markdown."""

from __future__ import annotations

import re

_CODE = re.compile(r"(``.+?``|`[^`]*`)", re.DOTALL)


def escaped(text: str) -> str:
    """Text in which neither Markdown nor HTML finds anything of theirs; code between back ticks stays."""
    parts = _CODE.split(text)
    return "".join(part if index % 2 else re.sub(r"([*<_\[\]])", r"\\\1", part) for index, part in enumerate(parts))
