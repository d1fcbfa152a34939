"""docs/reference/families.md: what every format is good for, tried on a tiny checkpoint of it.

``python -m tests.models.family_table`` tries everything and writes the page; test_family_table.py compares.
A new format has its row by itself, as soon as there is a checkpoint to try: a file in tests/models/families/ or
tests/models/naive/.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import longrecall
from longrecall.errors import UserError
from longrecall.inference.eligibility import why_no_step
from longrecall.models.formats import FORMATS, native
from longrecall.models.recurrent_lm import RecurrentLM
from longrecall.surgery.method import Method
from longrecall.surgery.registry import METHODS
from longrecall.training.segments import read_batch
from tests.models import test_families, test_families_naive, test_formats_fla
from tests.models.families.case import filled
from tests.models.round_trip import assert_round_trip
from tests.models.test_families import close, ids, padding_and_packing, steps_are_one_pass
from tests.models.test_formats_mamba2 import PADDED, mamba_ssm_folder, reference
from tests.training.interventions import intervene

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"
Write = Callable[[Path], tuple[Tensor, Tensor]]
"""Writes a checkpoint of another library into a new folder; returns ids ``[B, T]`` and the logits of its own code."""

OPTIONS: dict[str, dict[str, object]] = {
    "grow_state": {"factor": 2},
    "subheads": {"factor": 2},
    "add_retrieval": {"chunk": 4},
    "merge_heads": {},
}
"""Method -> small sizes of what it adds."""

HEAD = """# Formats and what can be done with them

Made by `python -m tests.models.family_table`, which tries every cell on a tiny checkpoint of the format.
`tests/models/test_family_table.py` compares this page with what it finds. [formats.md](formats.md) says how a format is
described, [../surgery.md](../surgery.md) what the methods do.

