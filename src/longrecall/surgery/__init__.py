"""Surgery: checkpoint in, checkpoint with a larger recurrent state out."""

from longrecall.surgery.expand import expand
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
