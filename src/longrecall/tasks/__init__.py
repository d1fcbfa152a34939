"""Generators of recall tasks: seeded, offline, for any tokenizer. They import neither models nor evaluation."""

from longrecall.tasks.bits_per_byte import BitsPerByte
from longrecall.tasks.encoding import IGNORE, PieceEncoder, Sample, answer_spans, sample_generator
from longrecall.tasks.passkey import Passkey, passkey_byte_batch, passkey_sequence
from longrecall.tasks.phonebook import Phonebook, phonebook_byte_batch, phonebook_sequence
from longrecall.tasks.registry import RecallTask, Task, create_task, register, task_names
from longrecall.tasks.text import read_text

__all__ = [
    "IGNORE",
    "BitsPerByte",
    "Passkey",
    "Phonebook",
    "PieceEncoder",
    "RecallTask",
    "Sample",
    "Task",
    "answer_spans",
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
