"""Every measure against its definition, whatever the pieces in which it is read."""

from __future__ import annotations

import math
import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from longrecall import load
from longrecall.diagnostics import (
    effective_rank,
    effective_remembrance,
    maximum_lengths,
    position_perplexity,
    recall_length,
    stable_rank,
    state_statistics,
)
from longrecall.diagnostics.effective_remembrance import default_starts, tokens_to_read, total_variation
from longrecall.diagnostics.plan import Plan
from longrecall.diagnostics.position_perplexity import position_edges
from longrecall.diagnostics.recall_length import samples_at, search_lengths
from longrecall.diagnostics.state_statistics import log_positions
from longrecall.diagnostics.streaming import segment_ends, text_windows
from longrecall.errors import UserError
from longrecall.evaluation.recall import run_cell
from longrecall.evaluation.statistics import wilson_interval
from longrecall.layers.mixers.registry import mixer_config
from longrecall.tasks import Passkey, PieceEncoder
from longrecall.tasks.encoding import IGNORE, Sample
from tests.conftest import MIXERS, RECURRENT
from tests.diagnostics.conftest import ASSETS, FirstTokens, Ring, tiny_model

# float64 sums in another order: 1e-15 each, over at most some thousand operations.
EXACT = 1e-9


def some_ids(rows: int, length: int, seed: int = 0) -> Any:
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, (rows, length))


@settings(max_examples=15, deadline=None)
@given(columns=st.integers(1, 70), training=st.integers(2, 40))
def test_loss_by_position_is_the_mean_cross_entropy(columns: int, training: int) -> None:
    model, ids = tiny_model(MIXERS["gla"], MIXERS["mamba2"]), some_ids(3, 60)
    sizes = np.where(ids % 2, 1, 2)
    entries = position_perplexity(model, ids, training, sizes=sizes, columns=columns)
    with torch.inference_mode():
        logits = model(torch.from_numpy(ids)).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(ids[:, 1:]).flatten(), reduction="none")
    losses = F.pad(losses.view(3, -1), (1, 0))
    assert entries[0]["start"] == 0 and entries[-1]["end"] == 60
    for entry in entries:
        scored = slice(max(1, entry["start"]), entry["end"])
        here = losses[:, scored]
        assert entry["loss"] == pytest.approx(float(here.mean()), rel=EXACT)
        assert entry["bits_per_token"] == pytest.approx(float(here.mean()) / math.log(2), rel=EXACT)
        per_byte = float(here.sum()) / math.log(2) / sizes[:, scored].sum()
        assert entry["bits_per_byte"] == pytest.approx(per_byte, rel=EXACT)
        assert entry["low"] <= entry["loss"] <= entry["high"] and entry["count"] == 3
        level = losses[:, max(1, levels(training)) : training].mean(1)
        if entry["start"] >= training and len(level) and entry["rise"] is not None:
            assert entry["rise"] == pytest.approx(float((here.mean(1) - level).mean()), rel=1e-6, abs=EXACT)


