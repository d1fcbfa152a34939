"""How often a progress bar is drawn."""

from __future__ import annotations

import sys


def drawing_interval() -> float:
    """Return the seconds between two drawings of a bar on stderr.

    A terminal draws over the last one. A file, such as the log of a batch job, keeps them all, so it gets fewer.
    """
    return 0.1 if sys.stderr.isatty() else 30.0
