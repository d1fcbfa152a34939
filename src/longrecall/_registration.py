"""transformers, PEFT and lm-evaluation-harness learn about us, without any package importing another one early.

Two links per class of transformers, so that the order of imports does not matter: when transformers' auto module
appears, ours is imported; when ours appears, it registers itself. Ours may be half imported at the first moment (it
needs transformers, whose import reaches the auto module), and then only the second link acts.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

try:
    from wrapt import register_post_import_hook
except ModuleNotFoundError:
    # Part of the base is missing. `longrecall doctor` has to say so, and cannot where this package does not import.
    warnings.warn("wrapt is not installed: transformers will not know longrecall; pip install wrapt", stacklevel=2)

    def register_post_import_hook(hook: Callable[[ModuleType], Any] | str, name: str) -> None:
        """Nothing: there is no way to hear of an import."""


_CONFIG, _AUTO_CONFIG = "longrecall.models.config", "transformers.models.auto.configuration_auto"
_MODEL, _AUTO_MODEL = "longrecall.models.recurrent_lm", "transformers.models.auto.modeling_auto"
_GENERATION = "longrecall.inference.generation"
_HARNESS_MODELS = "lm_eval.models"

_ADAPTER_TARGETS = "peft.utils.constants"

_ALL_LINEAR = "all-linear"
"""PEFT's word for every linear layer but the output head."""

_NOT_OF_LINEAR_LAYERS = ("LNTUNING", "BEFT")
"""PEFT's methods whose targets are something else: norms, biases."""

_SCALED = ["k_proj", "v_proj", "kv_b_proj", "i_proj", "in_proj", "down_proj"]
"""What IA3 scales: keys and values, by the names that mixers give them, and the input of an MLP's last layer."""


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
    # By name too: Trainer's label smoothing shifts the labels of these classes only, and pipelines warn of others.
    names = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names.setdefault(module.RecurrentConfig.model_type, module.RecurrentLM.__name__)


def register_adapter_targets() -> None:
    """Arrange for PEFT to know which layers an adapter without `target_modules` adapts; imports nothing."""
    register_post_import_hook(_register_targets, _ADAPTER_TARGETS)


def _register_targets(constants: ModuleType) -> None:
    model_type = "longrecall"
    begin, end = "TRANSFORMERS_MODELS_TO_", "_TARGET_MODULES_MAPPING"
    for name, targets in vars(constants).items():
        method = name.removeprefix(begin).removesuffix(end)
        if name == f"{begin}{method}{end}" and method not in _NOT_OF_LINEAR_LAYERS:
            targets.setdefault(model_type, _SCALED if method == "IA3" else _ALL_LINEAR)
    feedforward = getattr(constants, f"{begin}IA3_FEEDFORWARD_MODULES_MAPPING", {})
    feedforward.setdefault(model_type, ["down_proj"])


def register_harness_model() -> None:
    """Arrange for lm-evaluation-harness to know the model name ``longrecall``; imports nothing."""
    register_post_import_hook(_register_harness_model, _HARNESS_MODELS)


def _register_harness_model(_: ModuleType) -> None:
    # After the harness has registered its own models: it leaves that out where a registry is not empty.
    registry = importlib.import_module("lm_eval.api.registry").model_registry
    if "longrecall" not in registry:
        registry.register("longrecall", target="longrecall.evaluation.harness.language_model:LongrecallLM")