def levels(training: int) -> int:
    """Where the first range that lies wholly in the last three quarters of the training length begins."""
    return next(edge for edge in position_edges(training, 10 * training) if edge >= training // 4)


def test_edges_separate_what_was_trained_from_what_was_not() -> None:
    edges = position_edges(512, 8192)
    assert edges[:2] == [0, 64] and edges[-1] == 8192
    assert {128, 256, 512, 1024, 2048, 4096} < set(edges)
    assert all(wide <= 1.25 * low for low, wide in pairwise(edges[1:]))
    assert segment_ends(10, 4, stops=(5, 99, 0)) == [4, 5, 9, 10]
    assert log_positions(8192, 512) == [16 * 2**power for power in range(10)]
    assert log_positions(50, 20) == [20, 40, 50] and log_positions(40, 10)[0] == 10


@pytest.mark.parametrize("name", MIXERS)
def test_remembrance_is_its_definition(name: str) -> None:
    model, ids = tiny_model(MIXERS["gla"], MIXERS[name]), some_ids(2, 40)
    starts = [0, 1, 7, 20, 38, 39]
    result = effective_remembrance(model, ids, starts, batch_tokens=16, segment_tokens=6)
    tokens = torch.from_numpy(ids)
    with torch.inference_mode():
        whole = model(tokens).logits[:, -1]
        for point, t in zip(result["points"], starts, strict=True):
            p, q = whole.softmax(-1), model(tokens[:, t:]).logits[:, -1].softmax(-1)
            wanted = 0.5 * (p - q).abs().sum(-1).mean()
            assert (point["t"], point["count"]) == (t, 2)
            assert point["value"] == pytest.approx(float(wanted), abs=EXACT)
    assert result["points"][0]["value"] == 0.0 and result["points"][-1]["value"] > 0.1


def test_remembrance_reads_what_it_says_and_nothing_twice() -> None:
    model, read = tiny_model(MIXERS["gla"]), []
    effective_remembrance(model, some_ids(2, 64), batch_tokens=8, advance=read.append)
    assert sum(read) == tokens_to_read(2, 64, default_starts(64))
    assert default_starts(64) == [0, 1, 8, 16, 32, 48, 56, 60, 62, 63]
    one = effective_remembrance(model, some_ids(1, 64), [3])["points"]
    assert one[0]["low"] is None and one[0]["value"] is not None


@pytest.mark.parametrize(("starts", "bad"), [([-1], -1), ([0, 40], 40), ([], "at least one")])
def test_remembrance_refuses_a_grid_outside_the_sequence(starts: list[int], bad: object) -> None:
    with pytest.raises(UserError, match=str(bad)):
        effective_remembrance(tiny_model(MIXERS["gla"]), some_ids(1, 40), starts)
    # A diagnosis says so before it loads the model.
    with pytest.raises(UserError, match=str(bad)):
        Plan(10, multiple=16, starts=tuple(starts))


def test_total_variation() -> None:
    one, other = torch.full((3,), -math.inf), torch.full((3,), -math.inf)
    one[0], other[2] = 0.0, 0.0
    assert float(total_variation(one, other)) == 1.0 and float(total_variation(one, one)) == 0.0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.floats(-6, 6), st.integers(0, 99))
def test_ranks_against_singular_values(keys: int, values: int, scale: float, seed: int) -> None:
    matrix = np.random.Generator(np.random.PCG64(seed)).normal(size=(keys, values)) * 10**scale
    singular = np.linalg.svd(matrix, compute_uv=False)
    shares = singular / singular.sum()
    wanted = math.exp(-sum(p * math.log(p) for p in shares if p > 0))
    # The Gram matrix loses half of the digits of small singular values.
    assert float(effective_rank(torch.from_numpy(matrix))) == pytest.approx(wanted, rel=1e-6)
    squares = singular**2
    assert float(stable_rank(torch.from_numpy(matrix))) == pytest.approx(squares.sum() / squares.max(), rel=EXACT)


def test_ranks_at_the_ends() -> None:
    state = torch.zeros(4, 3, 5)
    state[1, 0, 0] = 1e-30
    state[2, torch.arange(3), torch.arange(3)] = 7.0
    state[3, 0, 0] = math.nan
    for measure in (effective_rank, stable_rank):
        zero, one, three, bad = measure(state).tolist()
        # 1e-6: the entropy of a rounding error of 1e-8 in a singular value.
        assert zero == 0.0 and one == pytest.approx(1.0, abs=1e-6) and three == pytest.approx(3.0, rel=EXACT)
        assert math.isnan(bad)


