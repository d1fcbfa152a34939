"""The loop of greedy search and sampling on captured or recorded steps, which generate() takes in the plain cases."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from longrecall.errors import first_line
from longrecall.inference import reader as reader  # it puts itself into the model
from longrecall.inference.captured_choice import CapturedChoice, captured_choice, choice_key
from longrecall.inference.eligibility import room_for, why_no_graph, why_no_recording
from longrecall.inference.reading import captured_step, read_captured, recorded_step
from longrecall.inference.recorded_step import RecordedStep
from longrecall.inference.step import DecodingStep
from longrecall.models.captured_steps import addresses
from longrecall.models.generation import RecurrentGeneration
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState

LEAST_CAPTURED = 16
"""New tokens from which on the choice itself is captured, which takes as long as some of them."""

CHECK_EVERY = 16
"""Tokens after which it is looked whether all rows have ended, where that waits for a GPU."""


class TokenStep(Protocol):
    """One token for every sequence of a batch, on a state that the step owns."""

    ids: Tensor
    """int64 ``[B]``: what the next call reads."""

    def __call__(self) -> Tensor:
        """Read `ids`, advance the state; logits ``[B, vocab]``, overwritten by the next call."""


class CapturedSampling:
    """`models.generation.SampleLoop` on a step that is captured (on a CPU: recorded) once and repeated then."""

    def sample(
        self,
        model: RecurrentLM,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any,
        model_kwargs: dict[str, Any],
    ) -> Tensor | None:
        if not self._serves(model, stopping_criteria, generation_config, model_kwargs):
            return None
        captures = why_no_graph(model) is None
        if not captures and why_no_recording(model) is not None:
            return None
        most = int(stopping_criteria.max_length)
        choosing = Choosing.of(logits_processor, stopping_criteria, generation_config, input_ids.device)
        new = most - input_ids.shape[1] if streamer is None else 0
        with model.captured_steps.alone() as alone:
            if not alone:
                return None
            if not captures:
                step, logits = self._begin_recorded(model, input_ids, generation_config, model_kwargs)
                return _decoded(step, logits, choosing, input_ids, most, streamer)
            begun = self._begin(model, input_ids, most, generation_config, model_kwargs, choosing, new)
            if begun is None:
                return None
            step, logits, choice = begun
            if choice is None:
                return _decoded(step, logits, choosing, input_ids, most, streamer)
            written = torch.cat([input_ids, choice.decode(step, logits, new)], 1)
            return _until_ended(written, input_ids.shape[1], choosing.end)

    def _serves(
        self, model: RecurrentLM, stopping_criteria: Any, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> bool:
        """Whether the loop has no more to do than `decode` does."""
        plain = [MaxLengthCriteria, EosTokenCriteria]
        return not (
            generation_config.is_assistant
            or stopping_criteria.max_length is None
            or not model_kwargs.get("use_cache", True)
            or generation_config.return_dict_in_generate
            # Somebody else says what is read: prompt tuning puts its tokens before the prompt.
            or "prepare_inputs_for_generation" in vars(model)
            or any(type(criterion) not in plain for criterion in stopping_criteria)
        )

    def _begin(
        self,
        model: RecurrentLM,
        input_ids: Tensor,
        most: int,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        choosing: Choosing,
        new: int,
    ) -> tuple[DecodingStep, Tensor, CapturedChoice | None] | None:
        """The step after the prompt, the prompt's last logits ``[B, vocab]`` and, for `new` tokens, a captured choice.

        None where the step cannot be captured.
        """
        rows, columns = input_ids.shape
        room = 0
        try:
            logits, state, where = self._read(model, input_ids, generation_config, model_kwargs)
            room = room_for(model, state, most - columns)
            step = captured_step(model, rows, room, where)
            choice = _choice(step, logits, choosing, new) if new >= LEAST_CAPTURED else None
            step.load(state)
        except RuntimeError as error:  # out of memory, or a driver that refuses to capture
            reason = first_line(error)
            if room and isinstance(error, torch.OutOfMemoryError):
                reason += f" (room for {room} tokens is taken at once: a smaller max_new_tokens takes less)"
            warnings.warn(f"decoding without a CUDA graph, which failed: {reason}", stacklevel=2)
            model.captured_steps.clear()
            return None
        return step, logits, choice

    def _begin_recorded(
        self, model: RecurrentLM, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> tuple[TokenStep, Tensor]:
        """The same on a CPU, without a captured choice."""
        outputs = cast(Any, model)._prefill(input_ids, generation_config, model_kwargs)
        step = recorded_step(model, input_ids.shape[0])
        step.load(outputs.past_key_values)
        return step, outputs.logits[:, -1]

    def _read(
        self, model: RecurrentLM, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> tuple[Tensor, RecurrentState, tuple[Any, ...] | None]:
        """The prompt's last logits ``[B, vocab]`` and its state; a prompt without padding in captured segments.

        Then also where the model's tensors lie, unless a forward pass of others, which may move them, had a part in it.
        """
        fresh = model_kwargs.get("past_key_values") is None and model_kwargs.get("inputs_embeds") is None
        if fresh:
            where = addresses(model)
            found = read_captured(model, input_ids, model_kwargs.get("attention_mask"), where)
            if found is not None:
                return *found, None if "forward" in vars(model) else where
        outputs = cast(Any, model)._prefill(input_ids, generation_config, model_kwargs)
        return outputs.logits[:, -1], outputs.past_key_values, None


@dataclass(frozen=True)
class Choosing:
    """How the next token is chosen, and what ends a row.

    Attributes:
        processors: transformers' list, called with all ids so far and the scores.
        do_sample: draw from the scores; else the largest.
        end: ids that end a row ``[n]``; None = rows do not end.
        pad: what follows in a row that has ended.
    """

    processors: Any
    do_sample: bool
    end: Tensor | None
    pad: int

    @classmethod
    def of(cls, processors: Any, criteria: Any, config: Any, device: torch.device) -> Choosing:
        """From what transformers' `generate` has prepared."""
        ends = [one.eos_token_id.flatten().to(device) for one in criteria if hasattr(one, "eos_token_id")]
        pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
        return cls(processors, bool(config.do_sample), torch.cat(ends) if ends else None, pad)

    def pick(self, ids: Tensor | None, logits: Tensor) -> Tensor:
        """The next ids ``[B]`` from ids ``[B, n]`` and logits ``[B, vocab]``; no ids for a captured choice."""
        scores = self.processors(ids, logits.to(copy=True, dtype=torch.float32))
        if not self.do_sample:
            return torch.argmax(scores, dim=-1)
        return torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)


