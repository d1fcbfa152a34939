"""The description of the package for an index: README.md without what leads nowhere there.

An index shows the README on a page of its own, without the other files of the repository. So links to them keep their
words alone, and pictures from them are left out. hatchling calls this when it builds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"!\[[^\]]*\]\((?!https?://)[^)]*\)\n*")
_WHERE = "The files that this page names are in the source distribution."
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?://)[^)]*\)")


class DescriptionHook(MetadataHookInterface):
    """Fills in `readme`, which pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the description to the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        words = _LINK.sub(r"\1", _PICTURE.sub("", text))
        metadata["readme"] = {"content-type": "text/markdown", "text": f"{words}\n{_WHERE}\n"}
