"""Token ids that no model can read: told apart in one line, without a cost where a token is decoded on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longrecall.errors import UserError


def embedded(ids: Tensor, embeddings: nn.Module) -> Tensor:
    """Return the embeddings ``[B, T, d]`` of token ids.

    Raises:
        UserError: ids that are not whole numbers ``[B, T]``, or (on a CPU) not in the vocabulary. A GPU would have to
            be waited for to know.
    """
    check_form(ids)
    if torch.compiler.is_compiling():
        return _look_up(ids, embeddings)
    try:
        return _look_up(ids, embeddings)
    except IndexError:  # torch's, which names no id
        check_range(ids, embeddings)
        raise


def _look_up(ids: Tensor, embeddings: nn.Module) -> Tensor:
    found: Tensor = embeddings(ids)
    return found


def check_form(ids: Tensor) -> None:
    """Raise UserError unless `ids` are whole numbers ``[B, T]``; looks at no number."""
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        got = f"{str(ids.dtype).removeprefix('torch.')} of shape {list(ids.shape)}"
        raise UserError(f"input_ids must be whole numbers (int64) of shape [B, T]; got {got}")


def check_range(ids: Tensor, embeddings: nn.Module) -> None:
    """Raise UserError unless every id is one of the vocabulary's; waits for the device that they are on."""
    # Other people's wrappers need not say how many they have.
    vocabulary = getattr(embeddings, "num_embeddings", None)
    if not ids.numel() or vocabulary is None:
        return
    least, most = (int(end) for end in torch.stack(ids.aminmax()).tolist())
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise UserError(
            f"token id {wrong} is not in the model's vocabulary, whose ids are 0 to {vocabulary - 1}; "
            "is this the model's own tokenizer?"
        )


def check_prompt(inputs: Tensor, embeddings: nn.Module) -> None:
    """Raise UserError unless text can be generated after `inputs`: ids ``[B, T]`` or embeddings ``[B, T, d]``.

    Looks at the numbers too where they are on a GPU: a prompt is waited for once, not every token after it. On a CPU
    the look-up in the table refuses them.
    """
    if inputs.ndim == 2:
        check_form(inputs)
    if not inputs.shape[0] or not inputs.shape[1]:
        raise UserError(
            f"there is nothing to continue: the prompt has shape {list(inputs.shape[:2])}; "
            "give every row at least one token, such as the one that begins a text"
        )
    if inputs.ndim == 2 and inputs.device.type != "cpu":
        check_range(inputs, embeddings)


def padding_mask(attention_mask: Tensor, rows: int, columns: int) -> Tensor | None:
    """The last columns of a 0/1 mask ``[B, T]`` or longer as bool, False = padding; None = there is none.

    Raises:
        ValueError: a mask of another shape.
    """
    # A narrower one would be broadcast: a whole row, or none, would count as padding.
    if attention_mask.ndim != 2 or attention_mask.shape[0] != rows or attention_mask.shape[1] < columns:
        raise ValueError(f"attention_mask must be [{rows}, {columns}] or longer; got {list(attention_mask.shape)}")
    mask = attention_mask[:, -columns:].bool()
    return None if bool(mask.all()) else mask
