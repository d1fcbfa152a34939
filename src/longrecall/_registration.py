"""transformers' Auto classes learn model_type "longrecall" without either package importing the other early.

Two links per class, so that the order of imports does not matter: when transformers' auto module appears, ours is
imported; when ours appears, it registers itself. Ours may be half imported at the first moment (it needs transformers,
whose import reaches the auto module), and then only the second link acts.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from wrapt import register_post_import_hook

_CONFIG, _AUTO_CONFIG = "longrecall.models.config", "transformers.models.auto.configuration_auto"
_MODEL, _AUTO_MODEL = "longrecall.models.recurrent_lm", "transformers.models.auto.modeling_auto"
_GENERATION = "longrecall.inference.generation"


def register_auto_classes() -> None:
    """Arrange for AutoConfig and AutoModelForCausalLM to know our classes; imports neither transformers nor torch."""
    register_post_import_hook(_register_config, _CONFIG)
    register_post_import_hook(_register_model, _MODEL)
    register_post_import_hook(_import_generation, _MODEL)
    register_post_import_hook(_import_config, _AUTO_CONFIG)
    register_post_import_hook(_import_model, _AUTO_MODEL)


def _import_config(_: ModuleType) -> None:
    importlib.import_module(_CONFIG)


def _import_model(_: ModuleType) -> None:
    importlib.import_module(_MODEL)


def _import_generation(_: ModuleType) -> None:
    """generate() of our models takes captured steps, which stand above the model: they put themselves in there."""
    importlib.import_module(_GENERATION)


def _register_config(module: ModuleType) -> None:
    auto = importlib.import_module(_AUTO_CONFIG)
    auto.AutoConfig.register(module.RecurrentConfig.model_type, module.RecurrentConfig, exist_ok=True)


def _register_model(module: ModuleType) -> None:
    auto = importlib.import_module(_AUTO_MODEL)
    auto.AutoModelForCausalLM.register(module.RecurrentConfig, module.RecurrentLM, exist_ok=True)
