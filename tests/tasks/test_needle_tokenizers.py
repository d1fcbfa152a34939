"""Needles with the kinds of tokenizers that models come with, each trained here on the shipped book."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from longrecall.errors import UserError
from longrecall.tasks import PieceEncoder, create_task
from longrecall.tasks.needles import TASKS
from longrecall.tasks.text import shipped_text
from tests.tasks.needle_reader import read

UNKNOWN = "[UNK]"


def trained(
    core: Tokenizer, trainer: Callable[..., Any], digits: bool = True, **options: Any
) -> PreTrainedTokenizerFast:
    more = trainer(vocab_size=1500, special_tokens=[UNKNOWN], show_progress=False, **options)
    numbers = " ".join(str(number) for number in range(1_000_000, 9_000_000, 12_345))
    core.train_from_iterator([shipped_text("held_out")[:60000], numbers if digits else ""], more)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token=UNKNOWN)


def gpt2_like() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return trained(core, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def llama_like(prepend: str) -> PreTrainedTokenizerFast:
    """As sentencepiece does it: spaces are letters, and every text gets one in front."""
    core = Tokenizer(models.BPE(unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    core.decoder = decoders.Metaspace(prepend_scheme=prepend)
    return trained(core, trainers.BpeTrainer, initial_alphabet=[*"0123456789abcdefghijklmnopqrstuvwxyz\n-:,.?"])


def bert_like(alphabet: str, digits: bool = True) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    return trained(core, trainers.WordPieceTrainer, digits, initial_alphabet=[*alphabet])


@pytest.fixture(scope="module", params=["gpt2", "always", "first", "never"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return gpt2_like() if request.param == "gpt2" else llama_like(request.param)


def test_every_task_reads_word_by_word_as_published(tokenizer: PreTrainedTokenizerFast) -> None:
    encode = PieceEncoder(tokenizer)
    for kind in TASKS:
        task = kind()
        for index in range(3):
            (cell,) = task.cells([1500])
            sample = task.sample(encode, cell, index, 0)
            found = read(tokenizer.decode(sample.input_ids))
            assert found.answer == list(sample.references)
            assert {*zip(found.asked * task._kind.values, found.answer, strict=True)} <= {*found.hidden}
            assert len(sample.input_ids) <= 1500 and sample.fill > 0.9


def test_pieces_join_to_the_text_that_they_were_cut_from(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces = ["\n", "One of the", " special", ".", "\n", "-noun", " 12", "34", "?", "\n\n", " ", "x"]
    encode = PieceEncoder(tokenizer)
    joined = [token for piece in pieces for token in encode(piece)]
    assert tokenizer.decode(joined, clean_up_tokenization_spaces=False) == "".join(pieces)
    assert encode.many(pieces) == [encode(piece) for piece in pieces]
    assert encode.many([]) == []


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_3", "niah_multivalue", "niah_multikey_2"])
def test_a_tokenizer_that_cannot_represent_the_values_is_refused_at_once(name: str) -> None:
    # Without continued digits ("##7") a number is one unknown word.
    encode = PieceEncoder(bert_like("0123456789abcdef-", digits=False))
    task: Any = create_task(name)
    with pytest.raises(UserError, match=rf"{name}: the tokenizer cannot represent the needle .* turns it into '.*UNK"):
        task.sample(encode, task.cells([1500])[0], 0, 0)


def test_a_tokenizer_that_only_changes_the_case_will_do() -> None:
    encode = PieceEncoder(bert_like("".join(map(chr, range(33, 127)))))
    task: Any = create_task("niah_multikey_1")
    sample = task.sample(encode, task.cells([1500])[0], 0, 0)
    assert task.judge({}, sample, sample.target)
