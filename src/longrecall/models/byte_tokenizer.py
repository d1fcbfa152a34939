"""The embedded tokenizer: one token per UTF-8 byte, nothing to download."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
END_ID = 256
PAD_ID = 257
VOCABULARY = 258


def byte_alphabet() -> dict[int, str]:
    """Return byte -> the printable character that stands for it in byte-level vocabularies (GPT-2's convention).

    Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet.update((byte, chr(256 + place)) for place, byte in enumerate(others))
    return alphabet


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return the byte tokenizer: ids 0-255 are bytes, 256 ends a document (and begins one), 257 pads (on the left).

    Round-trips any text. It adds no special tokens by itself; the literal text ``<|endoftext|>`` is read as id 256.
    """
    vocabulary = {character: byte for byte, character in byte_alphabet().items()} | {
        END_TOKEN: END_ID,
        PAD_TOKEN: PAD_ID,
    }
    # BPE without merges leaves every byte alone, in linear time even without splitting: 1 MB takes about half a second.
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(END_TOKEN, special=True), AddedToken(PAD_TOKEN, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_TOKEN,
        bos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
