"""transformers' generate(), with captured or recorded steps in the plain cases: greedy search and sampling.

The steps stand above the model, in `inference/generation.py`. They put themselves in here when they are
imported, which importing the model does (`_registration.py`).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from longrecall.errors import UserError
from longrecall.models.captured_steps import CapturedSteps
from longrecall.models.state import RecurrentState
from longrecall.models.token_ids import check_prompt
from longrecall.ops.execution import context

NO_ATTENTIONS = (
    "output_attentions: a recurrence has no attention weights to return, and the attention layers here keep none; "
    "output_hidden_states=True returns what goes into every layer"
)


@dataclass
class DecodingOptions:
    """How `generate()` decodes; an attribute `decoding` of every RecurrentLM.

    Attributes:
        graphs: capture the step as a CUDA graph on a GPU, and record its calls on a CPU; False decodes layer by layer.
        state_dtype: type of recurrent states while decoding; None = float32. bfloat16 halves what a step reads and
            writes, and rounds the state after every token.
    """

    graphs: bool = True
    state_dtype: torch.dtype | None = None

    def check(self) -> None:
        """Raise UserError on a type that no state has."""
        if self.state_dtype not in (None, torch.float32, torch.bfloat16):
            raise UserError(f"decoding.state_dtype must be torch.float32 or torch.bfloat16, got {self.state_dtype}")


class SampleLoop(Protocol):
    """A loop of greedy search or sampling that stands in for transformers' own."""

    def sample(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any,
        model_kwargs: dict[str, Any],
    ) -> Tensor | None:
        """The ids ``[B, n]`` of prompt and continuation, the same as transformers' loop gives; None = not served."""


class RecurrentGeneration(GenerationMixin):
    """Overrides the loop of greedy search and sampling where a captured step can do it; the tokens are the same."""

    decoding: DecodingOptions
    captured_steps: CapturedSteps
    sample_loop: ClassVar[SampleLoop | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if forward := vars(cls).get("forward"):
            # `generate` asks for it several times a call; making it out of the code takes as long as a small layer.
            forward.__signature__ = inspect.signature(forward)

    def _prepare_model_inputs(self, *args: Any, **options: Any) -> Any:
        """What transformers' `generate` begins with, once a call.

        Raises:
            UserError: a prompt without rows or tokens, or with ids that the model has not; context parallelism.
        """
        if context() is not None:
            raise UserError(
                "generate() does not run under context parallelism: each new token needs the one before it, so there "
                "is nothing to split. Call it outside of context_parallel"
            )
        found = cast(Any, super())._prepare_model_inputs(*args, **options)
        check_prompt(found[0], cast(Any, self).get_input_embeddings())
        return found

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
        if self.sample_loop is not None and not synced_gpus:
            given = (input_ids, logits_processor, stopping_criteria, generation_config, streamer)
            written = self.sample_loop.sample(self, *given, dict(model_kwargs))
            if written is not None:
                return written
        return cast(Any, super())._sample(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> None:
        """None: a state counts its tokens, and in text that is generated no documents begin."""

    def _reorder_cache(self, past_key_values: RecurrentState, beam_idx: Tensor) -> RecurrentState:
        """Beam search: the state of the chosen beams, as a new value."""
        return past_key_values.select_rows(beam_idx)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Take a given state as it is (transformers would write a mark into it), one row for each beam or sample.

        Raises:
            UserError: `output_attentions` is asked for; an attention mask that does not cover the tokens which the
                state has read: transformers tells by it whether the prompt repeats them, and would silently skip the
                beginning of a prompt that does not.
        """
        if generation_config.output_attentions:
            raise UserError(NO_ATTENTIONS)
        state = model_kwargs.get("past_key_values")
        if not isinstance(state, RecurrentState):
            return cast(Any, super())._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        mask = model_kwargs.get("attention_mask")
        # Newer versions of transformers drop a mask of ones and keep its width.
        width = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
        if width is not None and 0 < width <= state.length:
            raise UserError(
                f"the attention mask has {width} columns, but the given state has read {state.length} already. Pass "
                "a mask that covers those and the new tokens, e.g. torch.ones(rows, state.length + new)"
            )
        copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if copies > 1 and state.batch_size == batch_size:
            model_kwargs["past_key_values"] = state.repeat_rows(copies)
        return None

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No key-value cache of transformers: the state comes out of the first forward pass."""
        return False
