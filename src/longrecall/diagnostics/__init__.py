"""What a checkpoint's memory does past the training length, and which remedy it needs."""

from longrecall.diagnostics.diagnosis import diagnose, diagnose_checkpoint
from longrecall.diagnostics.effective_remembrance import effective_remembrance, total_variation
from longrecall.diagnostics.plan import PARTS
from longrecall.diagnostics.position_perplexity import position_perplexity
from longrecall.diagnostics.recall_length import maximum_lengths, recall_length
from longrecall.diagnostics.results import check_diagnosis, read_diagnosis
from longrecall.diagnostics.state_statistics import effective_rank, stable_rank, state_statistics
from longrecall.diagnostics.verdict import Thresholds, verdict

__all__ = [
    "PARTS",
    "Thresholds",
    "check_diagnosis",
    "diagnose",
    "diagnose_checkpoint",
    "effective_rank",
    "effective_remembrance",
    "maximum_lengths",
    "position_perplexity",
    "read_diagnosis",
    "recall_length",
    "stable_rank",
    "state_statistics",
    "total_variation",
    "verdict",
]
