"""Generators of recall tasks: seeded, offline, for any tokenizer. They import neither models nor evaluation."""

from longrecall.tasks.babilong import Babilong, babilong_byte_batch, babilong_sequence
from longrecall.tasks.bits_per_byte import BitsPerByte
from longrecall.tasks.copying import Copying, copying_byte_batch, copying_sequence
from longrecall.tasks.encoding import (
    IGNORE,
    ByteEncoder,
    PieceEncoder,
    QuestionSample,
    Sample,
    answer_spans,
    sample_generator,
)
from longrecall.tasks.passkey import Passkey, passkey_byte_batch, passkey_sequence
from longrecall.tasks.phonebook import Phonebook, phonebook_byte_batch, phonebook_sequence
from longrecall.tasks.registry import QuestionTask, RecallTask, Task, create_task, register, task_names
from longrecall.tasks.text import read_text

__all__ = [
    "IGNORE",
    "Babilong",
    "BitsPerByte",
    "ByteEncoder",
    "Copying",
    "Passkey",
    "Phonebook",
    "PieceEncoder",
    "QuestionSample",
    "QuestionTask",
    "RecallTask",
    "Sample",
    "Task",
    "answer_spans",
    "babilong_byte_batch",
    "babilong_sequence",
    "copying_byte_batch",
    "copying_sequence",
    "create_task",
    "passkey_byte_batch",
    "passkey_sequence",
    "phonebook_byte_batch",
    "phonebook_sequence",
    "read_text",
    "register",
    "sample_generator",
    "task_names",
]
