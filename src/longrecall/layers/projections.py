"""Several linear layers of one input."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from longrecall.layers.access import may_read
from longrecall.layers.norm import RMSNorm, operand_dtype
from longrecall.ops.norms.op import Gate, gated_norm_projection, gated_projection, silu_product
from longrecall.ops.projections.biased import project_with_biases
from longrecall.ops.projections.together import project_together


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is nothing but a product with its weight, which may then be taken without calling the layer.

    What stands in the place of one (an adapter, a quantised one, one with hooks) is called as it wants to be.
    """
    return may_read(layer, nn.Linear) and layer.bias is None


def is_biased(layer: nn.Module) -> bool:
    """As `is_plain`, of a layer with a bias."""
    return may_read(layer, nn.Linear) and layer.bias is not None


def project_biased(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """x ``[..., d]`` through each of the layers, which have biases; on a GPU with one gradient for all of them.

    Under autocast they are called one by one.
    """
    together = (
        x.is_cuda
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and all(is_biased(layer) for layer in layers)
    )
    if not together:
        return tuple(layer(x) for layer in layers)
    weights, biases = ([layer.get_parameter(name) for layer in layers] for name in ("weight", "bias"))
    return project_with_biases(x, weights, biases)


def project(x: Tensor, layers: Mapping[str, nn.Module], joined: int = 0) -> dict[str, Tensor]:
    """x ``[..., d]`` through each of the layers, by name; on a GPU with one gradient for all of them.

    `joined`: how many of the last ones, narrow, are one product there (see `ops.projections.project_together`).
    """
    together = (
        x.is_cuda
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and all(is_plain(layer) for layer in layers.values())
    )
    if not together:
        return {name: layer(x) for name, layer in layers.items()}
    # Autocast would round x for every layer anew, and each would keep its own copy.
    dtype = operand_dtype(x)
    weights = [layer.get_parameter("weight").to(dtype) for layer in layers.values()]
    with torch.autocast(x.device.type, enabled=False):
        return dict(zip(layers, project_together(x.to(dtype), weights, joined), strict=True))


def project_gated(
    x: Tensor, norm: RMSNorm, gate: Tensor, layer: nn.Module, dtype: torch.dtype, kind: Gate = "silu"
) -> Tensor:
    """The gated norm of x, in `dtype`, through a layer: x of B * T * n numbers, gate ``[B, T, n]`` -> ``[B, T, d]``."""
    if is_plain(layer) and may_read(norm, RMSNorm):
        matrix = layer.get_parameter("weight")
        return gated_norm_projection(x, gate, norm.scale, matrix, norm.eps, kind=kind, groups=norm.groups, dtype=dtype)
    projected: Tensor = layer(norm(x, dtype, gate=gate, kind=kind).reshape(gate.shape))
    return projected


def project_product(x: Tensor, gate: Tensor, layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """x times silu of its gate, both ``[B, T, n]``, in `dtype`, through a layer -> ``[B, T, d]``."""
    x, gate = x.to(dtype), gate.to(dtype)
    if is_plain(layer):
        return gated_projection(gate, x, layer.get_parameter("weight"))
    projected: Tensor = layer(silu_product(gate, x))
    return projected
