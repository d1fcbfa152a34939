"""Documents -> token ids, many at once, and how one tokenizer is told from another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError

Ints = NDArray[np.int64]

_PROBE = "The quick brown fox, 1234567890 + 3.14!\n\n\tif (x != y) {\r\n  Größe, слово, 漢字, عربي, 🙂👍🏽\u00a0 end  "
"""Its tokens show what a vocabulary alone does not: how text is normalised and split."""


class Encoder(Protocol):
    """Texts -> their token ids, int64 ``[n]`` each, with the end token last."""

    def __call__(self, documents: Sequence[str]) -> list[Ints]:
        """Return the ids of every document."""
        ...


class DocumentEncoder:
    """A tokenizer as texts -> ids with the end token last; nothing is cut off, and no other token is added.

    Raises:
        UserError: the tokenizer has no end token.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                "the checkpoint's tokenizer has no end token (eos_token), which separates documents; set one"
            )
        self._tokenizer, self._end = tokenizer, int(tokenizer.eos_token_id)
        self._fast = _backend(tokenizer)

    def __call__(self, documents: Sequence[str]) -> list[Ints]:
        """Return int64 ``[n + 1]`` for every document."""
        if self._fast is None:
            found = (self._tokenizer.encode(document, add_special_tokens=False) for document in documents)
            return [np.array([*ids, self._end], dtype=np.int64) for ids in found]
        encodings = self._fast.encode_batch_fast(list(documents), add_special_tokens=False)
        return [np.array([*encoding.ids, self._end], dtype=np.int64) for encoding in encodings]


def _backend(tokenizer: Any) -> Any:
    """Return the Rust tokenizer that does what `tokenizer.encode` does, None where a class of its own does more."""
    from transformers import PreTrainedTokenizerFast

    own = type(tokenizer)
    plain = all(
        getattr(own, name, None) is getattr(PreTrainedTokenizerFast, name) for name in ("encode", "_encode_plus")
    )
    if not plain or tokenizer.split_special_tokens:
        return None
    backend = tokenizer.backend_tokenizer
    # A tokenizer.json may ask for both; `encode` switches them off in every call.
    backend.no_truncation()
    backend.no_padding()
    return backend


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return the SHA-256 of everything that decides which ids a text gets: vocabulary, end token, tokens of a probe.

    It does not depend on the version of a library or on how the tokenizer's files are written.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    probe = tokenizer.encode(_PROBE, add_special_tokens=False)
    known = json.dumps([vocabulary, tokenizer.eos_token_id, probe], ensure_ascii=True)
    return hashlib.sha256(known.encode()).hexdigest()
