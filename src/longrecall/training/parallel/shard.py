"""Sharded weights: torch's FSDP2 over every layer and the rest of a model, and what training needs beside it.

Between steps a process holds its rows of every weight, gradient and optimizer state. A layer gathers its weights before
its forward and its backward pass and drops them after; the gradients are averaged over all processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.training.parallel.place import Place

COMPUTED = {"fp32": None, "bf16": torch.bfloat16}
"""run.precision -> the type in which the layers' weights are gathered; None = their own."""


def shard_model(model: RecurrentLM, place: Place, precision: str = "fp32") -> None:
    """Shard a model in place over the processes of `place`, which all call this; it may be on the meta device.

    Every layer is a unit of its own; a layer that borrows weights of another one enters that one to use them. The rest
    (embeddings, final norm, head) is gathered from the beginning of the forward to the end of the backward pass, in its
    own type: the residual stream has the precision that it has in one process.

    Args:
        model: on the device that this process computes on, or on meta.
        place: with `sharded`.
        precision: run.precision. Under bf16 the layers' weights are gathered as bfloat16; the gradients are summed
            and the weights are kept in their own type, at least float32 for the sums.
    """
    if place.weights_mesh is None:
        raise ValueError("there is nothing to shard over: shard x context is 1")
    # Autocast and the layers themselves cast what they read; FSDP would round the residual stream and the states.
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    inside = MixedPrecisionPolicy(COMPUTED[precision], torch.float32, cast_forward_inputs=False)
    if model.dtype == torch.float64:
        whole = inside = MixedPrecisionPolicy(cast_forward_inputs=False)
    # With one copy of the weights the mesh has one dimension: torch's plain FSDP.
    mesh = place.weights_mesh if place.replicate > 1 else place.weights_mesh["weights"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=inside)
    fully_shard(model, mesh=mesh, mp_policy=whole)
    # Memory tokens are read by all layers before a batch is.
    register_fsdp_forward_method(model, "zero_state")


def as_sharded(model: nn.Module) -> FSDPModule:
    """Return a model after `shard_model` with the methods that FSDP has given it."""
    return cast(FSDPModule, model)


def own_rows(parameter: Tensor) -> tuple[int, int] | None:
    """Return which rows (along dimension 0) of a sharded parameter this process holds; None for one it holds whole."""
    if not isinstance(parameter, DTensor):
        return None
    # torch.chunk, as FSDP cuts: equal pieces, of which the last ones may be shorter or empty.
    mesh = parameter.device_mesh
    pieces, index = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    rows = parameter.shape[0]
    size = -(-rows // pieces)
    return min(index * size, rows), min((index + 1) * size, rows)


def local(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor; all processes of a sharded one must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def average_replicated(parameters: Iterable[nn.Parameter]) -> None:
    """Average over all processes the gradients of parameters that FSDP does not own: learned initial states."""
    own = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    if not own:
        return
    for parameter in own:
        if parameter.grad is None:
            # Of the ranks of a context group only the first reads the initial state; all take part in the sum.
            parameter.grad = torch.zeros_like(parameter)
    gradients = [cast(Tensor, parameter.grad) for parameter in own]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    flat /= torch.distributed.get_world_size()
    for gradient, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(piece.view_as(gradient))


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, place: Place) -> Tensor:
    """Scale the gradients so that their norm over all shards is at most `limit` (infinity: leave them).

    Returns:
        The norm before, float32 ``[]``, the same on every process.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    device = gradients[0].device if gradients else torch.device("cpu")
    parts = [local(gradient) for gradient in gradients if isinstance(gradient, DTensor)]
    square = _square_sum(parts, device)
    if place.weights_mesh is not None:
        torch.distributed.all_reduce(square, group=place.weights_mesh.get_group("weights"))
    others = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    norm = (square + _square_sum(others, device)).sqrt()
    if limit != float("inf") and gradients:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([*parts, *others], factor)
    return norm.float()


def _square_sum(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all numbers, in at least float32."""
    if not tensors:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm([tensor for tensor in tensors if tensor.numel()] or [torch.zeros(1, device=device)])
    return torch.stack([norm.float() if norm.dtype != torch.float64 else norm for norm in norms]).square().sum()
