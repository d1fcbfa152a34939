"""Generators of recall tasks: seeded, offline, for any tokenizer. They import neither models nor evaluation."""

from longrecall.tasks.babilong import Babilong, babilong_byte_batch, babilong_sequence
from longrecall.tasks.bits_per_byte import BitsPerByte
from longrecall.tasks.copying import Copying, copying_byte_batch, copying_sequence
from longrecall.tasks.encoding import (
    IGNORE,
    ByteEncoder,
    ChoiceSample,
    GradedSample,
    PieceEncoder,
    QuestionSample,
    Sample,
    answer_spans,
    sample_generator,
)
from longrecall.tasks.in_context import InContext, MetaICL
from longrecall.tasks.needles import Needles, prefix_score
from longrecall.tasks.passkey import Passkey, SpokenPasskey, passkey_byte_batch, passkey_sequence
from longrecall.tasks.phonebook import Phonebook, phonebook_byte_batch, phonebook_sequence
from longrecall.tasks.question_answering import QuestionAnswering
from longrecall.tasks.registry import (
    ChoiceTask,
    GradedTask,
    QuestionTask,
    RecallTask,
    Task,
    TextMetricTask,
    create_task,
    register,
    task_names,
    wording_of,
)
from longrecall.tasks.sequence_registry import create_sequence_task, sequence_task_names
from longrecall.tasks.sequences import SequenceTask, sequence_batch
from longrecall.tasks.text import read_text
from longrecall.tasks.wording import Wording

__all__ = [
    "IGNORE",
    "Babilong",
    "BitsPerByte",
    "ByteEncoder",
    "ChoiceSample",
    "ChoiceTask",
    "Copying",
    "GradedSample",
    "GradedTask",
    "InContext",
    "MetaICL",
    "Needles",
    "Passkey",
    "Phonebook",
    "PieceEncoder",
    "QuestionAnswering",
    "QuestionSample",
    "QuestionTask",
    "RecallTask",
    "Sample",
    "SequenceTask",
    "SpokenPasskey",
    "Task",
    "TextMetricTask",
    "Wording",
    "answer_spans",
    "babilong_byte_batch",
    "babilong_sequence",
    "copying_byte_batch",
    "copying_sequence",
    "create_sequence_task",
    "create_task",
    "passkey_byte_batch",
    "passkey_sequence",
    "phonebook_byte_batch",
    "phonebook_sequence",
    "prefix_score",
    "read_text",
    "register",
    "sample_generator",
    "sequence_batch",
    "sequence_task_names",
    "task_names",
    "wording_of",
]