| column | what was done |
|---|---|
| read | the logits are those of the other library's own code, within 1e-4 in float32 |
| write | read, kept as a native checkpoint, written back: every tensor bit for bit, the config equal but for defaults |
| expand | the methods that fit, with `--init preserve`: the enlarged checkpoint computes the same |
| train | a batch from a state that was passed on, with a gradient in every tensor and a lower loss after a step |
| captured | decoding steps in buffers of fixed shape, as CUDA graphs capture them, give what one pass gives |
| padding | left padding, in a batch of one row and of several, leaves logits as they are |
| packing | documents side by side in one row are read as each by itself |
"""


@dataclass(frozen=True)
class Row:
    """What was found for one format."""

    format: str
    model_types: tuple[str, ...]
    read: str
    write: str
    expand: tuple[str, ...]
    train: str
    captured: str
    padding: str
    packing: str

    def cells(self) -> list[str]:
        """As they stand on the page."""
        types = ", ".join(f"`{kind}`" for kind in self.model_types) or "none, known by its keys"
        methods = ", ".join(f"`{name}`" for name in self.expand)
        tried = (self.read, self.write, methods, self.train, self.captured, self.padding, self.packing)
        return [f"`{self.format}`", types, *tried]


def formats() -> list[str]:
    """The formats of other libraries, as they are registered."""
    return [name for name in FORMATS if name != native.NAME]


def checkpoints(name: str) -> list[Write]:
    """Ways to write a tiny checkpoint of a format, the usual one first; none = nobody has proven anything of it."""

    def stock(case: test_families.Case) -> Write:
        def write(folder: Path) -> tuple[Tensor, Tensor]:
            model = filled(case)
            model.save_pretrained(folder)
            return ids(), model(ids(), use_cache=False).logits

        return write

    def recorded(case: str) -> Write:
        def write(folder: Path) -> tuple[Tensor, Tensor]:
            test_formats_fla.copy_case(case, folder)
            expected = test_formats_fla.load_file(test_formats_fla.VECTORS / case / "expected.safetensors")
            return expected["input_ids"], expected["logits"]

        return write

    def naive(case: test_families_naive.Naive) -> Write:
        return lambda folder: (ids(), case.write(folder, ids()))

    def mamba_ssm(folder: Path) -> tuple[Tensor, Tensor]:
        model = reference(2, True, vocabulary=PADDED)
        mamba_ssm_folder(model, folder, False)
        return ids(), model(ids(), use_cache=False).logits

    fla = [
        case for case in test_formats_fla.CASES if test_formats_fla.FORMAT_OF[test_formats_fla.model_type(case)] == name
    ]
    return [
        *(stock(case) for case in test_families.CASES if case.format == name),
        *(naive(case) for case in test_families_naive.CASES if case.format == name),
        *(recorded(case) for case in fla),
        *([mamba_ssm] if name == "mamba_ssm" else []),
    ]


def try_format(name: str, folder: Path) -> Row:
    """Try everything on the first checkpoint of a format, and each method on the first that it fits."""
    writers = checkpoints(name)
    assert writers, f"format {name} has no tiny checkpoint: add a file to tests/models/families/"
    with torch.no_grad():
        tokens, expected = writers[0](folder / "0")
        model = longrecall.load(folder / "0")
        close(model(tokens).logits, expected)
        assert_round_trip(folder / "0", folder / "native")
        some = known(model)
        logits = model(some).logits
        captured = why_no_step(model)
        if captured is None:
            steps_are_one_pass(model, some, logits)
        padding_and_packing(model, some, logits)
    return Row(
        format=name,
        model_types=FORMATS[name].model_types,
        read="yes",
        write="yes",
        expand=tuple(method.name for method in METHODS.values() if _expands(method, writers, folder)),
        train=_trains(model),
        captured=captured or "yes",
        padding="yes",
        packing="yes",
    )


def known(model: RecurrentLM) -> Tensor:
    """Tokens ``[2, 13]`` that the model knows."""
    return ids() % model.config.vocab_size


def _expands(method: Method, writers: list[Write], folder: Path) -> bool:
    for index, write in enumerate(writers):
        source, larger = folder / str(index), folder / f"{index}-{method.name}"
        if not source.exists():
            with torch.no_grad():
                write(source)
        try:
            longrecall.expand(source, larger, method=method.name, layers="all", init="preserve", **OPTIONS[method.name])
        except UserError:
            continue
        with torch.no_grad():
            old, new = longrecall.load(source), longrecall.load(larger)
            close(new(known(old)).logits, old(known(old)).logits)
        return True
    return False


def _trains(model: RecurrentLM) -> str:
    initial = intervene("state_passing", model.train(), attention_window=8)
    every, tokens = torch.tensor([True, True]), known(model)
    read_batch(model, tokens, tokens, every, initial)
    passed = initial.state_dict()
    loss = read_batch(model, tokens, tokens, every, initial)
    loss.backward()
    parameters = dict(model.named_parameters())
    without = [name for name, parameter in parameters.items() if parameter.grad is None]
    assert not without, f"no gradient in {without}"
    # A step that would lower the loss by 0.001 if it were a plane: steps of one size fit no two families.
    slope = sum(float(p.grad.square().sum()) for p in parameters.values() if p.grad is not None)
    torch.optim.SGD(parameters.values(), lr=0.001 / slope).step()
    initial.load_state_dict(passed)
    assert read_batch(model, tokens, tokens, every, initial) < loss, "a step does not lower the loss"
    return "yes"


def page(rows: list[Row]) -> str:
    """The text of the page."""
    names = ("format", "`model_type`", "read", "write", "expand", "train", "captured", "padding", "packing")
    lines = [f"| {' | '.join(cells)} |" for cells in (names, *(row.cells() for row in rows))]
    return "\n".join([HEAD, lines[0], "|---" * len(names) + "|", *lines[1:], ""])


def try_all() -> list[Row]:
    """Every format, in alphabetical order."""
    rows = []
    for name in sorted(formats()):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(try_format(name, Path(folder)))
    return rows


if __name__ == "__main__":
    PAGE.write_text(page(try_all()), encoding="utf-8")
