"""A recurrent model as lm-evaluation-harness sees one (``lm_eval.api.model.LM``): texts in, numbers and texts out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from tqdm import tqdm

from longrecall.errors import UserError
from longrecall.evaluation.harness.scoring import Likelihoods, Prompt, Scorer, Work
from longrecall.evaluation.harness.task import require_lm_eval
from longrecall.evaluation.memory import Room

try:
    from lm_eval.api.model import TemplateLM
except ModuleNotFoundError:  # the extra is not installed; making an object says so
    TemplateLM = object

log = logging.getLogger(__name__)

UNNAMED_DEVICE = "cuda:0"
"""What the command ``lm_eval`` passes on where its caller names no device."""

_UNBOUNDED = 2**62
NO_ANSWER: dict[str, Any] = {
    "loglikelihood": (-float("inf"), False),
    "loglikelihood_rolling": -float("inf"),
    "generate_until": "",
}
"""What the harness is told where logits were NaN or infinite: that text is impossible, or nothing was said."""


class LongrecallLM(TemplateLM):  # type: ignore[misc]
    """Answers the requests of the harness with a checkpoint of any format that `longrecall.load` reads.

    Prompts of any length are read in segments with the state carried on, so memory does not grow with them (attention
    layers without a window keep their keys); what the options of a question have before them is read once. Texts are
    tokenised as the harness does it for Hugging Face models, and its ``hf`` model answers the same up to rounding,
    except that it cuts what is longer than its ``max_length``, and ours only when `max_length` is given.

    Args:
        pretrained: a checkpoint folder or hub id, or a model in memory with its `tokenizer`.
        tokenizer: of transformers; None takes the checkpoint's.
        dtype, device: of a checkpoint that is loaded here; None means as stored, and CUDA where there is one. The
            device that ``lm_eval`` names when nobody does, "cuda:0", means the same.
        batch_size: rows read at once at most; None or "auto" leaves it to `batch_tokens`.
        max_length: tokens of context at most; None means all.
        batch_tokens, segment_tokens: as in `longrecall.evaluation.evaluate`.
        max_batch_size: accepted because ``lm_eval`` gives it; batches are sized without trying.

    Raises:
        UserError: a checkpoint or tokenizer that cannot be loaded, sampling instead of greedy text.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        tokenizer: Any = None,
        dtype: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_length: int | None = None,
        batch_tokens: int = 16384,
        segment_tokens: int = 2048,
        max_batch_size: int | None = None,
        room: Room | None = None,
    ) -> None:
        require_lm_eval()
        super().__init__()
        if isinstance(pretrained, str):
            pretrained, tokenizer = _open(pretrained, tokenizer, dtype, device)
        elif tokenizer is None:
            raise UserError("a model in memory needs its tokenizer: LongrecallLM(model, tokenizer=...)")
        pretrained.eval()
        self.tokenizer = tokenizer
        self._device = pretrained.device
        self.max_length = max_length
        rows = None if batch_size in (None, "auto") else int(str(batch_size))
        room = room or Room(pretrained, batch_tokens, segment_tokens)
        self._scorer = Scorer(pretrained, room, getattr(tokenizer, "eos_token_id", None), rows)

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text."""
        token: int | None = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has nothing before it."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise UserError("the tokenizer has no token that begins or ends a text, which this harness task needs")

    @property
    def tokenizer_name(self) -> str:
        """What tells the tokenizer from others."""
        return str(getattr(self.tokenizer, "name_or_path", "")).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of `string`; None adds special tokens as the tokenizer does, unless it begins with one."""
        settings: dict[str, Any] = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        begin = getattr(self.tokenizer, "bos_token", None)
        if add_special_tokens is None and begin and string.startswith(begin):
            settings["add_special_tokens"] = False
        return [int(token) for token in self.tokenizer.encode(string, **settings)]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-likelihood of the continuation, whether it is what greedy decoding says) of each request."""
        return self._answer_all(requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text."""
        return self._answer_all(requests, disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model says after each prompt, greedily, up to the first stop."""
        return self._answer_all(requests, disable_tqdm)

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> Any:
        """Return the answers to (texts, tokens before, tokens after), each weighed alone."""
        work = [Likelihoods((_pair(before, after),), np.ones((1, 1))) for _, before, after in requests]
        found: dict[int, Any] = {}
        for part in self._scorer.run(work):
            found |= part
        return [NO_ANSWER["loglikelihood"] if found[i][0] is None else found[i][0] for i in range(len(work))]

    def _answer_all(self, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        units = units_of(requests)
        answers: dict[int, list[Any]] = {}
        with tqdm(total=len(requests), desc="requests", disable=True if disable_tqdm else None) as bar:
            for part in self.answers(units):
                answers |= part
                bar.update(sum(len(units[index]) for index in part))
        given = [answer for index in range(len(units)) for answer in answers[index]]
        flat = [NO_ANSWER[each.request_type] if a is None else a for each, a in zip(requests, given, strict=True)]
        for request, answer in zip(requests, flat, strict=True):
            self.cache_hook.add_partial(request.request_type, request.args, answer)
        return flat

    def answers(self, units: Sequence[Sequence[Any]]) -> Iterator[dict[int, list[Any]]]:
        """Yield, batch by batch, index of a unit -> the answers to its requests; None where logits were not finite.

        A unit: as `units_of` makes them.
        """
        work = [self._prepared(unit) for unit in units]
        # A text without tokens has nothing to score.
        empty = {index: [0.0] * len(units[index]) for index, (item, _) in enumerate(work) if item.rows == 0}
        if empty:
            yield empty
        full = [index for index in range(len(units)) if index not in empty]
        for part in self._scorer.run([work[index][0] for index in full]):
            yield {
                full[place]: self._finished(units[full[place]], work[full[place]][1], found)
                for place, found in part.items()
            }

    def tokens(self, unit: Sequence[Any]) -> int:
        """Return how many tokens the longest request of a unit has."""
        return self._prepared(unit)[0].own

    def _prepared(self, unit: Sequence[Any]) -> tuple[Work, list[int]]:
        """Return the work of a unit, and how many of its parts answer each request (windows of a text)."""
        kind = unit[0].request_type
        if kind == "generate_until":
            return self._prompt(*unit[0].args), [1] * len(unit)
        if kind == "loglikelihood_rolling":
            windows = [self._windows(*request.args) for request in unit]
            pairs = tuple(pair for part in windows for pair in part)
            return Likelihoods(pairs, np.ones((1, len(pairs))), exact=False), [len(part) for part in windows]
        if kind != "loglikelihood":
            raise UserError(f"a harness request of the kind {kind} cannot be answered by a language model of text")
        pairs = tuple(self._continuation(*request.args) for request in unit)
        texts = [request.args[1] for request in unit]
        lengths = [[1.0] * len(texts), [len(text) for text in texts], [len(text.encode()) for text in texts]]
        return Likelihoods(pairs, np.maximum(np.array(lengths, dtype=np.float64), 1.0)), [1] * len(unit)

    def _finished(self, unit: Sequence[Any], parts: Sequence[int], found: list[Any]) -> list[Any]:
        kind = unit[0].request_type
        if kind == "generate_until":
            if found[0] is None:
                return [None] * len(unit)
            text = self.tokenizer.decode(found[0], skip_special_tokens=True)
            for stop in self._settings(unit[0].args[1])[1]:
                text = text.split(stop)[0]
            return [text] * len(unit)
        if kind == "loglikelihood":
            return found
        windows = iter(found)
        texts = [[next(windows) for _ in range(count)] for count in parts]
        return [None if None in text else sum(total for total, _ in text) for text in texts]

    def _continuation(self, context: str, continuation: str) -> tuple[Any, Any]:
        if context == "":
            after = self.tok_encode(continuation, add_special_tokens=False)
            before = [self.prefix_token_id]
            # As the harness does: a text that begins with the opening token does not get it twice.
            if after[:1] == before:
                after = after[1:]
        else:
            before, after = self._encode_pair(context, continuation)
        return self._cut(before or [self.prefix_token_id], after)

    def _cut(self, before: list[int], after: list[int]) -> tuple[Any, Any]:
        if not after:
            raise UserError("a harness request has a continuation without tokens, which has no likelihood")
        if self.max_length is not None:
            if len(after) > self.max_length:
                raise UserError(f"a continuation has {len(after)} tokens, more than max_length {self.max_length}")
            before = before[-(self.max_length + 1 - len(after)) :]
        return _pair(before, after)

    def _windows(self, text: str) -> list[tuple[Any, Any]]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length or _UNBOUNDED,
            context_len=1,
        )
        return [_pair(*make_disjoint_window(window)) for window in windows]

    def _settings(self, given: dict[str, Any]) -> tuple[int, list[str]]:
        """Return (tokens to say at most, stops) of generation settings; refuse sampling."""
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        settings = normalize_gen_kwargs(copy.deepcopy(given), 256)
        if settings.get("do_sample"):
            raise UserError(
                "this harness task samples its answers; longrecall only answers greedily (--model hf samples)"
            )
        end = self.eot_token_id
        stop = None if end is None else self.tokenizer.decode([end], skip_special_tokens=False)
        return int(settings["max_gen_toks"]), [text for text in handle_stop_sequences(settings["until"], stop) if text]

    def _prompt(self, context: str, given: dict[str, Any]) -> Prompt:
        new_tokens, stops = self._settings(given)
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        if self.max_length is not None:
            if new_tokens >= self.max_length:
                raise UserError(f"max_length {self.max_length} leaves nothing beside the {new_tokens} tokens to say")
            tokens = tokens[-(self.max_length - new_tokens) :]

        def ended(said: list[int]) -> bool:
            text = self.tokenizer.decode(said, skip_special_tokens=True)
            return any(stop in text for stop in stops)

        return Prompt(np.array(tokens, dtype=np.int64), new_tokens, ended)


def units_of(requests: Sequence[Any]) -> list[list[Any]]:
    """Part requests (``lm_eval.api.instance.Instance``) into units that are answered together.

    Those for likelihoods over one document are one unit; those for text are one only where they repeat one prompt.
    """

    def key(each: Any) -> tuple[Any, ...]:
        prompt = each.idx if each.request_type == "generate_until" else None
        return each.request_type, each.task_name, each.doc_id, prompt

    return [list(unit) for _, unit in groupby(requests, key)]


def _pair(before: Sequence[int], after: Sequence[int]) -> tuple[Any, Any]:
    return np.array(before, dtype=np.int64), np.array(after, dtype=np.int64)


def _open(path: str, tokenizer: Any, dtype: str | None, device: str | None) -> tuple[Any, Any]:
    from longrecall.models.checkpoint import open_checkpoint
    from longrecall.models.checkpoint_tokenizer import load_tokenizer
    from longrecall.models.loading import load, preferred_device

    if device == UNNAMED_DEVICE and preferred_device() == "cpu":
        log.warning("there is no CUDA device: the model runs on the CPU (--device names another)")
        device = "cpu"
    checkpoint = open_checkpoint(path)
    if tokenizer is None or isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer or checkpoint.path, checkpoint.config.vocab_size)
    return load(path, dtype=None if dtype == "auto" else dtype, device=preferred_device(device)), tokenizer
