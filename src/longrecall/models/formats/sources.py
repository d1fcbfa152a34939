"""Where each tensor of a native model comes from in a foreign checkpoint: one description, read in both directions.

A source is a small expression over tensors of the foreign file. It is built by the functions at the end of this file::

    query, key, value = split("attn.in_proj_qkv.weight", (2048, 2048, 4096))
    sources = {
        "mixer.q_proj.weight": query,
        "mixer.o_proj.weight": same("attn.o_proj.weight"),
        "mixer.q_conv.weight": squeeze_conv(same("attn.q_conv1d.weight")),
        "mlp.up_proj": numbered(same("experts.{}.up_proj.weight"), 8),
    }
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from longrecall.models.formats.expressions import (
    Constant,
    Either,
    Join,
    Numbered,
    Region,
    Shape,
    Source,
    Stack,
)
from longrecall.models.formats.transforms import Reorder, RepeatHeads, Reshape, SqueezeConvolution, Transpose


def same(name: str, *other_spellings: str) -> Source:
    """A foreign tensor as it is; files may have it under another spelling, and `name` is the one to write."""
    return either(*(Region(spelling) for spelling in (name, *other_spellings)))


def split(name: str, sizes: Sequence[int], *, blocks: int = 1, dim: int = 0) -> tuple[Source, ...]:
    """One foreign tensor that holds several native ones: the source of each, in the order of the file.

    Args:
        name: the foreign tensor.
        sizes: entries of each along `dim`; of one block, where there are several.
        blocks: how often the whole sequence of parts is repeated: `[q0 k0 | q1 k1 | ...]` has a block a head.
        dim: the dimension along which they lie.
    """
    total, start, found = sum(sizes), 0, []
    for size in sizes:
        found.append(Region(name, start, size, total, blocks, dim))
        start += size
    return tuple(found)


def either(first: Source, *others: Source) -> Source:
    """Several ways in which files store the same tensor; `first` is the one to write where the file did not say."""
    return Either((first, *others)) if others else first


def squeeze_conv(source: Source) -> Source:
    """A depthwise convolution `[channels, 1, width]`, which natively is `[channels, width]`."""
    return SqueezeConvolution(source)


def reshaped(source: Source, foreign: Shape) -> Source:
    """The same numbers in the same order; the foreign tensor has the shape `foreign`."""
    return Reshape(source, foreign)


def transposed(source: Source) -> Source:
    """The last two dimensions exchanged."""
    return Transpose(source)


def reordered(source: Source, order: Iterable[int]) -> Source:
    """Rows in another order: native row i is foreign row ``order[i]``."""
    return Reorder(source, tuple(order))


def repeat_heads(source: Source, heads: int, times: int) -> Source:
    """`heads` shared blocks of rows, of which the native tensor has `times` copies each; 1 = as it is."""
    return source if times == 1 else RepeatHeads(source, heads, times)


def stack(sources: Iterable[Source]) -> Source:
    """Many equal foreign tensors, which are one native tensor with a dimension more in front."""
    return Stack(tuple(sources))


def numbered(each: Source, count: int) -> Source:
    """The same of tensors with a number in their names: ``{}`` in those of `each`."""
    return Numbered(each, count)


def join(sources: Iterable[Source], sizes: Sequence[int], dim: int = 0) -> Source:
    """Several foreign tensors one behind the other along `dim`; `sizes` are their entries there."""
    return Join(tuple(sources), tuple(sizes), dim)


def constant(value: float = 1.0) -> Source:
    """A tensor whose numbers are all fixed, and which no file has: a norm without learnt scale is one of scale 1."""
    return Constant(value)
