"""Linear layers with weights of one byte a number, for inference: torchao's weight-only int8 and fp8."""

from __future__ import annotations

from typing import Any

from torch import nn

from longrecall.errors import UserError, did_you_mean
from longrecall.installing import install_command
from longrecall.ops.row_scaled import is_quantised

CONFIGS = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}
"""The kinds, and torchao's configuration of each: symmetric, with a scale for each row of a weight."""


def check_quantize(kind: str | None) -> None:
    """Check it before a model is loaded; None is none.

    Raises:
        UserError: an unknown kind, or torchao is not installed.
    """
    if kind is None:
        return
    if kind not in CONFIGS:
        raise UserError(f'quantize "{kind}" is not one of {", ".join(CONFIGS)}.{did_you_mean(str(kind), CONFIGS)}')
    _torchao()


def quantise(model: nn.Module, kind: str) -> None:
    """Replace the weight of every linear layer, the head's too, by one of 8-bit numbers; embeddings stay.

    Layers that work with whole weights (retrieval) are left as they are. A head that is tied to the embeddings gets a
    weight of its own. The quantised model is for inference; nothing else of it changes.

    Args:
        model: quantised in place, on the device where it is.
        kind: "int8", or "fp8" (float8_e4m3fn).

    Raises:
        UserError: as `check_quantize`.
    """
    check_quantize(kind)
    torchao = _torchao()
    whole = {
        inner
        for module in model.modules()
        if getattr(module, "wants_whole_weights", False)
        for inner in module.modules()
    }

    def chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and module not in whole and not is_quantised(module.weight)

    # torchao would change settings of the compiler for the whole process.
    torchao.quantize_(model, getattr(torchao, CONFIGS[kind])(set_inductor_config=False), filter_fn=chosen)


def quantised_as(model: nn.Module) -> str | None:
    """The dtype of a model's quantised weights, such as "int8"; None where there are none."""
    for weight in model.parameters():
        if is_quantised(weight):
            parts: Any = weight
            return str(parts.qdata.dtype).removeprefix("torch.")
    return None


def check_not_quantised(model: nn.Module, done: str) -> None:
    """Raise UserError where something is to be done with a model that takes whole weights: it cannot be `done`."""
    if kind := quantised_as(model):
        raise UserError(
            f"the model has {kind} weights and cannot be {done}. Save it before it is quantised, and quantise it "
            "again on loading (quantize=, --quantize). Or quantise and save it with transformers' TorchAoConfig"
        )


def _torchao() -> Any:
    try:
        import torchao.quantization
    except ImportError as error:
        raise UserError(f"quantised weights need torchao: {install_command('torchao')}") from error
    return torchao.quantization
