"""Reads a foreign config.json field by field, so that nothing in it is ever ignored silently."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any

from longrecall.errors import UserError, did_you_mean
from longrecall.models.limits import check_count
from longrecall.models.value_checks import LARGEST

_MISSING = object()

# What transformers writes into every config.json and what changes no output of the model: provenance, label tables,
# what to return, generation settings of old versions, and storage types.
_WITHOUT_EFFECT = frozenset(
    [
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "use_cache",
    ]
)


def plain_number(value: object) -> object:
    """Undo how transformers writes infinities into JSON: ``{"__float__": "Infinity"}`` -> ``inf``."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        with contextlib.suppress(ValueError):
            return float(str(value["__float__"]).replace("Infinity", "inf"))
    return value


class Fields:
    """A config.json under inspection. Every read marks its key as understood; `finish` refuses the rest.

    Args:
        raw: the parsed JSON object.
        where: file name for error messages.
    """

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self._seen: set[str] = set()

    def fail(self, name: str, problem: str) -> UserError:
        """Return the error that says what is wrong with the value of `name`."""
        return UserError(f'{self.where}: "{name}" is {self.raw.get(name)!r}; {problem}')

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of `name` as it stands, or `default` when the key is absent."""
        self._seen.add(name)
        return self.raw.get(name, default)

    def section(self, name: str) -> Fields:
        """Return the mapping under `name` for inspection; its own `finish` has to be called. Absent is empty."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.fail(name, "it must be a mapping")
        return Fields(value, f'{self.where}: "{name}"')

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number from `least` to the limit of `name`; without a default the key must be there."""
        value = self.get(name, _MISSING if default is None else default)
        if value is _MISSING:
            raise UserError(f'{self.where}: "{name}" is missing; it must be a whole number >= {least}')
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fail(name, f"it must be a whole number >= {least}")
        try:
            check_count(name, value)
        except UserError as error:
            raise UserError(f"{self.where}: {error}") from None
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """Return a positive whole number, or None when the key is absent or null."""
        return default if self.get(name) is None else self.integer(name)

    def number(self, name: str, default: float, *, zero: bool = False) -> float:
        """Return a finite number > 0, or with `zero` >= 0, of at most `LARGEST`."""
        value = plain_number(self.get(name, default))
        # The comparisons are false for NaN too.
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (0 < value < math.inf or (zero and value == 0))
        ):
            raise self.fail(name, f"it must be a finite number {'>=' if zero else '>'} 0")
        if value > LARGEST:
            raise self.fail(name, f"it must be at most {LARGEST:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "it must be true or false")
        return value

    def require(self, name: str, default: Any, allowed: Iterable[Any], why: str) -> None:
        """Refuse every value of `name` but `allowed`, because longrecall cannot reproduce the others (`why`)."""
        choices = list(allowed)
        value = self.get(name, default)
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            readable = " or ".join(repr(choice) for choice in choices)
            raise self.fail(name, f"longrecall reads only {readable} ({why})")

    def limits(self, name: str) -> list[float]:
        """Return a pair [low, high] with 0 <= low <= high; the default is [0, inf]."""
        value = self.get(name, [0.0, math.inf])
        pair = [plain_number(end) for end in value] if isinstance(value, list | tuple) else []
        numbers = [
            # A whole number may be larger than any float, and no step is ever as long.
            float(end) if abs(end) <= LARGEST else math.inf if end > 0 else -math.inf
            for end in pair
            if isinstance(end, int | float) and not isinstance(end, bool) and end == end
        ]
        if len(pair) != 2 or len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
            raise self.fail(name, "it must be two numbers, 0 <= low <= high")
        return numbers

    def token_ids(self) -> dict[str, Any]:
        """Return bos_token_id, eos_token_id and pad_token_id where the file has them."""
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {name: self.get(name) for name in names if self.get(name) is not None}

    def ignore(self, *names: str) -> None:
        """Mark keys that change no output of the model (speed, training, initialisation)."""
        self._seen.update(names)

    def finish(self) -> None:
        """Refuse keys nobody asked for: they may change what the model computes. Unset ones (null, false) pass."""
        for name, value in self.raw.items():
            if name in self._seen or name in _WITHOUT_EFFECT or value is None or value is False:
                continue
            raise UserError(
                f'{self.where}: longrecall does not know the key "{name}" (value {value!r}) of this format and cannot '
                f"tell whether it changes the model.{did_you_mean(name, self._seen)} Remove it if it has no effect"
            )
