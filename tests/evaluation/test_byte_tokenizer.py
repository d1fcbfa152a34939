"""The byte tokenizer, and bytes per token for it and for others."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from longrecall.errors import UserError
from longrecall.evaluation.token_bytes import _from_offsets, tokenize_with_bytes
from longrecall.models.byte_tokenizer import END_ID, PAD_ID, VOCABULARY, byte_tokenizer

TOKENIZER = byte_tokenizer()
# Lone surrogates are no text: UTF-8 cannot hold them.
TEXT = st.text(st.characters(exclude_categories=("Cs",)))


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_ids_are_the_bytes_and_decode_to_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize("text", ["", " ", "  a  b ", "\r\n\t\x00\x7f", "Don't , stop .", "🎉é", " ''s"])
def test_nothing_is_cleaned_up(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text
    assert TOKENIZER(text)["input_ids"] == list(text.encode())


def test_special_tokens() -> None:
    assert (TOKENIZER.eos_token_id, TOKENIZER.bos_token_id, TOKENIZER.pad_token_id) == (END_ID, END_ID, PAD_ID)
    assert len(TOKENIZER) == TOKENIZER.vocab_size == VOCABULARY == 258
    assert TOKENIZER.encode("a<|endoftext|>b<|pad|>") == [97, 256, 98, 257]
    assert TOKENIZER.decode([97, 256, 98], skip_special_tokens=True) == "ab"
    batch = TOKENIZER(["abc", "d"], padding=True)
    assert batch["input_ids"] == [[97, 98, 99], [257, 257, 100]]
    assert batch["attention_mask"] == [[1, 1, 1], [0, 0, 1]]


def test_saves_and_loads_with_auto_tokenizer(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "Grüße,  🎉 <|endoftext|>\r\n"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.padding_side, loaded.pad_token_id, loaded.eos_token_id, len(loaded)) == ("left", 257, 256, 258)


def test_a_megabyte_without_a_single_break_is_fast() -> None:
    text = "x" * 1_000_000
    start = time.process_time()
    ids = TOKENIZER.encode(text)
    # About 0.5 s is usual; a quadratic algorithm would take hours.
    assert time.process_time() - start < 10
    assert len(ids) == len(text)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Drops white space and lower-cases: its tokens do not spell the text, only offsets tell."""
    core = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "fox": 2}, unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "\u2581": 1, "a": 2, "b": 3, "\u2581a": 4} | {f"<0x{i:02X}>": 5 + i for i in range(256)}
    core = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@settings(max_examples=100, deadline=None)
@given(TEXT.filter(lambda text: text.strip() != ""))
def test_bytes_sum_to_the_text(text: str) -> None:
    for tokenizer in (TOKENIZER, WORDS, SENTENCEPIECE):
        ids, sizes = tokenize_with_bytes(tokenizer, text)
        assert len(ids) == len(sizes)
        if len(ids):
            assert int(sizes.sum()) == len(text.encode())
            assert (sizes >= 0).all()


WORDS, SENTENCEPIECE = word_tokenizer(), sentencepiece_tokenizer()


def test_bytes_of_each_token() -> None:
    assert tokenize_with_bytes(TOKENIZER, "aé")[1].tolist() == [1, 1, 1]
    assert tokenize_with_bytes(SENTENCEPIECE, " aé b")[1].tolist() == [2, 1, 1, 1, 1]
    # "The " 4 bytes, "größe  " 9, "fox" 3: white space belongs to the token before it.
    assert tokenize_with_bytes(WORDS, "The größe  fox")[1].tolist() == [4, 9, 3]


def test_a_slow_tokenizer_that_does_not_spell_is_refused() -> None:
    class Slow:
        is_fast = False

        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": [0] * len(text)}

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return ["?" for _ in ids]

    with pytest.raises(UserError, match="use a fast tokenizer"):
        tokenize_with_bytes(Slow(), "abc")


def test_special_tokens_in_the_text_count_as_their_spelling() -> None:
    ids, sizes = tokenize_with_bytes(TOKENIZER, "a<|endoftext|>")
    assert ids.tolist() == [97, 256]
    np.testing.assert_array_equal(sizes, [1, 13])


def test_offsets_that_step_back_never_give_negative_bytes() -> None:
    # Some tokenizers emit a mark before the letter it belongs to; the sum must stay that of the text all the same.
    sizes = _from_offsets([(0, 1), (3, 4), (1, 2), (4, 5)], "abcdé")
    assert sizes.tolist() == [3, 0, 1, 2]
