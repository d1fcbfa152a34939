"""Whether a model still computes what its modules say, for work that passes over them: what others have put into it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrize

from longrecall.errors import UserError
from longrecall.layers.access import KINDS, are_whole
from longrecall.models.captured_steps import in_memory, modules_of, tensors_of
from longrecall.ops.row_scaled import is_quantised, why_not_row_scaled

OUR_PACKAGES = ("longrecall", "torch", "transformers")
"""Where the modules of a model come from; what others put in their place computes something else."""

OTHERS_OF_TORCH = ("torch.ao", "torch.distributed", parametrize.__name__)
"""Where torch keeps such others: quantised layers, sharded ones, those whose weights are computed."""

_OURS, _NOT_OURS = (tuple(f"{name}." for name in names) for names in (OUR_PACKAGES, OTHERS_OF_TORCH))


def why_not_as_built(model: nn.Module) -> str | None:
    """Return what a step would pass over, as it works on the weights themselves; None when there is nothing.

    Hooks, modules that other packages have put in a layer's place (adapters, quantised layers), weights that are more
    than a tensor, and those that do not lie where the model's first one does. Two things are no reason: the model's own
    forward pass may be wrapped, as accelerate's autocast is, and a linear layer may have a weight of torchao's with a
    scale for each row (ops/row_scaled.py).
    """
    if global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks:
        return "global forward hooks are set"
    # What hundreds of modules have in common is looked at for all of them at once: this comes before every text.
    modules = modules_of(model)
    others = {kind for kind in set(map(type, modules)) if not _ours(kind)}
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__ or type(module) in others:
            reason = _not_as_built(module, whole=module is model)
            if reason is not None:
                name = next(name for name, other in model.named_modules() if other is module)
                return f"{name or 'the model'} {reason}"
    tensors = tensors_of(modules)
    if len({tensor.device for tensor in in_memory(tensors)}) > 1:
        return "its weights lie on several devices"
    reason = _why_not_readable(modules, tensors)
    return None if reason is None else f"it {reason}"


def check_whole(model: nn.Module, work: str) -> None:
    """Raise UserError, before `work` begins, on a model whose weights are not there, such as a sharded one."""
    modules = modules_of(model)
    if reason := _why_not_readable(modules, tensors_of(modules)):
        raise UserError(f"{work} reads weights without calling the modules that own them, but the model {reason}")


def _why_not_readable(modules: list[nn.Module], tensors: list[Tensor]) -> str | None:
    others = set(map(type, tensors)) - KINDS
    return _why_not_quantised_so(modules, others) if others else None


def _why_not_quantised_so(modules: list[nn.Module], others: set[type]) -> str | None:
    """What is against weights of these other types, wherever they are; None where all are row-scaled ones."""
    picky = {kind for kind in set(map(type, modules)) if getattr(kind, "wants_whole_weights", False)}
    for module in modules:
        for name, weight in (*module._parameters.items(), *module._buffers.items()):
            if weight is None or type(weight) not in others:
                continue
            kind = type(weight).__name__
            if not is_quantised(weight) or not isinstance(module, nn.Linear) or name != "weight":
                return f"has weights of a kind that kernels cannot read ({kind})"
            if reason := why_not_row_scaled(weight):
                return f"has a quantised weight ({kind}) that {reason}"
    for module in modules:
        if type(module) in picky and not are_whole(module.parameters()):
            return f"has quantised weights in a layer that works with whole ones ({type(module).__name__})"
    return None


def _not_as_built(module: nn.Module, whole: bool) -> str | None:
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        # Those of transformers only ask for gradients of embeddings, for checkpointing.
        if not getattr(hook, "__module__", "").startswith("transformers."):
            return "has forward hooks"
    if whole:
        return None
    if "forward" in module.__dict__:
        return "has another forward method than its kind"
    if parametrize.is_parametrized(module):
        return "has weights that are computed from others"
    return None if _ours(type(module)) else f"is a module of another package ({type(module).__module__})"


def _ours(kind: type) -> bool:
    home = f"{kind.__module__}."
    return home.startswith(_OURS) and not home.startswith(_NOT_OURS)
