"""The loop of greedy search and sampling on captured or recorded steps, which generate() takes in the plain cases."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from longrecall.inference import reader as reader  # it puts itself into the model
from longrecall.inference.captured_choice import captured_choice, choice_key
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
        with model.captured_steps.alone() as alone:
            begin = self._begin if captures else self._begin_recorded
            begun = begin(model, input_ids, most, generation_config, model_kwargs) if alone else None
            if begun is None:
                return None
            return _decoded(*begun, input_ids, most, logits_processor, stopping_criteria, generation_config, streamer)

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
        self, model: RecurrentLM, input_ids: Tensor, most: int, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> tuple[TokenStep, Tensor] | None:
        """The step after the prompt and the prompt's last logits ``[B, vocab]``; None where it cannot be captured."""
        rows, columns = input_ids.shape
        room = 0
        try:
            logits, state, where = self._read(model, input_ids, generation_config, model_kwargs)
            room = room_for(model, state, most - columns)
            step = captured_step(model, rows, room, where)
            step.load(state)
        except RuntimeError as error:  # out of memory, or a driver that refuses to capture
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if room and isinstance(error, torch.OutOfMemoryError):
                reason += f" (room for {room} tokens is taken at once: a smaller max_new_tokens takes less)"
            warnings.warn(f"decoding without a CUDA graph, which failed: {reason}", stacklevel=2)
            model.captured_steps.clear()
            return None
        return step, logits

    def _begin_recorded(
        self, model: RecurrentLM, input_ids: Tensor, most: int, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> tuple[TokenStep, Tensor]:
        """The same on a CPU."""
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


def _decoded(
    step: TokenStep,
    logits: Tensor,
    input_ids: Tensor,
    most: int,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
) -> Tensor:
    """The loop itself, from the prompt's last logits ``[B, vocab]`` on: ids ``[B, n]``, n at most `most`."""

    def sample(ids: Tensor | None, logits: Tensor) -> Tensor:
        scores = logits_processor(ids, logits.to(copy=True, dtype=torch.float32))
        if not generation_config.do_sample:
            return torch.argmax(scores, dim=-1)
        return torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)

    ends = [criterion.eos_token_id for criterion in stopping_criteria if hasattr(criterion, "eos_token_id")]
    end = torch.cat([one.flatten().to(input_ids.device) for one in ends]) if ends else None
    pad = 0 if generation_config._pad_token_tensor is None else int(generation_config._pad_token_tensor)
    new = most - input_ids.shape[1]
    if isinstance(step, DecodingStep) and step.graph is not None and streamer is None and new >= LEAST_CAPTURED:
        stops = () if end is None else tuple(end.tolist())
        key = choice_key(logits_processor, generation_config.do_sample, stops, pad)
        if key is not None and logits.dtype == step.logits.dtype:
            choice = captured_choice(step, key, new, lambda logits: sample(None, logits))
            return _until_ended(torch.cat([input_ids, choice.decode(step, logits, new)], 1), input_ids.shape[1], end)
    written = decode(
        step,
        input_ids,
        logits,
        sample,
        most=most,
        end=end,
        pad=pad,
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
