"""The bridge to lm-evaluation-harness: its tasks in ``longrecall eval``, our tasks and checkpoints in ``lm_eval``."""

from longrecall.evaluation.harness.files import include_path
from longrecall.evaluation.harness.task import PREFIX, HarnessTask, require_lm_eval

__all__ = ["PREFIX", "HarnessTask", "include_path", "require_lm_eval"]
