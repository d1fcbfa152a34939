"""Code that a native checkpoint can bring along: transformers then loads it where nothing has imported longrecall."""

from __future__ import annotations

CODE_FILE = "modeling_longrecall.py"
AUTO_MAP = {
    "AutoConfig": "modeling_longrecall.RecurrentConfig",
    "AutoModelForCausalLM": "modeling_longrecall.RecurrentLM",
}

CODE = '''"""Loads this checkpoint with the package longrecall, which has to be installed."""

try:
    from longrecall.models.config import RecurrentConfig
    from longrecall.models.recurrent_lm import RecurrentLM
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "longrecall":
        raise
    raise ImportError(
        "This checkpoint is a model of the package longrecall, which is not installed here; "
        "install it (its README says how) and load the checkpoint again."
    ) from None

__all__ = ["RecurrentConfig", "RecurrentLM"]
'''
