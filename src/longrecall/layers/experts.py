"""Experts in stacked parameters, and the products of tokens with the few experts that each is sent to.

Four ways form the same products; `_way` takes the first that it can.

| way | what it does | taken |
|---|---|---|
| gathered | copies the weights of every token's experts | GPUs without gradients, up to `FEW_BYTES` of copies |
| grouped | sorts tokens by expert, one call of torch's grouped product | bfloat16 on Hopper and newer GPUs |
| gathered | | other GPUs without gradients, and fixed shapes: up to one copy of all weights |
| sorted | as grouped, with a product for every expert that has tokens | the CPU, and what is left on other GPUs |
| masked | every expert reads every token | in place of sorted for fixed shapes: no length may depend on values |

Sorted alone reads numbers back from the device, so that a decoding step can be recorded as a CUDA graph, and reading a
prompt too where it is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.mlp import ACTIVATIONS
from longrecall.layers.norm import operand_dtype
from longrecall.ops.execution import shapes_are_fixed

Way = Literal["gathered", "grouped", "sorted", "masked"]

FEW_BYTES = 2**26
"""Weights whose copies take less time than sorting and a grouped product of a row or two an expert (on an H200: 57
to 75 us in place of 79 to 91 for one token of 42 to 63 MB, but 182 in place of 138 for 200 MB)."""


class Experts(nn.Module):
    """E MLPs without biases: `gate_up_proj` ``[E, 2I, n]``, or `up_proj` ``[E, I, n]``, and `down_proj` ``[E, n, I]``.

    The layout is that of transformers' experts, gates first. PEFT's adapters on parameters (`target_parameters`) work
    on it as they do there: no parameter is read outside `forward`.
    """

    def __init__(self, count: int, size: int, inner_size: int, *, gated: bool, activation: str) -> None:
        super().__init__()
        self.gated, self.activation = gated, ACTIVATIONS[activation]
        if gated:
            self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner_size, size))
        else:
            self.up_proj = nn.Parameter(torch.empty(count, inner_size, size))
        self.down_proj = nn.Parameter(torch.empty(count, size, inner_size))
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """normal(0, std), as all projections of a model; std is its `initializer_range`."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, way: Way | None = None) -> Tensor:
        """The weighted sum of every token's experts.

        Args:
            x: tokens ``[T, n]``.
            chosen: int64 ``[T, k]``, the experts of each.
            weights: ``[T, k]``, in float32 (or float64).
            way: see the head of this file; None chooses.

        Returns:
            ``[T, n]`` in the dtype in which projections multiply.
        """
        dtype = operand_dtype(x)
        up, down = (self.gate_up_proj if self.gated else self.up_proj), self.down_proj
        if not chosen.numel():
            return x.to(dtype)
        if way is None:
            way = _way(x.device, dtype, up, down, chosen.numel())
        with torch.autocast(x.device.type, enabled=False):
            return _WAYS[way](x.to(dtype), chosen, weights, up.to(dtype), down.to(dtype), self._inner)

    def _inner(self, y: Tensor, weights: Tensor) -> Tensor:
        """What the last product takes, of the first one's result ``[..., 2I or I]`` and weights ``[..., 1]``.

        The weights are applied to the inner channels: they are fewer than those of the output, and rounded once.
        """
        if self.gated:
            gate, up = y.chunk(2, dim=-1)
            inner = self.activation(gate) * up
        else:
            inner = self.activation(y)
        return (inner * weights).to(y.dtype)

    def extra_repr(self) -> str:
        count, size, inner_size = self.down_proj.shape
        return f"{count}, {size}, {inner_size}, gated={self.gated}"


def _way(device: torch.device, dtype: torch.dtype, up: Tensor, down: Tensor, pairs: int) -> Way:
    """How products with these weights are formed in `dtype`, for so many pairs of a token and an expert."""
    experts, size, inner = down.shape
    # The gradient of a copy is added to the weights in their own dtype, pair after pair.
    gathers, fixed = device.type != "cpu" and not torch.is_grad_enabled(), shapes_are_fixed(device)
    if gathers and pairs * dtype.itemsize * (up[0].numel() + down[0].numel()) <= FEW_BYTES:
        return "gathered"
    # The kernel wants rows of whole 16 bytes.
    if groups_products(device, dtype) and inner % 8 == 0 and size % 8 == 0:
        return "grouped"
    if (gathers or fixed) and pairs <= experts:
        return "gathered"
    return "masked" if fixed else "sorted"


