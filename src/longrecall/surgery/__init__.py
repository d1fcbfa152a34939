"""Surgery: checkpoint in, checkpoint with a larger recurrent state out.

Importing this package is cheap: torch is imported when something that needs it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from longrecall.late_names import late_names

if TYPE_CHECKING:
    from longrecall.surgery.expansion import expand
    from longrecall.surgery.handover import finish_checkpoint, finish_handover, handover_layers
    from longrecall.surgery.layer_selection import select_layers
    from longrecall.surgery.method import INITS
    from longrecall.surgery.registry import METHODS
    from longrecall.surgery.summary import ExpansionSummary

__all__ = [
    "INITS",
    "METHODS",
    "ExpansionSummary",
    "expand",
    "finish_checkpoint",
    "finish_handover",
    "handover_layers",
    "select_layers",
]

__getattr__ = late_names(
    __name__,
    {
        "INITS": "longrecall.surgery.method",
        "METHODS": "longrecall.surgery.registry",
        "ExpansionSummary": "longrecall.surgery.summary",
        "expand": "longrecall.surgery.expansion",
        "finish_checkpoint": "longrecall.surgery.handover",
        "finish_handover": "longrecall.surgery.handover",
        "handover_layers": "longrecall.surgery.handover",
        "select_layers": "longrecall.surgery.layer_selection",
    },
)
