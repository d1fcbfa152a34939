"""BABILong-style questions qa1 to qa5: facts scattered through a book, and a question at the end."""

from longrecall.tasks.babilong.task import (
    TASKS,
    Babilong,
    babilong_byte_batch,
    babilong_sequence,
    check_tasks,
)

__all__ = ["TASKS", "Babilong", "babilong_byte_batch", "babilong_sequence", "check_tasks"]
