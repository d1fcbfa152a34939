"""The residual stream of one decoding step: norms, products and additions are asked for through it, to be fused.

How far they are fused depends on the batch size: for a row or two norms and additions happen inside the products. For
more, products of one input share a launch with norms and additions between them, or are a library's where it is faster.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.layers.mlp import SwiGLU
from longrecall.layers.norm import Norm, RMSNorm
from longrecall.layers.projections import is_plain
from longrecall.ops.row_scaled import RowScaled, is_quantised, row_scaled

FEW_ROWS = 2
"""Up to this batch size products are fused with what stands around them; beyond, they are formed by tiles."""


class Stream:
    """The residual stream ``[B, d]`` of one decoding step, in plain torch.

    Norms and products are asked for through it, so that they can be fused with each other.
    """

    fused: ClassVar[bool] = False
    """Whether kernels serve it, and may be taken for what a layer does between its products."""
    adds_inside_products: ClassVar[bool] = False
    """Whether a product is added to the stream by the kernel that forms it."""

    def __init__(self, x: Tensor, dtype: torch.dtype) -> None:
        self.x, self.dtype = x, dtype
        self.carried: dict[str, Tensor] = {}
        """What earlier layers have passed on to later ones, ``[B, 1, ...]`` (layers/passed.py)."""

    def normed(self, norm: Norm | None) -> Tensor:
        """The normed stream ``[B, d]`` in the weights' dtype; without a norm, the stream itself."""
        return self.x.to(self.dtype) if norm is None else norm(self.x, self.dtype)

    def add(self, y: Tensor) -> None:
        """Add a layer's output ``[B, d]``."""
        self.x += y

    def project(self, norm: Norm | None, weights: list[Tensor]) -> list[Tensor]:
        """The normed stream times each weight ``[n, d]`` -> ``[B, n]``."""
        x = self.normed(norm)
        return [self.product(x, weight) for weight in weights]

    def product(self, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Weight ``[n, m]`` times y ``[B, m]``, plus the bias -> ``[B, n]``."""
        return F.linear(y, weight, bias)

    def add_product(self, y: Tensor, weight: Tensor) -> None:
        """Add weight ``[d, n]`` times y ``[B, n]``."""
        self.add(self.product(y, weight))

    def add_mlp(self, norm: RMSNorm, mlp: SwiGLU) -> None:
        """Add the MLP of the normed stream."""
        self.add(mlp(self.normed(norm)))

    def head(self, norm: Norm, layer: nn.Module) -> Tensor:
        """The normed stream through the model's head -> ``[B, vocab]``."""
        logits: Tensor = layer(self.normed(norm))
        return logits

    def through(self, y: Tensor, layer: nn.Module) -> Tensor:
        """y ``[B, m]`` through a linear layer, its bias included -> ``[B, n]``."""
        z: Tensor = layer(y)
        return z


class FusedStream(Stream):
    """The same in kernels: an output is added together with the next norm.

    Quantised weights are read as they are (ops/row_scaled.py): torchao's own product would form all of a weight in the
    model's dtype, for every token.
    """

    fused = True

    def __init__(self, x: Tensor, dtype: torch.dtype) -> None:
        super().__init__(x, dtype)
        self.update: Tensor | None = None

    def normed(self, norm: Norm | None) -> Tensor:
        from longrecall.ops.decoding.triton.elementwise import add_norm

        if not isinstance(norm, RMSNorm):
            self._settle()
            return super().normed(norm)
        out = torch.empty_like(self.x, dtype=self.dtype)
        update, self.update = self.update, None
        return add_norm(self.x, update, norm.weight, norm.eps, out, norm.offset)

    def add(self, y: Tensor) -> None:
        if self.update is not None:
            self.x += self.update
        self.update = y

    def project(self, norm: Norm | None, weights: list[Tensor]) -> list[Tensor]:
        from longrecall.ops.decoding.triton.wide_products import wide_products

        x = self.normed(norm)
        readable = [_readable_by_tiles(x, weight) for weight in weights]
        found = [weight for weight in readable if weight is not None]
        if len(found) < len(weights):
            return [self.product(x, weight) for weight in weights]
        return wide_products(x, found)

    def add_mlp(self, norm: RMSNorm, mlp: SwiGLU) -> None:
        y = self._gate_up(self.normed(norm), mlp.gate_proj, mlp.up_proj)
        down: nn.Linear = mlp.down_proj
        self.add(self.product(y, down.weight) if _is_bare(down) else self.through(y, down))

    def _gate_up(self, x: Tensor, gate_proj: nn.Linear, up_proj: nn.Linear) -> Tensor:
        """silu(gate) * up of x ``[B, d]`` -> ``[B, n]``."""
        from longrecall.ops.decoding.triton.elementwise import silu_product
        from longrecall.ops.decoding.triton.products import numbers_of
        from longrecall.ops.decoding.triton.wide_products import wide_gate_up

        bare = _is_bare(gate_proj) and _is_bare(up_proj)
        gate = _readable_by_tiles(x, gate_proj.weight) if bare else None
        up = _readable_by_tiles(x, up_proj.weight) if bare else None
        if gate is not None and up is not None and numbers_of(gate).dtype == numbers_of(up).dtype:
            return wide_gate_up(x, gate, up)
        return silu_product(self.through(x, gate_proj), self.through(x, up_proj))

    def head(self, norm: Norm, layer: nn.Module) -> Tensor:
        return self.through(self.normed(norm), layer)

    def through(self, y: Tensor, layer: nn.Module) -> Tensor:
        if isinstance(layer, nn.Linear) and is_quantised(layer.weight):
            return self.product(y, layer.weight, layer.bias)
        return super().through(y, layer)

    def product(self, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        from longrecall.ops.decoding.triton.wide_products import MOST_ROWS_ALONE, wide_product

        found = _readable_by_tiles(y, weight)
        if found is None or (found is weight and len(y) > MOST_ROWS_ALONE):
            return super().product(y, weight, bias)
        return wide_product(y, found, bias)

    def _settle(self) -> None:
        if self.update is not None:
            self.x += self.update
            self.update = None


class FewRowsStream(FusedStream):
    """The same for a handful of rows: norms and additions happen inside the products."""

    adds_inside_products = True

    def project(self, norm: Norm | None, weights: list[Tensor]) -> list[Tensor]:
        from longrecall.ops.decoding.triton.products import norm_and_project

        self._settle()
        if not isinstance(norm, RMSNorm):
            return super().project(norm, weights)
        return norm_and_project(self.x, norm.weight, norm.eps, [_readable(w) for w in weights], norm.offset)

    def add_product(self, y: Tensor, weight: Tensor) -> None:
        from longrecall.ops.decoding.triton.products import add_product

        self._settle()
        add_product(y, _readable(weight), self.x)

    def add_mlp(self, norm: RMSNorm, mlp: SwiGLU) -> None:
        from longrecall.ops.decoding.triton.products import norm_and_gate_up, numbers_of

        gate, up = _readable(mlp.gate_proj.weight), _readable(mlp.up_proj.weight)
        if numbers_of(gate).dtype != numbers_of(up).dtype:
            super().add_mlp(norm, mlp)
            return
        self._settle()
        self.add_product(norm_and_gate_up(self.x, norm.weight, norm.eps, gate, up, norm.offset), mlp.down_proj.weight)

    def head(self, norm: Norm, layer: nn.Module) -> Tensor:
        if isinstance(layer, nn.Linear) and layer.bias is None and is_quantised(layer.weight):
            return self.project(norm, [layer.weight])[0]
        y: Tensor = layer(self.normed(norm))
        return y

    def through(self, y: Tensor, layer: nn.Module) -> Tensor:
        return self.product(y, layer.weight, layer.bias) if isinstance(layer, nn.Linear) else super().through(y, layer)

    def product(self, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        from longrecall.ops.decoding.triton.products import product

        return product(y, _readable(weight), bias)


def _readable(weight: Tensor) -> Tensor | RowScaled:
    """A weight as kernels take it."""
    return row_scaled(weight) or weight


def _readable_by_tiles(x: Tensor, weight: Tensor) -> Tensor | RowScaled | None:
    """A weight as kernels for many rows take it for x ``[B, d]``; None: it is for a library."""
    from longrecall.ops.decoding.triton.wide_products import MOST_ROWS, serves

    if is_quantised(weight):
        return row_scaled(weight) if len(x) <= MOST_ROWS else None
    return weight if serves(weight, len(x)) else None


def _is_bare(layer: nn.Module) -> bool:
    """Whether a layer is a product with its weight and nothing else, the weight being plain or quantised."""
    quantised = isinstance(layer, nn.Linear) and layer.bias is None and is_quantised(layer.weight)
    return quantised or is_plain(layer)


class InnerStream(Stream):
    """The stream that a layer inside another layer sees: its output ``[B, d]`` is kept instead of being added.

    It reads from `stream`. The last product of the inner layer is `put_off`: the outer layer may form it
    together with a product of its own. Products of the same input with the weights `more`, which the outer layer needs,
    are formed in one launch with the first ones of the inner layer, and left in `rest`.
    """

    def __init__(self, stream: Stream, more: list[Tensor]) -> None:
        super().__init__(stream.x, stream.dtype)
        self.stream, self.more, self.carried = stream, more, stream.carried
        self.rest: list[Tensor] | None = None
        self.found: Tensor | None = None
        self.put_off: tuple[Tensor, Tensor] | None = None

    def normed(self, norm: Norm | None) -> Tensor:
        return self.stream.normed(norm)

    def project(self, norm: Norm | None, weights: list[Tensor]) -> list[Tensor]:
        if self.rest is not None or any(x.dtype != weights[0].dtype for x in self.more):
            return self.stream.project(norm, weights)
        found = self.stream.project(norm, [*weights, *self.more])
        self.rest = found[len(weights) :]
        return found[: len(weights)]

    def through(self, y: Tensor, layer: nn.Module) -> Tensor:
        return self.stream.through(y, layer)

    def product(self, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.stream.product(y, weight, bias)

    def projected(self, norm: Norm | None) -> list[Tensor]:
        """The products with `more`, formed now if the inner layer has not asked for any."""
        return self.stream.project(norm, self.more) if self.rest is None else self.rest

    def add(self, y: Tensor) -> None:
        self.found = y if self.found is None else self.found + y

    def add_product(self, y: Tensor, weight: Tensor) -> None:
        if self.found is None and self.put_off is None:
            self.put_off = (y, weight)
        else:
            super().add_product(y, weight)

    def result(self) -> Tensor:
        """The inner layer's output ``[B, d]``, with the product that was put off."""
        if self.put_off is not None:
            self.add(self.stream.product(*self.put_off))
            self.put_off = None
        assert self.found is not None
        return self.found
