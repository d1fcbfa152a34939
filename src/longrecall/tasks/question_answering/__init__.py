"""Question answering over documents."""

from longrecall.tasks.question_answering.prompts import PROMPTS, STYLES, Prompt, Row, build_prompt, parse_row
from longrecall.tasks.question_answering.task import TEXT_METRICS, QuestionAnswering

__all__ = ["PROMPTS", "STYLES", "TEXT_METRICS", "Prompt", "QuestionAnswering", "Row", "build_prompt", "parse_row"]
