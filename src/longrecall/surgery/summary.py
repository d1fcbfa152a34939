"""What an expansion did, or would do: the value that `expand` returns and the CLI prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from longrecall.models.accounting import ModelAccount
from longrecall.tables import aligned, grouped


@dataclass(frozen=True)
class LayerChange:
    """One layer before and after: mixer and sizes, numbers in its state, parameters, whether it was chosen."""

    layer: int
    mixer_before: str
    mixer_after: str
    sizes_before: str
    sizes_after: str
    state_before: int
    state_after: int
    parameters_before: int
    parameters_after: int
    chosen: bool


@dataclass(frozen=True)
class ExpansionSummary:
    """The result of `longrecall.expand`.

    `touched` names the tensors that surgery made, changed, or gave a larger state to address (what a recipe's
    `touched: 10x` speeds up). State sizes are numbers per sequence. `after` is the checkpoint as written, `finished` as
    it will be once a handover has dropped its old path (equal for every other init). `retrieval_bytes` is what
    the retrieval layers of the new checkpoint keep of `context` tokens, its training length (4096 if unknown).
    `written` is False for a dry run.
    """

    method: str
    init: str
    seed: int
    options: dict[str, Any]
    source: str
    destination: str
    layers: tuple[LayerChange, ...]
    touched: tuple[str, ...]
    warnings: tuple[str, ...]
    state_before: int
    state_after: int
    parameters_before: int
    parameters_after: int
    state_finished: int
    parameters_finished: int
    context: int
    retrieval_bytes: int
    written: bool

    @property
    def chosen_layers(self) -> tuple[int, ...]:
        """The indices of the layers that surgery changed."""
        return tuple(change.layer for change in self.layers if change.chosen)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    def table(self) -> str:
        """Return the table of a dry run: of each layer old and new state and parameters, then totals and warnings.

        Layers that are alike stand in one row.
        """
        header = ("layers", "", "mixer", "state", "new state", "parameters", "new parameters")
        rows = [
            (
                "*" if change.chosen else "",
                _arrow(change.mixer_before, change.mixer_after),
                f"{change.state_before:,}",
                f"{change.state_after:,}",
                f"{change.parameters_before:,}",
                f"{change.parameters_after:,}",
            )
            for change in self.layers
        ]
        total = (
            "total",
            "",
            "(embeddings and head included)",
            f"{self.state_before:,}",
            f"{self.state_after:,}",
            f"{self.parameters_before:,}",
            f"{self.parameters_after:,}",
        )
        lines = aligned([header, *grouped(rows), total], left=3)
        state = _ratio(self.state_after, self.state_before)
        lines.append(f"* {self.method}, {self.init}: state {state}, parameters {self._added():+,}")
        if self.retrieval_bytes:
            kept = f"{self.retrieval_bytes / 1024:,.1f} KiB at {self.context:,} tokens"
            lines.append(f"  retrieval keeps {kept}: their ids, and one vector per chunk and retrieval layer")
        if self.init == "handover":
            finished = _ratio(self.state_finished, self.state_before)
            lines.append(
                f"  once the old path is dropped: state {self.state_finished:,} ({finished}), "
                f"parameters {self.parameters_finished:,}"
            )
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])

    def _added(self) -> int:
        return self.parameters_after - self.parameters_before


def layer_changes(before: ModelAccount, after: ModelAccount, chosen: Sequence[int]) -> tuple[LayerChange, ...]:
    """Pair up the layers of two accounts of the same depth."""
    return tuple(
        LayerChange(
            layer=old.index,
            mixer_before=old.mixer,
            mixer_after=new.mixer,
            sizes_before=old.sizes,
            sizes_after=new.sizes,
            state_before=old.state_size,
            state_after=new.state_size,
            parameters_before=old.parameters,
            parameters_after=new.parameters,
            chosen=old.index in chosen,
        )
        for old, new in zip(before.layers, after.layers, strict=True)
    )


def _arrow(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def _ratio(after: int, before: int) -> str:
    return f"x{after / before:.3g}" if before and after != before else "unchanged"
