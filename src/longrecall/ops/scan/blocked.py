r"""The selective scan of Mamba-1 in plain torch: one fused operation a step, states kept only between blocks of steps.

The decay :math:`e^{\Delta_{t,i} A_{in}}` differs for every channel and key, so no matrix product can compute a block of
steps. Memory traffic of T x N x I numbers takes most of the time. Here the numbers of a block of steps are in a few
buffers, which the next block uses again. The backward computes the states of a block anew from the one before it. With
:math:`g_t` the gradient of :math:`h_t` and :math:`\bar y_t` that of :math:`y_t`,

.. math:: g_t = C_t \bar y_t + e^{\Delta_{t+1} A} g_{t+1}, \qquad
          \frac{\partial}{\partial (\Delta_t A)} = g_t \, e^{\Delta_t A} h_{t-1}

and every other gradient is a sum of products of :math:`g_t` with one input. Inside, time is the first dimension and
channels the last, so that a step is one contiguous piece of memory. No exponent is positive. Memory grows with
T x I x (1 + N / `SHORTEST_BLOCK`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

# Numbers in one buffer of a block: 1.5 MiB in float32, so that the few buffers stay in the processor's cache.
BLOCK_NUMBERS = 400_000
# At most 1 / 16 of all states are kept for the backward, however wide a step is.
SHORTEST_BLOCK, LONGEST_BLOCK = 16, 256


def selective_scan(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.selective_scan`; all tensors in the accumulation dtype, T at least 1."""
    return _uncompiled_scan(x, step, a, b, c, state)


def _scan(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    inputs = (x, step, a, b, c, state)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return cast(tuple[Tensor, Tensor], _Scan.apply(*inputs))
    with torch.no_grad():
        y, final, _ = _forward(*inputs, keep=False)
    return y, final


# A compiler would unroll the loop over time; it calls the scan as it is instead.
_uncompiled_scan: Callable[..., tuple[Tensor, Tensor]] = torch.compiler.disable(_scan)


class _Scan(torch.autograd.Function):
    """The scan with its own backward; autograd would keep every state and fill a gradient of all time at every step."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        y, final, boundaries = _forward(x, step, a, b, c, state, keep=True)
        ctx.save_for_backward(x, step, a, b, c, *boundaries)
        return y, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, step, a, b, c, *boundaries = ctx.saved_tensors
        return _backward(_Blocks.of(x, step, a, b, c), boundaries, *gradients)


@dataclass(frozen=True)
class _Blocks:
    """The inputs with time first, cut into blocks: x, step ``[T, B, I]``; b, c ``[T, B, N]``; a ``[N, I]``."""

    x: Tensor
    step: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    size: int

    @classmethod
    def of(cls, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> _Blocks:
        width = x.shape[0] * a.numel()
        size = min(max(BLOCK_NUMBERS // width, SHORTEST_BLOCK), LONGEST_BLOCK, x.shape[1])
        x, step, a, b, c = (tensor.transpose(0, 1).contiguous() for tensor in (x, step, a, b, c))
        return cls(x, step, a, b, c, size)

    def slices(self) -> list[slice]:
        length = self.x.shape[0]
        return [slice(start, min(start + self.size, length)) for start in range(0, length, self.size)]

    def buffer(self) -> Tensor:
        """A buffer ``[size, B, N, I]`` for all states of a block."""
        return self.x.new_empty((self.size, self.x.shape[1], *self.a.shape))

    def states(self, part: slice, before: Tensor, decay: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Fill the buffers with the decays and the states of one block, from the state `before` it."""
        count = part.stop - part.start
        decay = torch.mul(self.step[part, :, None], self.a, out=decay[:count]).exp_()
        written = self.x[part] * self.step[part]
        states = torch.mul(written[:, :, None], self.b[part, ..., None], out=states[:count])
        for now, kept in zip(states.unbind(), decay.unbind(), strict=True):
            now.addcmul_(kept, before)
            before = now
        return decay, states


def _forward(
    x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, keep: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs ``[B, T, I]``, the final state and, if `keep`, the states before every block."""
    blocks = _Blocks.of(x, step, a, b, c)
    decay, states = blocks.buffer(), blocks.buffer()
    y, boundaries = torch.empty_like(blocks.x), []
    for part in blocks.slices():
        if keep:
            boundaries.append(state)
        _, now = blocks.states(part, state, decay, states)
        y[part] = (blocks.c[part, :, None] @ now).squeeze(2)
        state = now[-1].clone()
    return y.transpose(0, 1), state, boundaries


def _backward(blocks: _Blocks, boundaries: list[Tensor], to_y: Tensor, to_state: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x, step, a, b, c and the initial state from those of the outputs and the final state."""
    to_y = to_y.transpose(0, 1).contiguous()
    to_x, to_step, to_b, to_c = (torch.empty_like(t) for t in (blocks.x, blocks.step, blocks.b, blocks.c))
    to_a = torch.zeros_like(blocks.a)
    decay, states, gradient = (blocks.buffer() for _ in range(3))
    carried = to_state
    for part, before in zip(reversed(blocks.slices()), reversed(boundaries), strict=True):
        kept, now = blocks.states(part, before, decay, states)
        step, b = blocks.step[part], blocks.b[part]
        to_c[part] = (now @ to_y[part, ..., None]).squeeze(-1)
        to_now = torch.mul(blocks.c[part, ..., None], to_y[part, :, None], out=gradient[: now.shape[0]])
        for index in reversed(range(now.shape[0])):
            carried = to_now[index].add_(carried) * kept[index]
        to_written = (b[:, :, None] @ to_now).squeeze(2)
        to_b[part] = (to_now @ (blocks.x[part] * step)[..., None]).squeeze(-1)
        to_x[part] = to_written * step
        to_exponent = to_now.mul_(kept)
        to_exponent[0].mul_(before)
        to_exponent[1:].mul_(now[:-1])
        to_step[part] = torch.mul(to_exponent, blocks.a, out=now).sum(2).addcmul_(to_written, blocks.x[part])
        to_a += to_exponent.mul_(step[:, :, None]).sum((0, 1))
    return *(t.transpose(0, 1) for t in (to_x, to_step, to_a, to_b, to_c)), carried
