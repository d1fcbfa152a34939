"""The published settings of the MAD suite as data: for each task a baseline, and one factor changed at a time.

Source: Poli et al. (2024) and the settings of the published code. Their protocol: width 128, two layers of
(mixer, SwiGLU), batches of 128, 200 epochs at a learning rate that is in effect constant, AdamW; the best test accuracy
over learning rates and weight decays per setting, the mean over settings per task, the mean over tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from longrecall.errors import UserError, did_you_mean

TRAIN_EXAMPLES = 12800
MEMORIZATION_TRAIN_EXAMPLES = 256

Value = int | float

_FEWER = (6400, 3200, 1600, 800)
_LONGER = (256, 512, 1024)
_WIDER = (32, 64, 128)

_BASELINES: dict[str, dict[str, Value]] = {
    "mad_in_context_recall": {"vocab_size": 16, "length": 128},
    "mad_fuzzy_recall": {"vocab_size": 16, "length": 128, "key_tokens": 3, "value_tokens": 3},
    "mad_noisy_recall": {"vocab_size": 32, "length": 128, "noise_tokens": 16, "noise_share": 0.2},
    "mad_selective_copying": {"vocab_size": 16, "length": 256, "copied": 16},
    "mad_compression": {"vocab_size": 16, "length": 32},
    "mad_memorization": {"vocab_size": 256, "length": 32},
}

_FACTORS: dict[str, dict[str, tuple[Value, ...]]] = {
    "mad_in_context_recall": {"vocab_size": _WIDER, "length": _LONGER, "train": _FEWER},
    "mad_fuzzy_recall": {"vocab_size": _WIDER, "length": _LONGER, "train": _FEWER},
    "mad_noisy_recall": {
        "vocab_size": (48, 80, 144),
        "length": _LONGER,
        "train": _FEWER,
        "noise_share": (0.4, 0.6, 0.8),
    },
    "mad_selective_copying": {
        "vocab_size": _WIDER,
        "length": (512, 1024),
        "train": _FEWER,
        "copied": (32, 64, 96),
    },
    "mad_compression": {"vocab_size": _WIDER, "length": (64, 128, 256), "train": _FEWER},
    "mad_memorization": {"vocab_size": (512, 1024, 2048, 4096, 8192)},
}


@dataclass(frozen=True)
class MadSetting:
    """One cell of the suite."""

    task: str
    """Name of the sequence task."""
    settings: Mapping[str, Value]
    """Settings of `create_sequence_task`."""
    train: int
    """Training rows."""
    changed: str | None
    """The factor that differs from the baseline: a setting's name or ``train``; None for the baseline itself."""


def mad_settings(task: str | None = None) -> tuple[MadSetting, ...]:
    """Return the published settings of a task, the baseline first, or of all six tasks: 66 in all.

    Raises `UserError` for a name that is no task of the suite.
    """
    if task is None:
        return tuple(setting for name in _BASELINES for setting in mad_settings(name))
    if task not in _BASELINES:
        hint = did_you_mean(task, _BASELINES, most=3)
        raise UserError(f'"{task}" is not a task of the MAD suite; its tasks: {", ".join(_BASELINES)}.{hint}')
    base = _BASELINES[task]
    train = MEMORIZATION_TRAIN_EXAMPLES if task == "mad_memorization" else TRAIN_EXAMPLES
    found = [MadSetting(task, MappingProxyType(dict(base)), train, None)]
    for factor, values in _FACTORS[task].items():
        for value in values:
            changes = {} if factor == "train" else {factor: value}
            rows = int(value) if factor == "train" else train
            found.append(MadSetting(task, MappingProxyType(base | changes), rows, factor))
    return tuple(found)
