"""longrecall gives a linear-recurrent language model a bigger and better memory, and proves it.

Importing this package is cheap: torch and transformers are imported when something that needs them is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from longrecall._registration import register_adapter_targets, register_auto_classes, register_harness_model
from longrecall.late_names import late_names
from longrecall.version import __version__

if TYPE_CHECKING:
    from longrecall.models.config import RecurrentConfig
    from longrecall.models.loading import load
    from longrecall.models.recurrent_lm import RecurrentLM
    from longrecall.models.state import RecurrentState
    from longrecall.serving.engine import Engine
    from longrecall.surgery.expansion import expand

__all__ = ["Engine", "RecurrentConfig", "RecurrentLM", "RecurrentState", "__version__", "expand", "load"]

_HOMES = {
    "Engine": "longrecall.serving.engine",
    "RecurrentConfig": "longrecall.models.config",
    "RecurrentLM": "longrecall.models.recurrent_lm",
    "RecurrentState": "longrecall.models.state",
    "expand": "longrecall.surgery.expansion",
    "load": "longrecall.models.loading",
}

__getattr__ = late_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_auto_classes()
register_adapter_targets()
register_harness_model()
