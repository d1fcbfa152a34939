r"""What the ranks of a context group tell each other, with gradients.

The gradients are those of the sum of what all ranks derive from. Say each rank r calls backward on a loss :math:`L_r`:
then every rank gets the gradient of :math:`\sum_r L_r` with respect to its own tensors.

Three rules keep ranks from waiting for each other in vain:

1. Every function here takes part on every rank, whatever its rank and whether or not it needs a gradient.
2. Autograd runs the backward of operations in the reverse of their order (the one made last, of those that the loss
   depends on, runs first). So the messages of the backward have one order on all ranks too.
3. A message is sent without waiting until it is received. A rank only waits for what it reads.

By the third rule ranks work on different layers. Rank r waits once for rank r - 1 to finish its first recurrence. From
then on, what it needs in each layer was sent while it was busy with the layer before. The backward goes the other way.

Activation checkpointing runs parts of the forward again in the backward. There, neighbours would wait for each other
in each layer. So what came from the rank before is kept from the first run, and a second run neither sends nor
receives it (`execution.Kept`); sums are kept too. Gathered tensors are large: they are gathered again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from longrecall.ops import execution
from longrecall.ops.context.group import ContextGroup, RowPieces

MOST_UNDER_WAY = 64
"""A rank that has sent so many messages waits until the first of them has arrived."""


def from_previous(tensor: Tensor, start: Tensor) -> Tensor:
    """What the rank before passed in as `tensor`; `start` on the first rank.

    Gradients return: that of the result goes to `tensor` of the rank before, and on the first rank to `start`.

    Inside `row_pieces` the rows of both are documents. The last row of each sequence goes to the next rank, where it
    replaces the row of the document that goes on. Every other row of the result is that of `start`.

    Args:
        tensor: ``[B, ...]``, one shape and dtype on all ranks (of documents, the number of rows may differ).
        start: the same shape and dtype. Only the first rank reads it, and rows where a document begins.

    Returns:
        A tensor of that shape and dtype; `start` where no context group holds.

    >>> from_previous(torch.ones(2), start=torch.zeros(2))        # one rank alone: nobody is before it
    tensor([0., 0.])
    """
    group = execution.context()
    if group is None:
        return start
    pieces = execution.row_pieces()
    if pieces is None:
        found: Tensor = _FromPrevious.apply(group, execution.kept(), tensor, start)
        return found
    begin = start.index_select(0, pieces.first)
    found = _FromPrevious.apply(group, execution.kept(), tensor.index_select(0, pieces.last), begin)
    return _at_first(pieces, start, begin, found)


def received(start: Tensor, *read: Tensor | None) -> Tensor:
    """What the rank before hands on (`hand_on`); `start` on the first rank. For what this rank computes from it.

    Rows are those of `from_previous`.

    Args:
        start: ``[B, ...]``, one shape and dtype on all ranks. Only the first rank reads its numbers.
        read: the other tensors that the value that is handed on depends on. If one of them or `start` requires a
            gradient, so does the result.

    >>> received(torch.zeros(2))
    tensor([0., 0.])
    """
    group = execution.context()
    if group is None:
        return start
    # The gradient of the rank before exists because its tensors require one, although `start` may not.
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (start, *read))
    anchor = torch.zeros((), device=start.device, requires_grad=wanted)
    pieces = execution.row_pieces()
    if pieces is None:
        found: Tensor = _Received.apply(group, execution.kept(), start, anchor)
        return found
    begin = start.index_select(0, pieces.first)
    found = _Received.apply(group, execution.kept(), begin, anchor)
    return _at_first(pieces, start, begin, found)


def hand_on(beside: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Send `tensor` to the next rank, which gets it by `received`. Returns `beside` and `tensor`, to be used instead.

    The gradient of the next rank is added to that of `tensor`. For that the backward must come here on every rank: it
    does where the loss depends on `beside`, which is the output of the layer. Rows are those of `from_previous`.

    >>> output, state = hand_on(torch.ones(2), torch.zeros(2))
    """
    group = execution.context()
    if group is None:
        return beside, tensor
    pieces = execution.row_pieces()
    rows = tensor if pieces is None else tensor.index_select(0, pieces.last)
    beside, rows = _HandOn.apply(group, execution.kept(), beside, rows)
    return beside, (rows if pieces is None else tensor.index_copy(0, pieces.last, rows))


def all_gather(tensor: Tensor) -> Tensor:
    """The tensors of all ranks, one shape and dtype, ``[...]`` -> ``[world, ...]``; ``[1, ...]`` without a group.

    The gradient of a rank's tensor is the sum of the gradients of its copies on all ranks.

    >>> all_gather(torch.ones(2)).shape
    torch.Size([1, 2])
    """
    group = execution.context()
    if group is None:
        return tensor[None]
    found: Tensor = _AllGather.apply(group, tensor)
    return found


