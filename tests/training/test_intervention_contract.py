"""What every intervention promises with every mixer: exact resume, checkpointing, packed documents, values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.models.state import RecurrentState
from longrecall.training.initial_states import InitialState, make_initial_state
from longrecall.training.initial_states.base import takes_part
from longrecall.training.recipe_states import INITIAL_STATES
from longrecall.training.segments import Segments, read_batch
from tests.conftest import MIXERS, RECURRENT
from tests.training.interventions import OPTIONS, intervene

ModelMaker = Callable[..., RecurrentLM]
ROWS, LENGTH = 3, 13
TEXT = torch.tensor([True, True, False])
STARTS = ((0, 5), (7,), (0,))
"""Row 0: two documents; row 1: the end of one, then another; row 2: one that is whole."""

KINDS = pytest.mark.parametrize("kind", OPTIONS)
FAMILIES = (
    "gla_merged",
    "retnet",
    "delta_net",
    "gated_delta_net",
    "mamba2_groups",
    "mamba",
    "rwkv5",
    "rwkv6",
    "rwkv7",
    "hgrn2",
    "rg_lru",
    "rwkv4",
    "gated_delta_product",
    "kda",
    "mom_linear",
    "h3",
    "handover",
)
OWN_TENSORS = (
    "gla_merged",
    "mamba2_groups",
    "kda",
    "rwkv5",
    "rwkv4",
    "rg_lru",
    "mom_linear",
    "handover",
    "with_attention",
)
"""One of each kind of state: a matrix, with a convolution, with three, with a shift, vectors, memories, two, caches."""
MADE_UP = ("zero", "noise", "fitted_noise")
"""Interventions that make a state up, tensor by tensor: to a mixer it is one that was passed on, as `state_passing`
has it. Of mixers whose state is like that of one in `OWN_TENSORS` these are tried by `-m slow` alone."""


def tried(kind: str, mixer: str, *more: Any) -> Any:
    """A combination of the two, slow where others say the same."""
    alike = kind in MADE_UP and mixer not in OWN_TENSORS
    return pytest.param(kind, mixer, *more, marks=[pytest.mark.slow] * alike)


EVERY_MIXER = [tried(kind, mixer) for kind in OPTIONS for mixer in (*FAMILIES, "with_attention")]


def test_every_kind_and_family_is_here() -> None:
    assert set(OPTIONS) == set(INITIAL_STATES)
    # BaseConv remembers nothing but the inputs of its convolution; mom_linear adds no loss over the whole batch.
    assert {MIXERS[name]["type"] for name in FAMILIES} == {m["type"] for m in RECURRENT.values()} - {"base_conv"}


def model_of(make_model: ModelMaker, mixer: str) -> RecurrentLM:
    """One layer of this kind; with_attention: a recurrence between full and windowed attention."""
    between = ("attention", "gla_conv", "attention_window")
    return make_model(*(MIXERS[name] for name in (between if mixer == "with_attention" else (mixer,))))


@dataclass
class Training:
    """Plain steps of gradient descent over made-up batches; batch `n` depends on `n` alone."""

    model: RecurrentLM
    initial: InitialState
    apart: bool = False
    done: int = 0
    losses: list[Tensor] = field(default_factory=list)

    def run(self, batches: int) -> Training:
        for _ in range(batches):
            generator = torch.Generator().manual_seed(self.done)
            tokens = torch.randint(0, 256, (ROWS, LENGTH), generator=generator)
            segments = Segments.of(STARTS, LENGTH) if self.apart or self.initial.continues else None
            loss = read_batch(self.model, tokens, tokens, TEXT, self.initial, segments)
            self.model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.05 * parameter.grad
            self.losses.append(loss.detach())
            self.done += 1
        return self


@pytest.mark.parametrize(
    ("kind", "mixer", "apart"),
    [tried(kind, mixer, False) for kind in OPTIONS for mixer in (*FAMILIES, "with_attention")]
    + [tried(kind, "with_attention", True) for kind in OPTIONS],
)
def test_interrupted_and_resumed_is_uninterrupted(make_model: ModelMaker, kind: str, mixer: str, apart: bool) -> None:
    """Bit for bit, through the bytes of a safetensors file."""
    model = model_of(make_model, mixer)
    whole = Training(model, intervene(kind, model), apart).run(2)
    weights = save({name: tensor.clone() for name, tensor in model.state_dict().items()})
    carried = save(whole.initial.state_dict())
    whole.run(2)
    second_model = make_model(*(layer["mixer"] for layer in model.config.layers), seed=9)
    second = Training(second_model, intervene(kind, second_model), apart, done=2)
    second_model.load_state_dict(load(weights))
    second.initial.load_state_dict(load(carried))
    second.run(2)
    assert torch.equal(torch.stack(second.losses), torch.stack(whole.losses[2:]))
    final = whole.model.state_dict()
    assert all(torch.equal(tensor, final[name]) for name, tensor in second_model.state_dict().items())


@pytest.mark.parametrize(("kind", "mixer"), EVERY_MIXER)
def test_gradient_checkpointing_changes_nothing(make_model: ModelMaker, kind: str, mixer: str) -> None:
    plain_model, saving_model = model_of(make_model, mixer).train(), model_of(make_model, mixer).train()
    saving_model.gradient_checkpointing_enable()
    # The second batch is the first that can begin with a state.
    plain = Training(plain_model, intervene(kind, plain_model)).run(2)
    saving = Training(saving_model, intervene(kind, saving_model)).run(2)
    # The same operations run twice; only the order of additions into a gradient may differ. Losses are about 5.5.
    torch.testing.assert_close(torch.stack(saving.losses), torch.stack(plain.losses), rtol=1e-6, atol=0)
    expected = dict(plain_model.named_parameters())
    for name, parameter in saving_model.named_parameters():
        assert (parameter.grad is None) == (expected[name].grad is None), name
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-6, msg=name)


class Spy:
    """Remembers what went through an intervention."""

    def __init__(self, initial: InitialState) -> None:
        self._initial = initial
        self.by_row, self.continues = initial.by_row, initial.continues

    def before_batch(self, text: Tensor, row: Tensor | None = None) -> RecurrentState | None:
        self.text, self.before = text, self._initial.before_batch(text, row)
        return self.before

    def after_batch(self, final: RecurrentState, lent: bool = False) -> None:
        self.final = final
        self._initial.after_batch(final, lent)

    def state_dict(self) -> dict[str, Tensor]:
        return self._initial.state_dict()

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        self._initial.load_state_dict(tensors)


def row_of(state: RecurrentState | None, row: int) -> RecurrentState | None:
    return None if state is None else state.select_rows(torch.tensor([row]))


def started(spy: Spy, piece: int, row: int, begin: int, opens: bool) -> RecurrentState | None:
    """The state that a piece must start from, written down a second time."""
    if not spy.by_row:
        return row_of(spy.before, piece)
    return row_of(spy.before, row) if begin == 0 and not (opens and spy.continues) else None


@pytest.mark.parametrize(("kind", "mixer"), EVERY_MIXER)
def test_documents_kept_apart_are_read_alone(make_model: ModelMaker, kind: str, mixer: str) -> None:
    """Loss and final states of a packed batch are those of its pieces, each read alone from where it is to start."""
    model = model_of(make_model, mixer).double()
    spy = Spy(intervene(kind, model))
    pieces = [(0, 0, 5, True), (0, 5, 13, True), (1, 0, 7, False), (1, 7, 13, True), (2, 0, 13, True)]
    tokens = torch.randint(0, 256, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    for batch in tokens:
        loss = read_batch(model, batch, batch, TEXT, spy, Segments.of(STARTS, LENGTH))
        total, finals = torch.zeros((), dtype=torch.float64), []
        for piece, (row, begin, end, opens) in enumerate(pieces):
            out = model(batch[row : row + 1, begin:end], past_key_values=started(spy, piece, row, begin, opens))
            finals.append(out.past_key_values)
            # The last position of a piece predicts the first token of the next one in its row.
            targets = batch[row, begin + 1 : end + 1]
            total += torch.nn.functional.cross_entropy(out.logits[0, : len(targets)], targets, reduction="sum")
        # float64: sums in another order.
        assert loss.item() == pytest.approx(total.item() / (ROWS * (LENGTH - 1)), rel=1e-12)
        wanted = finals if not spy.by_row else [finals[1], finals[3], finals[4]]
        assert spy.text.tolist() == ([True] * 4 + [False] if not spy.by_row else TEXT.tolist())
        for layer, found in enumerate(spy.final.layers):
            for name, tensor in found.items():
                if takes_part(name, convolution=True):
                    alone = torch.cat([state.layers[layer][name] for state in wanted])
                    torch.testing.assert_close(tensor, alone, rtol=1e-11, atol=1e-12)


@KINDS
@pytest.mark.parametrize("apart", [False, True], ids=["rows", "documents"])
def test_a_row_meets_the_same_whichever_process_reads_it(make_model: ModelMaker, kind: str, apart: bool) -> None:
    """Three rows of one process are two and one of two: bit for bit, but for moments that two processes add up."""
    model = model_of(make_model, "with_attention").double()
    rows = {name: slice(*ends) for name, ends in (("all", (0, 3)), ("first", (0, 2)), ("second", (2, 3)))}
    sums: list[list[Tensor]] = []

    def read(who: str, add_up: Callable[[Tensor], Tensor] | None) -> list[Spy]:
        recipe = INITIAL_STATES[kind](**OPTIONS[kind])
        initial = make_initial_state(recipe, model, 3, rows[who].start, add_up)
        if kind == "learned":
            initial.load_state_dict({name: torch.ones_like(t) for name, t in initial.state_dict().items()})
            initial.load_state_dict(initial.state_dict() | {"batches": torch.tensor(0)})
        spies = []
        for number in range(3):
            tokens = torch.randint(0, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))[rows[who]]
            spies.append(Spy(initial))
            segments = Segments.of(STARTS[rows[who]], LENGTH) if apart or initial.continues else None
            with torch.no_grad():
                read_batch(model, tokens, tokens, TEXT[rows[who]], spies[-1], segments)
        if kind == "learned":
            initial.release()
        return spies

    def one_by_one(who: str, others: list[Tensor]) -> list[Spy]:
        """Every sum is made of what the processes have given so far: after the third time all three are right."""
        mine: list[Tensor] = []
        given = iter(others)
        sums.append(mine)
        return read(who, lambda own: own + next(given, torch.zeros_like(own)) if mine.append(own) is None else own)

    whole = read("all", None)
    first, second = one_by_one("first", []), one_by_one("second", [])
    for _ in range(3):
        one, two = sums[-2:]
        first, second = one_by_one("first", two), one_by_one("second", one)
    for number, expected in enumerate(whole):
        split = [first[number].before, second[number].before]
        if expected.before is None:
            assert split == [None, None]
            continue
        for layer, kept in enumerate(expected.before.layers):
            for name, tensor in kept.items():
                if takes_part(name, convolution=True):
                    count = len(first[number].text)
                    both = (tensor[:count], tensor[count:])
                    for state, wanted in zip(split, both, strict=True):
                        found = torch.zeros_like(wanted) if state is None else state.layers[layer][name]
                        # float64 sums of the rows of one process, or of two.
                        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@KINDS
def test_what_goes_out_stays_as_it_was(make_model: ModelMaker, kind: str) -> None:
    """State is a value: later batches change neither a state that was given out nor one that was shown."""
    model = make_model()
    spy = Spy(intervene(kind, model))
    seen: list[tuple[Any, Any]] = []
    for number in range(4):
        tokens = torch.randint(0, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))
        read_batch(model, tokens, tokens, TEXT, spy)
        seen += [(state, state.map(torch.clone)) for state in (spy.before, spy.final) if state is not None]
    for state, copy in seen:
        for layer, kept in zip(state.layers, copy.layers, strict=True):
            assert all(torch.equal(tensor, kept[name]) for name, tensor in layer.items())


@KINDS
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_what_is_lent_may_be_overwritten(make_model: ModelMaker, kind: str, clip_norm: float | None) -> None:
    """As by the next replay of a recorded pass. A state that is not lent is kept without a copy."""
    model = model_of(make_model, "with_attention")
    can = {"attention_window": 3, "clip_norm": clip_norm, "probability": 1.0}
    known = {one.name for one in dataclasses.fields(INITIAL_STATES[kind])}
    options = OPTIONS[kind] | {key: value for key, value in can.items() if key in known}
    with torch.no_grad():
        final = model(torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))).past_key_values
    text, found = torch.ones(2, dtype=torch.bool), []
    for lent in (False, True):
        initial = intervene(kind, model, **options)
        initial.before_batch(text)
        given = replace(final.map(torch.clone), position=final.position.clone())
        initial.after_batch(given, lent=lent)
        if lent:
            for tensor in (given.position, *(x for layer in given.layers for x in layer.values())):
                tensor.fill_(torch.nan if tensor.is_floating_point() else -7)
        before = initial.before_batch(text)
        if kind == "state_passing" and clip_norm is None and not lent:
            assert before is not None
            assert before.layers[1]["recurrent"].data_ptr() == given.layers[1]["recurrent"].data_ptr()
        own = initial.state_dict()
        state = [] if before is None else [before.position, *(x for layer in before.layers for x in layer.values())]
        found.append((own, state))
    kept, borrowed = found
    assert kept[0].keys() == borrowed[0].keys()
    assert all(torch.equal(kept[0][name], tensor) for name, tensor in borrowed[0].items())
    assert all(torch.equal(one, other) for one, other in zip(kept[1], borrowed[1], strict=True))


@pytest.mark.parametrize("kind", ["noise", "fitted_noise", "state_passing", "learned"])
def test_rows_are_chosen_alike(make_model: ModelMaker, kind: str) -> None:
    """`probability` and `text_only` mean the same everywhere: which rows of a batch have a state."""
    options = {key: value for key, value in OPTIONS[kind].items() if key in ("std", "freeze")}
    model = make_model()
    initial = intervene(kind, model, seed=5, **options, probability=0.5, text_only=True)
    text = torch.arange(60) % 3 > 0
    if kind == "learned":
        initial.load_state_dict({name: torch.ones_like(t) for name, t in initial.state_dict().items()})
    initial.after_batch(model(torch.randint(0, 256, (60, 4))).past_key_values)
    if kind == "learned":
        initial.load_state_dict(initial.state_dict() | {"batches": torch.tensor(0)})
    state = initial.before_batch(text)
    assert state is not None
    alive = [
        tensor.flatten(1).any(1) for layer in state.layers for name, tensor in layer.items() if "recurrent" in name
    ]
    assert all(torch.equal(rows, alive[0]) for rows in alive)
    assert not bool((alive[0] & ~text).any())
    # 40 fair draws: mean 20, standard deviation 3.2; the bounds are more than four of them.
    assert 6 < int(alive[0].sum()) < 34
    reference = intervene("noise", model, seed=5, std=1.0, probability=0.5, text_only=True).before_batch(text)
    assert reference is not None
    assert torch.equal(reference.layers[0]["recurrent"].flatten(1).any(1), alive[0])


@pytest.mark.parametrize("kind", ["noise", "fitted_noise", "state_passing", "truncated_bptt", "learned"])
@pytest.mark.parametrize("convolution", [True, False])
def test_convolution_states_take_part_when_asked(make_model: ModelMaker, kind: str, convolution: bool) -> None:
    options = {key: value for key, value in OPTIONS[kind].items() if key in ("std", "freeze")}
    model = make_model()
    initial = intervene(kind, model, **options, convolution=convolution)
    text = torch.ones(2, dtype=torch.bool)
    initial.before_batch(text)
    initial.after_batch(model(torch.randint(0, 256, (2, 9))).past_key_values)
    initial.load_state_dict(
        {n: torch.ones_like(t) if kind == "learned" else t for n, t in initial.state_dict().items()}
    )
    state = initial.before_batch(text)
    assert state is not None
    for layer in state.layers:
        for name, tensor in layer.items():
            assert bool(tensor.any()) is (name == "recurrent" or convolution)


@pytest.mark.parametrize("kind", ["noise", "fitted_noise", "state_passing"])
def test_processes_start_alike_whichever_rows_are_chosen(make_model: ModelMaker, kind: str) -> None:
    """Recorded passes are replayed by all processes or by none: tensors of one kind, or nothing everywhere."""
    model = model_of(make_model, "with_attention")
    window = {"attention_window": 3} if kind == "state_passing" else {}
    found: dict[float, list[Any]] = {}
    for probability in (0.0, 1.0):
        recipe = INITIAL_STATES[kind](**OPTIONS[kind] | window | {"probability": probability})
        initial = make_initial_state(recipe, model, 3, 0, lambda own: own)
        for _ in range(2):
            before = initial.before_batch(TEXT)
            like = before and [{name: (x.shape, x.dtype) for name, x in layer.items()} for layer in before.layers]
            found.setdefault(probability, []).append(like)
            with torch.no_grad():
                ids = torch.zeros((ROWS, LENGTH), dtype=torch.long)
                initial.after_batch(model(ids, past_key_values=before).past_key_values)
    assert found[0.0] == found[1.0] and found[0.0][1] is not None
