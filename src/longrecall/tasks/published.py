"""Published settings and results of sequence tasks, to set our own beside.

RESONA: "Improving Context Copying in Linear Recurrence Models with Retrieval", tables 1 and 11. Table 11 gives the best
accuracy over learning rates of models of four layers on MQAR, with the retrieval layer at index 0 or 2 or without it.
Its columns say "KV pairs" over 32 to 256; the text (appendix A.3) makes them the width of the model, and the pairs 4 to
32 for the four lengths.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MqarSetting:
    """A cell of MQAR as published."""

    length: int
    pairs: int
    train: int
    """Training rows."""
    test: int
    """Test rows."""
    filler: bool
    batch_size: int | None
    """Training rows of a step; None where the paper does not say."""


ZOOLOGY_FIGURE_2 = (
    MqarSetting(64, 4, 100_000, 3000, False, 512),
    MqarSetting(128, 8, 100_000, 3000, False, 512),
    MqarSetting(256, 16, 100_000, 3000, False, 256),
    MqarSetting(512, 64, 100_000, 3000, False, 128),
)
"""Arora et al. (2023): two layers without MLP, width 64 to 512, learning rates 1e-4 to 1e-2 in four even powers."""

BASED_TRAINING = (
    MqarSetting(64, 4, 100_000, 0, True, 256),
    MqarSetting(128, 8, 20_000, 0, True, 256),
    MqarSetting(256, 16, 20_000, 0, True, 256),
    MqarSetting(256, 32, 20_000, 0, True, 256),
    MqarSetting(256, 64, 20_000, 0, True, 256),
)
"""Arora et al. (2024), "Based": one model is trained on all of these rows."""

BASED_TEST = tuple(
    MqarSetting(length, pairs, 0, 1000, True, 256)
    for length, pairs in ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
)
"""What that model is tested on, longer and fuller rows than those of the training among them."""

RESONA_WIDTHS = (32, 64, 128, 256)
RESONA_LENGTHS = (64, 128, 256, 512)
RESONA_MQAR = tuple(MqarSetting(length, length // 16, 20_000, 1000, False, None) for length in RESONA_LENGTHS)
"""Whether rows have filler is not said; zoology's figure 2, whose learning rates are used, has none."""

RESONA_TABLE_11: dict[str, tuple[tuple[float, ...], ...]] = {
    "base_conv": (
        (0.401, 0.439, 0.805, 0.960),
        (0.051, 0.115, 0.469, 0.948),
        (0.017, 0.046, 0.076, 0.549),
        (0.003, 0.007, 0.015, 0.023),
    ),
    "h3": (
        (0.861, 0.892, 0.991, 0.991),
        (0.225, 0.477, 0.974, 0.965),
        (0.094, 0.409, 0.303, 0.896),
        (0.003, 0.007, 0.038, 0.078),
    ),
    "hyena": (
        (0.430, 0.874, 0.922, 0.972),
        (0.051, 0.501, 0.646, 0.840),
        (0.018, 0.089, 0.313, 0.928),
        (0.002, 0.007, 0.053, 0.173),
    ),
    "rwkv": (
        (0.727, 0.955, 0.992, 0.953),
        (0.216, 0.451, 0.807, 0.986),
        (0.066, 0.093, 0.435, 0.820),
        (0.001, 0.002, 0.005, 0.010),
    ),
    "mamba": (
        (0.987, 0.992, 0.975, 0.990),
        (0.906, 0.992, 0.991, 0.920),
        (0.864, 0.990, 0.990, 0.991),
        (0.000, 0.419, 0.968, 0.000),
    ),
    "mamba2": (
        (0.990, 0.992, 0.991, 0.993),
        (0.974, 0.969, 0.992, 0.991),
        (0.755, 0.000, 0.991, 0.592),
        (0.000, 0.000, 0.001, 0.000),
    ),
}
"""Model -> accuracies without retrieval: a row for each of `RESONA_LENGTHS`, a column for each of `RESONA_WIDTHS`."""

RESONA_TABLE_11_WITH_RETRIEVAL = 1.0
"""The accuracy of every model of the table in all 16 cells, with the layer at index 0 and with it at index 2."""

RESONA_TABLE_1_COLUMNS = (
    "mad_compression",
    "mad_in_context_recall",
    "mad_noisy_recall",
    "mad_fuzzy_recall",
    "mad_selective_copying",
    "mad_memorization",
)

RESONA_TABLE_1: dict[str, tuple[tuple[float, ...], tuple[float, ...] | None]] = {
    "transformer": ((53.4, 96.7, 99.7, 69.4, 98.7, 89.4), None),
    "mamba": ((38.3, 76.7, 74.9, 9.3, 33.2, 88.5), (38.2, 99.9, 100.0, 63.4, 42.7, 88.8)),
    "mamba2": ((43.6, 96.4, 96.7, 21.1, 93.3, 86.9), (46.6, 100.0, 100.0, 62.9, 93.6, 88.1)),
    "rwkv5": ((36.8, 96.4, 96.6, 12.1, 52.7, 55.0), (40.4, 99.7, 99.8, 59.7, 58.0, 70.6)),
    "hyena": ((42.2, 79.3, 77.4, 9.96, 72.8, 88.9), (42.6, 99.9, 99.9, 66.2, 74.3, 89.0)),
}
"""Model -> (without, with retrieval) accuracies in percent on the tasks of `RESONA_TABLE_1_COLUMNS`."""

RESONA_TABLE_1_AVERAGES: dict[str, tuple[float, float | None]] = {
    "transformer": (84.1, None),
    "mamba": (53.5, 72.1),
    "mamba2": (73.0, 81.9),
    "rwkv5": (58.3, 71.5),
    "hyena": (61.7, 78.7),
}
"""The table's last column: the mean over the six tasks, in percent.

As printed; two are not the mean of their rows, which is 84.6 for the transformer and 71.4 for rwkv5 with retrieval."""