def from_last(beside: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """What the last rank passed in as `tensors`, on every rank. Returns `beside`, to be used instead, and those.

    The tensors have any shapes and dtypes, the same on all ranks; they travel in one message of each dtype. The
    gradients of all ranks are added up and go to the last rank. For that the backward must come here on every rank: it
    does where the loss depends on `beside`.

    >>> output, state = from_last(torch.ones(2), torch.zeros(2))
    """
    group = execution.context()
    if group is None:
        return (beside, *tensors)
    found: tuple[Tensor, ...] = _FromLast.apply(group, beside, *tensors)
    return found


def from_ends(beside: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """As `from_last` inside `row_pieces`: each of the N documents from the rank on which it ends.

    `tensors` are ``[n, ...]``, a row for each document of this rank; those that are returned are ``[N, ...]``.

    >>> output, state = from_ends(torch.ones(2), torch.zeros(3, 2))
    """
    group, pieces = execution.context(), execution.row_pieces()
    if group is None or pieces is None:
        return (beside, *tensors)
    found: tuple[Tensor, ...] = _FromEnds.apply(group, pieces, beside, *tensors)
    return found


def summed(tensor: Tensor) -> Tensor:
    """The sum of the tensors of all ranks, on every rank, for a term of the loss that all ranks compute alike.

    The gradient passes unchanged to each rank's own tensor. So the ranks' gradients add up to that of the term once.

    >>> summed(torch.ones(2))
    tensor([1., 1.])
    """
    group = execution.context()
    if group is None:
        return tensor
    found: Tensor = _Summed.apply(group, execution.kept(), tensor)
    return found


class _FromPrevious(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ContextGroup, kept: execution.Kept | None, tensor: Tensor, start: Tensor) -> Tensor:
        ctx.group = group
        ctx.set_materialize_grads(False)
        ctx.like = _Like(tensor)
        if kept is not None and kept.replays:
            return kept.next()
        if not group.last:
            _send(group, tensor, group.rank + 1)
        found = start.clone() if group.first else _receive(group, ctx.like, group.rank - 1)
        return found if kept is None else kept.add(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        group: ContextGroup = ctx.group
        if not group.first:
            _send(group, ctx.like.zeros() if gradient is None else gradient, group.rank - 1)
        to_tensor = ctx.like.zeros() if group.last else _receive(group, ctx.like, group.rank + 1)
        return None, None, to_tensor, gradient if group.first else ctx.like.zeros()


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ContextGroup, kept: execution.Kept | None, start: Tensor, anchor: Tensor) -> Tensor:
        ctx.group, ctx.like = group, _Like(start)
        ctx.set_materialize_grads(False)
        if kept is not None and kept.replays:
            return kept.next()
        found = start.clone() if group.first else _receive(group, ctx.like, group.rank - 1)
        return found if kept is None else kept.add(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        group: ContextGroup = ctx.group
        if group.first:
            return None, None, gradient, None
        _send(group, ctx.like.zeros() if gradient is None else gradient, group.rank - 1)
        # Zeros, not None: a learned start has a gradient on every rank.
        return None, None, ctx.like.zeros(), None


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: ContextGroup, kept: execution.Kept | None, beside: Tensor, tensor: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.like = group, _Like(tensor)
        ctx.set_materialize_grads(False)
        if not group.last and not (kept is not None and kept.replays):
            _send(group, tensor, group.rank + 1)
        return beside.view_as(beside), tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_beside: Tensor | None, own: Tensor | None) -> tuple[Tensor | None, ...]:
        group: ContextGroup = ctx.group
        if group.last:
            return None, None, to_beside, own
        theirs = _receive(group, ctx.like, group.rank + 1)
        return None, None, to_beside, theirs if own is None else theirs + own


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ContextGroup, tensor: Tensor) -> Tensor:
        ctx.group, ctx.like = group, _Like(tensor)
        ctx.set_materialize_grads(False)
        found = tensor.new_empty((group.world, *tensor.shape))
        dist.all_gather(list(found.unbind(0)), tensor.contiguous(), group=group.process_group)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, Tensor]:
        group: ContextGroup = ctx.group
        like: _Like = ctx.like
        gathered = like.zeros(group.world) if gradient is None else gradient.contiguous()
        if gathered.is_cuda:
            own = like.empty()
            dist.reduce_scatter_tensor(
                own, gathered.flatten(0, 1) if own.dim() else gathered, group=group.process_group
            )
            return None, own
        # gloo adds up on all ranks.
        total = gathered.clone()
        dist.all_reduce(total, group=group.process_group)
        return None, total[group.rank]


