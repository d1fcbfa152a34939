"""The six tasks of the MAD suite (Poli et al. 2024), one file per task or pair of tasks, and the published settings."""

from longrecall.tasks.mad.compression import Compression
from longrecall.tasks.mad.fuzzy import FuzzyRecall
from longrecall.tasks.mad.memorization import Memorization, leakage_bound, seen_share
from longrecall.tasks.mad.recall import InContextRecall, NoisyRecall
from longrecall.tasks.mad.selective_copying import SelectiveCopying
from longrecall.tasks.mad.settings import MadSetting, mad_settings

TASKS = (InContextRecall, FuzzyRecall, NoisyRecall, SelectiveCopying, Compression, Memorization)

__all__ = [
    "TASKS",
    "Compression",
    "FuzzyRecall",
    "InContextRecall",
    "MadSetting",
    "Memorization",
    "NoisyRecall",
    "SelectiveCopying",
    "leakage_bound",
    "mad_settings",
    "seen_share",
]