def test_the_rank_tells_a_full_memory_from_one_with_room() -> None:
    """n associations with orthogonal keys fill n of 16 directions; random ones fill nearly all, then stay."""
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    keys = torch.randn(64, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ranks = [float(effective_rank(torch.eye(16, dtype=torch.float64)[:n].mT @ values[:n])) for n in (2, 4, 8, 16)]
    for n, rank in zip((2, 4, 8, 16), ranks, strict=True):
        assert 0.9 * n <= rank <= n  # random values are nearly, not exactly, orthogonal
    full = [float(effective_rank(keys[:n].mT @ values[:n])) / 16 for n in (4, 32, 64)]
    assert full[0] < 0.25 + EXACT and min(full[1:]) > 0.75


# BaseConv remembers nothing but the inputs of its convolution.
WITH_A_STATE = [name for name in RECURRENT if mixer_config(MIXERS[name]).state_size()]


@pytest.mark.parametrize("name", WITH_A_STATE)
def test_state_statistics_are_those_of_the_state(name: str) -> None:
    model, ids = tiny_model(MIXERS["attention"], MIXERS[name]), some_ids(2, 30)
    result = state_statistics(model, ids, [5, 30], columns=4)
    assert result["positions"] == [5, 30]
    with torch.inference_mode():
        states = [model(torch.from_numpy(ids[:, :end])).past_key_values.layers[1] for end in (5, 30)]
    names = sorted(key for key in states[0] if key.endswith("recurrent"))
    assert [layer["layer"] for layer in result["layers"]] == [1] * len(names)
    for layer, key in zip(sorted(result["layers"], key=lambda layer: layer["mixer"]), reversed(names), strict=True):
        if len(names) == 1:
            assert layer["mixer"] == MIXERS[name]["type"]
            assert (layer["key_dim"], layer["value_dim"]) == tuple(states[0][key].shape[-2:])
    if len(names) == 1:
        for place, state in enumerate(state[names[0]] for state in states):
            for index, head in enumerate(result["layers"][0]["heads"]):
                matrices = state[:, index].numpy()
                assert head["mean"][place] == pytest.approx(matrices.mean((1, 2)).mean(), abs=EXACT)
                assert head["std"][place] == pytest.approx(matrices.std((1, 2)).mean(), rel=EXACT)
                assert head["norm"][place] == pytest.approx(np.linalg.norm(matrices, axis=(1, 2)).mean(), rel=EXACT)
    else:
        assert [layer["mixer"] for layer in result["layers"]] == ["mamba2 (new)", "gla (old)"]


def test_state_statistics_say_where_in_a_layer_a_mixer_is() -> None:
    around = MIXERS["retrieval"] | {"base": MIXERS["hymba"]}
    result = state_statistics(tiny_model(MIXERS["retrieval"], around), some_ids(2, 30), [30], columns=4)
    assert [layer["mixer"] for layer in result["layers"]] == ["gla (base)", "mamba2 (base.ssm)"]


def test_state_statistics_refuse_what_they_cannot_look_at() -> None:
    with pytest.raises(UserError, match="between 1 and the 30"):
        state_statistics(tiny_model(MIXERS["gla"]), some_ids(1, 30), [31])
    with pytest.raises(UserError, match="no recurrent layers"):
        state_statistics(tiny_model(MIXERS["attention"]), some_ids(1, 30), [3])


def test_recall_is_what_eval_measures(tokenizer: Any) -> None:
    model, task = load(ASSETS / "gla-base", dtype="float32"), Passkey()
    result = recall_length(model, tokenizer, 1024, 512, samples=10, doublings=0, batch_tokens=700, segment_tokens=100)
    encode = PieceEncoder(tokenizer)
    for point in result["points"]:
        cells = task.cells([point["length"]])
        keys = point["count"] // len(cells)
        entries = [run_cell(model, encode, task, cell, keys, 0, 4096, 512, lambda tokens: None) for cell in cells]
        assert point["value"] == pytest.approx(sum(entry["value"] for entry in entries) / len(entries), abs=EXACT)
    assert [point["length"] for point in result["points"]][:3] == [128, 256, 512]
    assert result["points"][0]["value"] == 1.0 and 0 < result["points"][-1]["value"] < 1


class Greedy:
    """Asks for what the model itself would say after a common beginning and a few tokens of each sample's own."""

    depths = (0.0,)

    def __init__(self, model: Any) -> None:
        self.model, self.wrong = model, False
        self._said: dict[tuple[int, int], Any] = {}

    def cells(self, lengths: list[int]) -> list[dict[str, float]]:
        return [{"length": length, "depth": 0.0} for length in lengths]

    def sample(self, encode: Any, cell: Any, index: int, seed: int) -> Sample:
        length = int(cell["length"])
        if length < 20:
            raise UserError("too short")
        if (length, index) not in self._said:
            ids = np.concatenate([some_ids(1, length - 9)[0], some_ids(1, 9, seed=1 + index)[0]])
            for _ in range(4):
                with torch.inference_mode():
                    ids = np.append(ids, int(self.model(torch.from_numpy(ids)[None]).logits[0, -1].argmax()))
            self._said[length, index] = ids
        ids = self._said[length, index].copy()
        if self.wrong:
            ids[-1] = (ids[-1] + 1) % 256
        return Sample(ids, np.where(np.arange(len(ids)) < length, IGNORE, ids))


@pytest.mark.parametrize("name", MIXERS)
def test_the_shared_beginning_is_what_every_row_has_read(name: str) -> None:
    model = tiny_model(MIXERS[name], MIXERS["gla"])
    task: Any = Greedy(model)
    for wrong in (False, True):
        task.wrong = wrong
        sizes = {"samples": 2, "doublings": 0, "batch_tokens": 16, "segment_tokens": 5}
        result = recall_length(model, None, 40, 40, task=task, **sizes)
        assert {point["value"] for point in result["points"]} == {0.0 if wrong else 1.0}
        assert result["points"][-1]["count"] == 2


def test_recall_stops_where_it_is_surely_lost(tokenizer: Any) -> None:
    result = recall_length(Ring(256, 256), tokenizer, 4096, 256, samples=10)
    points = {point["length"]: (point["value"], point["count"]) for point in result["points"]}
    # Past 256 tokens the ring reaches back to the needle at the last 2 of 5 depths only, past 512 at the last one.
    assert points == {128: (1.0, 10), 256: (1.0, 10), 512: (0.4, 80), 1024: (0.2, 20)}
    assert set(result["maximum"].values()) == {256}
    assert result["maximum_intervals"]["0.5"] == [256, 512] and result["maximum_intervals"]["0.8"] == [None, 256]
    never = recall_length(Ring(256, 1), tokenizer, 4096, 256, samples=10)
    assert [(point["length"], point["count"]) for point in never["points"]] == [(128, 10)]
    assert set(never["maximum"].values()) == {None}


def asked_of(share: Any, *, lengths: Any, samples: int, doublings: int) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """A search over a model that recalls a share of the keys by length, evenly; and (length, keys) of what it asked."""
    asked: list[tuple[int, int]] = []

    def ask(cell: Any, indexes: range) -> list[bool]:
        asked.append((cell["length"], len(indexes)))
        want = share(cell["length"])
        return [math.floor((index + 1) * want) > math.floor(index * want) for index in indexes]

    return search_lengths(Passkey(depths=(0.5,)), lengths, samples, doublings, ask), asked


def test_more_keys_are_asked_until_the_interval_settles_it() -> None:
    lengths = [128, 256, 512, 1024, 2048]
    shares = {128: 1.0, 256: 0.75, 512: 0.5, 1024: 0.375, 2048: 0.0}
    result, asked = asked_of(shares.__getitem__, lengths=lengths, samples=16, doublings=3)
    keys = {length: sum(n for at, n in asked if at == length) for length in lengths}
    # Surely above with the first keys, with more, never settled, surely not above: the search ends there.
    assert keys == {128: 16, 256: 32, 512: 128, 1024: 128, 2048: 0}
    assert [length for length, _ in asked] == sorted(length for length, _ in asked)
    assert result["maximum"]["0.5"] == 256 and result["maximum_intervals"]["0.5"] == [256, 512]
    for point in result["points"]:
        low, high = wilson_interval(point["value"] * point["count"], point["count"], 1 - 0.05 / 4)
        assert (point["low"], point["high"], point["count"]) == (low, high, keys[point["length"]])
    # Between two lengths that are settled the one half-way is tried.
    halved, _ = asked_of(lambda length: float(length <= 256), lengths=lengths, samples=16, doublings=3)
    assert [point["length"] for point in halved["points"]] == [128, 256, 384, 512]
    once, _ = asked_of(shares.__getitem__, lengths=lengths, samples=16, doublings=0)
    assert {point["count"] for point in once["points"]} == {16}
    assert once["points"][0]["low"] == wilson_interval(16, 16)[0]


@settings(max_examples=60, deadline=None)
@given(
    share=st.floats(0, 1), samples=st.integers(1, 60), doublings=st.integers(0, 4), length=st.sampled_from([128, 8192])
)
def test_the_keys_of_a_length_are_bounded(share: float, samples: int, doublings: int, length: int) -> None:
    result, _ = asked_of(lambda _: share, lengths=[length], samples=samples, doublings=doublings)
    (point,) = result["points"]
    first = samples_at(length, samples, 1)
    assert point["count"] in [first << times for times in range(doublings + 1)]
    settled = point["low"] > 0.5 or point["high"] <= 0.5
    assert settled or point["count"] == first << doublings


@pytest.mark.parametrize("share", [0.5, 0.51])
def test_looking_often_does_not_make_it_wrong_more_often(share: float) -> None:
    """A model on the threshold, or just above: whoever stops when it suits would be wrong at several of four looks."""
    random = np.random.Generator(np.random.PCG64(0))
    wrong = 0
    for _ in range(400):
        result = search_lengths(
            Passkey(depths=(0.5,)), [128], 10, 3, lambda cell, indexes: list(random.random(len(indexes)) < share)
        )
        (point,) = result["points"]
        wrong += not point["low"] <= share <= point["high"]
    # 5% of 400, and three standard deviations of such a count.
    assert wrong <= 20 + 3 * 4.4


def test_maximum_lengths_need_every_shorter_length() -> None:
    values = {64: 0.9, 128: 0.55, 256: 0.95, 512: 0.5}
    points = [{"length": length, "value": value} for length, value in values.items()]
    assert maximum_lengths(points) == {"0.5": 256, "0.6": 64, "0.7": 64, "0.8": 64}
    assert maximum_lengths([{"length": 64, "value": None}])["0.5"] is None
    assert [samples_at(length, 40, 5) for length in (128, 2048, 8192, 10**6)] == [8, 4, 2, 2]
    assert samples_at(128, 3, 5) == 1


class Spy(torch.nn.Module):
    """Counts the tokens of every forward pass and the logits that are still alive when the next one starts."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.config, self.device = model, model.config, model.device
        self.most, self.alive, self._logits = 0, 0, []

    def forward(self, ids: torch.Tensor, **arguments: Any) -> Any:
        self._logits = [logits for logits in self._logits if logits() is not None]
        self.most, self.alive = max(self.most, ids.numel()), max(self.alive, len(self._logits))
        output = self.model(ids, **arguments)
        self._logits.append(weakref.ref(output.logits))
        return output


def test_memory_does_not_grow_with_the_length(tokenizer: Any) -> None:
    seen = []
    for length in (512, 8192):
        spies = [Spy(tiny_model({"type": "gla", "num_heads": 1, "key_dim": 2, "value_dim": 2})) for _ in range(4)]
        ids = some_ids(2, length)
        position_perplexity(spies[0], ids, 32, columns=64)
        state_statistics(spies[1], ids, log_positions(length, 32), columns=64)
        effective_remembrance(spies[2], ids, [0, length // 2], batch_tokens=128)
        recall_length(spies[3], tokenizer, length, 32, samples=5, batch_tokens=128)
        seen.append([(spy.most, spy.alive) for spy in spies])
    # The recall part of a model that recalls nothing stops at its first length, whatever the longest.
    assert seen[0] == seen[1] and max(most for most, _ in seen[1]) <= 256
    # The segment before the current one may live until the loop variable is replaced.
    assert max(alive for _, alive in seen[1]) <= 1


def test_windows_are_spread_and_bytes_may_be_unknown(tokenizer: Any) -> None:
    text = "".join(chr(97 + index % 26) for index in range(100))
    ids, sizes = text_windows(tokenizer, text, 20, 3)
    assert ids.shape == (3, 20) and sizes is not None and (sizes == 1).all()
    assert [chr(row[0]) for row in ids] == [text[0], text[20], text[60]]

    class Words:
        is_fast = False

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": self.encode(text, add_special_tokens=False)}

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [len(word) for word in text.split()]

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return ["?"] * len(ids)

    ids, sizes = text_windows(Words(), "a bb ccc dddd", 2, 9)
    assert ids.tolist() == [[1, 2], [3, 4]] and sizes is None
    with pytest.raises(UserError, match="4 tokens, fewer than the 5"):
        text_windows(Words(), "a bb ccc dddd", 5, 9)


def test_a_model_ruled_by_its_first_token_remembers_everything() -> None:
    ids = np.tile(np.arange(64), (2, 1))
    values = [point["value"] for point in effective_remembrance(FirstTokens(), ids, [0, 1, 32, 63])["points"]]
    assert values[0] == 0.0 and min(values[1:]) > 0.9


def test_statistics_of_layers_of_blocks() -> None:
    """A layer may have several recurrences, or none at all; each entry says what it is."""
    from tests.hybrids import hybrid
    from tests.models.test_blocks import build

    expected = {
        "nemotron": [(0, "mamba2"), (2, "mamba2")],
        "falcon": [(0, "mamba2 (ssm)"), (1, "mamba2 (ssm)")],
        "kimi": [(0, "kda"), (1, "kda")],
        "rwkv": [(0, "rwkv7"), (1, "rwkv7")],
        "two_states": [(0, "gla"), (0, "delta_net (second)"), (1, "mamba2 (second)")],
    }
    for name, layers in expected.items():
        model = build(name) if name == "two_states" else hybrid(name)
        found = state_statistics(model, some_ids(2, 20) % model.config.vocab_size, [10, 20])
        assert [(entry["layer"], entry["mixer"]) for entry in found["layers"]] == layers
        kinds = {entry["mixer"]: entry["layers"] for entry in found["kinds"]}
        assert {mixer: indices for mixer, indices in kinds.items() if mixer in dict(map(reversed, layers))} == {
            mixer: [layer for layer, other in layers if other == mixer] for _, mixer in layers
        }
        assert sorted({layer for indices in kinds.values() for layer in indices}) == list(
            range(len(model.config.layers))
        )
        if name == "nemotron":
            assert (kinds["moe"], kinds["mlp"], kinds["attention"]) == ([1], [3], [4])
            # One kind alone has a state: its fill is the model's.
            assert [entry["fill"] for entry in found["kinds"]] == [found["fill"], [], [], []]