def groups_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel for grouped products there; elsewhere it reads sizes back and loops, as we do."""
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    there = hasattr(F, "grouped_mm") or hasattr(torch, "_grouped_mm")
    return there and torch.cuda.get_device_capability(device)[0] in (9, 10)


Inner = Callable[[Tensor, Tensor], Tensor]


def _grouped(x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor, inner: Inner) -> Tensor:
    sorting = _Sorting.of(chosen)
    # Where the rows of each expert end, on the device.
    ends = torch.searchsorted(sorting.experts, torch.arange(len(up), device=x.device), right=True, out_int32=True)
    y = _grouped_product(sorting.rows(x), up, ends)
    y = inner(y, sorting.of_pairs(weights))
    return sorting.sums(_grouped_product(y, down, ends))


def _grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x ``[S, n]``, rows of one expert after the other, times weight ``[E, m, n]`` -> ``[S, m]``."""
    product: Any = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
    y: Tensor = product(x, weight.transpose(-2, -1), offs=ends)
    return y


def _sorted(x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor, inner: Inner) -> Tensor:
    sorting = _Sorting.of(chosen)
    sizes = torch.bincount(sorting.experts, minlength=len(up)).tolist()
    # One gradient for all experts: that of up[index] would be as large as the whole stack for each of them.
    pieces = zip(
        sorting.rows(x).split(sizes), sorting.of_pairs(weights).split(sizes), up.unbind(0), down.unbind(0), strict=True
    )
    y = [F.linear(inner(F.linear(rows, own_up), own), own_down) for rows, own, own_up, own_down in pieces if len(rows)]
    return sorting.sums(torch.cat(y))


def _gathered(x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor, inner: Inner) -> Tensor:
    experts = chosen.flatten()
    rows = x.repeat_interleave(chosen.shape[1], dim=0)
    y = torch.bmm(up[experts], rows[:, :, None]).squeeze(-1)
    y = inner(y, weights.flatten()[:, None])
    return torch.bmm(down[experts], y[:, :, None]).view(*chosen.shape, -1).sum(1)


def _masked(x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor, inner: Inner) -> Tensor:
    of_all = weights.new_zeros((len(x), len(up))).scatter(1, chosen, weights)
    y = torch.zeros_like(x)
    for own_up, own_down, own in zip(up.unbind(0), down.unbind(0), of_all.unbind(1), strict=True):
        y = y + F.linear(inner(F.linear(x, own_up), own[:, None]), own_down)
    return y


_WAYS: dict[Way, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Inner], Tensor]] = {
    "grouped": _grouped,
    "sorted": _sorted,
    "gathered": _gathered,
    "masked": _masked,
}


class _Sorting:
    """Pairs of a token and one of its k experts, S = T * k of them, brought into the order of the experts."""

    def __init__(self, experts: Tensor, order: Tensor, place: Tensor, count: int) -> None:
        self.experts = experts
        """``[S]``, not decreasing."""
        self.order = order
        """``[S]``: the pair that stands at each place."""
        self.place = place
        """``[S]``: where each pair stands."""
        self.count = count
        """Experts k of a token."""

    @staticmethod
    def of(chosen: Tensor) -> _Sorting:
        """From the experts ``[T, k]`` of every token."""
        experts, order = chosen.flatten().sort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return _Sorting(experts, order, place, chosen.shape[1])

    def rows(self, x: Tensor) -> Tensor:
        """x ``[T, n]`` -> ``[S, n]``, the token of every pair."""
        rows: Tensor = _Spread.apply(x, self.order, self.place, self.count)
        return rows

    def of_pairs(self, weights: Tensor) -> Tensor:
        """``[T, k]`` -> ``[S, 1]``."""
        return weights.flatten()[self.order, None]

    def sums(self, y: Tensor) -> Tensor:
        """y ``[S, n]`` -> ``[T, n]``, the sum over every token's pairs."""
        sums: Tensor = _Collect.apply(y, self.order, self.place, self.count)
        return sums


class _Spread(torch.autograd.Function):
    """`_Sorting.rows`; its gradient is `_Sorting.sums`, which adds up in a fixed order and without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(order, place)
        ctx.count = count
        return x.index_select(0, order // count)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _Collect.apply(gradient, *ctx.saved_tensors, ctx.count), None, None, None


class _Collect(torch.autograd.Function):
    """`_Sorting.sums`; its gradient is `_Sorting.rows`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, place: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(order, place)
        ctx.count = count
        return y.index_select(0, place).view(-1, count, y.shape[1]).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _Spread.apply(gradient, *ctx.saved_tensors, ctx.count), None, None, None
