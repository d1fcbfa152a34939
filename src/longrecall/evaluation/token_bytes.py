"""How many bytes of a text each of its tokens stands for, so that losses per byte are exact for any tokenizer."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longrecall.errors import UserError
from longrecall.models.byte_tokenizer import byte_alphabet

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def tokenize_with_bytes(tokenizer: Any, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (token ids, bytes per token), int64 [tokens] each; the bytes sum to the length of `text` in UTF-8.

    First choice: spell each token as bytes (byte-level or sentencepiece vocabularies) and check that the spelling of
    all is the text itself. Otherwise the tokenizer's character offsets are used: a token owns the text from its start
    to the next token's start, so white space that it drops belongs to the token before it.
    """
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    ids = np.array(encoded["input_ids"], dtype=np.int64)
    data = text.encode("utf-8")
    unique, inverse = np.unique(ids, return_inverse=True)
    spellings = tokenizer.convert_ids_to_tokens(unique.tolist())
    for spell in (_byte_level, _sentencepiece):
        pieces = [spell(token) for token in spellings]
        whole = [piece for piece in pieces if piece is not None]
        if len(whole) == len(pieces) and b"".join(whole[place] for place in inverse) == data:
            return ids, np.array([len(piece) for piece in whole], dtype=np.int64)[inverse]
    if not fast:
        raise UserError(
            f"bits_per_byte: {type(tokenizer).__name__} neither spells its tokens as bytes nor gives character "
            "offsets; use a fast tokenizer"
        )
    return ids, _from_offsets(encoded["offset_mapping"], text)


def bytes_of_tokens(tokenizer: Any, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many bytes of text each token of `ids` stands for, in an array of the same shape.

    Special tokens stand for none. Exact where the vocabulary spells bytes (byte-level, sentencepiece); of others each
    token is decoded alone, which may miss white space between words.
    """
    unique, inverse = np.unique(ids, return_inverse=True)
    special = set(tokenizer.all_special_ids)
    plain = [int(token) for token in unique if int(token) not in special]
    spellings = tokenizer.convert_ids_to_tokens(plain)
    pieces: list[bytes | None] = [_byte_level(token) for token in spellings]
    if None in pieces and any("\u2581" in token for token in spellings):
        pieces = [_sentencepiece(token) for token in spellings]
    elif None in pieces:
        pieces = [str(tokenizer.decode([token])).encode("utf-8", "replace") for token in plain]
    size = dict(zip(plain, (len(piece or b"") for piece in pieces), strict=True))
    sizes = np.array([size.get(int(token), 0) for token in unique], dtype=np.int64)
    return sizes[inverse].reshape(ids.shape)


_BYTES = {character: byte for byte, character in byte_alphabet().items()}


def _byte_level(token: str) -> bytes | None:
    values = [_BYTES.get(character) for character in token]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else None


def _sentencepiece(token: str) -> bytes | None:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode("utf-8")


def _from_offsets(offsets: list[tuple[int, int]], text: str) -> NDArray[np.int64]:
    sizes = np.array([len(character.encode("utf-8")) for character in text], dtype=np.int64)
    byte_of = np.concatenate(([0], np.cumsum(sizes)))
    starts = byte_of[np.array([start for start, _ in offsets], dtype=np.int64)]
    edges = np.concatenate((starts, byte_of[-1:]))
    edges[0] = 0
    return np.asarray(np.diff(np.maximum.accumulate(edges)), dtype=np.int64)