class _FromLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ContextGroup, beside: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.likes = group, [_Like(x) for x in tensors]
        ctx.set_materialize_grads(False)
        found = _in_one(tensors, lambda x: _broadcast(group, x))
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return beside.view_as(beside), *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_beside: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        group: ContextGroup = ctx.group
        floats = [index for index, like in enumerate(ctx.likes) if like.dtype.is_floating_point]
        given = [ctx.likes[i].zeros() if gradients[i] is None else gradients[i] for i in floats]
        added = _in_one(given, lambda x: _reduce_to_last(group, x))
        own: list[Tensor | None] = [None] * len(gradients)
        if group.last:
            for index, gradient in zip(floats, added, strict=True):
                own[index] = gradient
        return None, to_beside, *own


class _FromEnds(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: ContextGroup, pieces: RowPieces, beside: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.pieces, ctx.likes = group, pieces, [_Like(x) for x in tensors]
        ctx.set_materialize_grads(False)
        own, there = pieces.ends.nonzero()[:, 0], pieces.rows[pieces.ends]
        placed = [x.new_zeros((pieces.documents, *x.shape[1:])).index_copy(0, there, x[own]) for x in tensors]
        # All other ranks have zeros in the place of a document that does not end there.
        found = _in_one(placed, lambda x: _sum(group, x))
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return beside.view_as(beside), *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_beside: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        group: ContextGroup = ctx.group
        pieces: RowPieces = ctx.pieces
        floats = [index for index, like in enumerate(ctx.likes) if like.dtype.is_floating_point]
        shapes = [(pieces.documents, *like.shape[1:]) for like in ctx.likes]
        given = [
            torch.zeros(shapes[i], dtype=ctx.likes[i].dtype, device=ctx.likes[i].device)
            if gradients[i] is None
            else gradients[i]
            for i in floats
        ]
        added = _in_one(given, lambda x: _sum(group, x))
        to_tensors: list[Tensor | None] = [None] * len(gradients)
        for index, gradient in zip(floats, added, strict=True):
            ends = pieces.ends.view(-1, *[1] * (gradient.dim() - 1))
            to_tensors[index] = torch.where(ends, gradient[pieces.rows], 0.0)
        return None, None, to_beside, *to_tensors


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ContextGroup, kept: execution.Kept | None, tensor: Tensor) -> Tensor:
        if kept is not None and kept.replays:
            return kept.next()
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group.process_group)
        return total if kept is None else kept.add(total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, gradient


def _at_first(pieces: RowPieces, start: Tensor, begin: Tensor, found: Tensor) -> Tensor:
    """`start` with `found` in the rows that go on; `begin` are the rows of `start` with which pieces begin."""
    goes_on = pieces.goes_on.view(-1, *[1] * (found.dim() - 1))
    return start.index_copy(0, pieces.first, torch.where(goes_on, found, begin))


class _Like:
    """Shape, dtype and device of a tensor, without its memory."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def zeros(self, *more: int) -> Tensor:
        return torch.zeros((*more, *self.shape), dtype=self.dtype, device=self.device)


def _send(group: ContextGroup, tensor: Tensor, rank: int) -> None:
    """Send to a rank of the group; the message leaves when its numbers are there, and nobody waits for it here."""
    # A copy: the caller may write to its own tensor, and a view would hold all of its memory.
    message = tensor.detach().clone(memory_format=torch.contiguous_format)
    work = dist.isend(message, group=group.process_group, group_dst=rank)
    while group.under_way and group.under_way[0][0].is_completed():
        group.under_way.popleft()
    group.under_way.append((work, message))
    if len(group.under_way) > MOST_UNDER_WAY:
        oldest, _ = group.under_way.popleft()
        oldest.wait()


def _receive(group: ContextGroup, like: _Like, rank: int) -> Tensor:
    message = like.empty()
    dist.recv(message, group=group.process_group, group_src=rank)
    return message


def _broadcast(group: ContextGroup, x: Tensor) -> Tensor:
    dist.broadcast(x, group=group.process_group, group_src=group.world - 1)
    return x


def _sum(group: ContextGroup, x: Tensor) -> Tensor:
    dist.all_reduce(x, group=group.process_group)
    return x


def _reduce_to_last(group: ContextGroup, x: Tensor) -> Tensor:
    dist.reduce(x, group=group.process_group, group_dst=group.world - 1)
    return x


def _in_one(tensors: Any, exchange: Any) -> list[Tensor]:
    """Tensors through an exchange that works in place, as one copy of all that have the same dtype."""
    found: list[Tensor] = list(tensors)
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        places = [index for index, x in enumerate(tensors) if x.dtype == dtype]
        joined = exchange(torch.cat([tensors[index].detach().reshape(-1) for index in places]))
        for index, part in zip(places, joined.split([tensors[i].numel() for i in places]), strict=True):
            # A copy: no result may hold the memory of the others.
            found[index] = part.view(tensors[index].shape).clone()
    return found