def _choice(step: DecodingStep, logits: Tensor, choosing: Choosing, new: int) -> CapturedChoice | None:
    """The choice of `new` tokens, captured with the step; None where it depends on more than scores, or has no room."""
    end = () if choosing.end is None else tuple(choosing.end.tolist())
    key = choice_key(choosing.processors, choosing.do_sample, end, choosing.pad)
    if key is None or step.graph is None or logits.dtype != step.logits.dtype:
        return None
    try:
        return captured_choice(step, key, new, lambda logits: choosing.pick(None, logits))
    except RuntimeError:  # the step alone takes less memory
        step.choices.clear()
        return None


def _decoded(
    step: TokenStep, logits: Tensor, choosing: Choosing, input_ids: Tensor, most: int, streamer: Any
) -> Tensor:
    """The loop itself, from the prompt's last logits ``[B, vocab]`` on: ids ``[B, n]``, n at most `most`."""
    written = decode(
        step,
        input_ids,
        logits,
        choosing.pick,
        most=most,
        end=choosing.end,
        pad=choosing.pad,
        shown=None if streamer is None else streamer.put,
        check_every=1 if isinstance(step, RecordedStep) else CHECK_EVERY,
    )
    if streamer is not None:
        streamer.end()
    return written


Sampler = Callable[[Tensor, Tensor], Tensor]
"""ids read so far ``[B, n]``, logits ``[B, vocab]`` -> the next ids ``[B]``."""


@torch.no_grad()
def decode(
    step: TokenStep,
    ids: Tensor,
    logits: Tensor,
    sample: Sampler,
    *,
    most: int,
    end: Tensor | None,
    pad: int,
    shown: Callable[[Tensor], None] | None = None,
    check_every: int = CHECK_EVERY,
) -> Tensor:
    """Extend ids ``[B, n]`` to at most `most` columns; `logits` ``[B, vocab]`` are those of the last column.

    A row ends with a token of `end` and is filled up with `pad`. Whether all rows have ended is looked at every
    `check_every` tokens only, since that waits for a GPU; what was written too much is cut off. `shown` gets the new
    ids of every step (on the CPU), for streaming.
    """
    rows, start = ids.shape
    written = torch.empty(rows, most, dtype=ids.dtype, device=ids.device)
    written[:, :start] = ids
    running = torch.ones(rows, dtype=torch.bool, device=ids.device)
    column = start
    while column < most:
        token = sample(written[:, :column], logits)
        if end is not None:
            token = torch.where(running, token, pad)
            running = running & ~torch.isin(token, end)
        written[:, column] = token
        column += 1
        if shown is not None:
            shown(token.cpu())
        look = shown is not None or (column - start) % check_every == 0
        if end is not None and look and not bool(running.any()):
            break
        if column < most:
            step.ids.copy_(token)
            logits = step()
    return _until_ended(written[:, :column], start, end)


def _until_ended(written: Tensor, start: int, end: Tensor | None) -> Tensor:
    """The columns of ids ``[B, n]`` up to where the last row ends, whose own tokens begin at column `start`."""
    if end is None:
        return written
    ended = torch.isin(written[:, start:], end).int()
    first = torch.where(ended.any(1), ended.argmax(1) + 1, ended.shape[1])
    return written[:, : start + int(first.max())]


RecurrentGeneration.sample_loop = CapturedSampling()
