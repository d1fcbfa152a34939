"""transformers' generate() with our decoding step in the plain cases: greedy and sampling on a GPU."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from longrecall.errors import UserError
from longrecall.models.captured_steps import CapturedSteps, addresses
from longrecall.models.state import RecurrentState

if TYPE_CHECKING:
    from longrecall.models.decoding import DecodingStep


@dataclass
class DecodingOptions:
    """How `generate()` decodes; an attribute `decoding` of every RecurrentLM.

    Attributes:
        graphs: capture the step as a CUDA graph on a GPU; False decodes layer by layer, as on a CPU.
        state_dtype: type of recurrent states while decoding; None = float32. bfloat16 halves what a step reads and
            writes, and rounds the state after every token.
    """

    graphs: bool = True
    state_dtype: torch.dtype | None = None

    def check(self) -> None:
        """Raise UserError on a type that no state has."""
        if self.state_dtype not in (None, torch.float32, torch.bfloat16):
            raise UserError(f"decoding.state_dtype must be torch.float32 or torch.bfloat16, got {self.state_dtype}")


class RecurrentGeneration(GenerationMixin):
    """Overrides the loop of greedy search and sampling where a captured step can do it; the tokens are the same."""

    decoding: DecodingOptions
    captured_steps: CapturedSteps

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        if self._steps_serve(stopping_criteria, generation_config, model_kwargs) and not synced_gpus:
            most = int(stopping_criteria.max_length)
            with self.captured_steps.alone() as alone:
                begun = self._begin(input_ids, most, generation_config, dict(model_kwargs)) if alone else None
                if begun is not None:
                    return _decoded(
                        *begun, input_ids, most, logits_processor, stopping_criteria, generation_config, streamer
                    )
        return cast(Any, super())._sample(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    def _steps_serve(self, stopping_criteria: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
        """Whether the loop has no more to do than `decode` does, on a model whose step can be captured."""
        from longrecall.models.decoding import why_no_graph

        plain = [MaxLengthCriteria, EosTokenCriteria]
        return not (
            generation_config.is_assistant
            or stopping_criteria.max_length is None
            or not model_kwargs.get("use_cache", True)
            or generation_config.return_dict_in_generate
            or any(type(criterion) not in plain for criterion in stopping_criteria)
            or why_no_graph(cast(Any, self)) is not None
        )

    def _begin(
        self, input_ids: Tensor, most: int, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> tuple[DecodingStep, Tensor] | None:
        """The step after the prompt and the prompt's last logits ``[B, vocab]``; None where it cannot be captured."""
        from longrecall.models.decoding import captured_step, room_for

        rows, columns = input_ids.shape
        room = 0
        try:
            logits, state, where = self._read(input_ids, generation_config, model_kwargs)
            room = room_for(cast(Any, self), state, most - columns)
            step = captured_step(cast(Any, self), rows, room, where)
            step.load(state)
        except RuntimeError as error:  # out of memory, or a driver that refuses to capture
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if room and isinstance(error, torch.OutOfMemoryError):
                reason += f" (room for {room} tokens is taken at once: a smaller max_new_tokens takes less)"
            warnings.warn(f"decoding without a CUDA graph, which failed: {reason}", stacklevel=2)
            self.captured_steps.clear()
            return None
        return step, logits

    def _read(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> tuple[Tensor, RecurrentState, tuple[Any, ...] | None]:
        """The prompt's last logits ``[B, vocab]`` and its state; a prompt without padding in captured segments.

        Then also where the model's tensors lie, unless a forward pass of others, which may move them, had a part in it.
        """
        from longrecall.models.decoding import read_captured

        model = cast(Any, self)
        fresh = model_kwargs.get("past_key_values") is None and model_kwargs.get("inputs_embeds") is None
        if fresh:
            where = addresses(model)
            found = read_captured(model, input_ids, model_kwargs.get("attention_mask"), where)
            if found is not None:
                return *found, None if "forward" in vars(self) else where
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        return outputs.logits[:, -1], outputs.past_key_values, None


def _decoded(
    step: DecodingStep,
    logits: Tensor,
    input_ids: Tensor,
    most: int,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
) -> Tensor:
    """The loop itself, from the prompt's last logits ``[B, vocab]`` on: ids ``[B, n]``, n at most `most`."""
    from longrecall.models.decoding import decode

    def sample(ids: Tensor, logits: Tensor) -> Tensor:
        scores = logits_processor(ids, logits.to(copy=True, dtype=torch.float32))
        if not generation_config.do_sample:
            return torch.argmax(scores, dim=-1)
        return torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)

    ends = [criterion.eos_token_id for criterion in stopping_criteria if hasattr(criterion, "eos_token_id")]
    pad = generation_config._pad_token_tensor
    written = decode(
        step,
        input_ids,
        logits,
        sample,
        most=most,
        end=torch.cat([end.flatten().to(input_ids.device) for end in ends]) if ends else None,
        pad=0 if pad is None else int(pad),
        shown=None if streamer is None else streamer.put,
    )
    if streamer is not None:
        streamer.end()
    return written
