"""What an export did, or would do: the value that `export_checkpoint` returns and the CLI prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from longrecall.tables import aligned, in_runs
from longrecall.units import format_bytes


@dataclass(frozen=True)
class ExportSummary:
    """An export.

    `padded` lists the layers that got channels which add nothing, as (layer, state_dim before, after). `before` is the
    checkpoint, `after` what is written: parameters, bytes of the weights, bytes of the recurrent state of one sequence
    in float32. `travelling` counts the tensors that were only kept, and are written back. `notes` say what is different
    in the other library. `written` is False for a dry run.
    """

    source: str
    destination: str
    format: str
    padded: tuple[tuple[int, int, int], ...]
    parameters_before: int
    parameters_after: int
    weight_bytes_before: int
    weight_bytes_after: int
    state_bytes_before: int
    state_bytes_after: int
    travelling: int
    notes: tuple[str, ...]
    written: bool

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    def table(self) -> str:
        """Return sizes before and after, the padded layers and the notes."""
        rows = [
            ("", "checkpoint", self.format, "added"),
            ("parameters", *_numbers(self.parameters_before, self.parameters_after)),
            ("weights", *_bytes(self.weight_bytes_before, self.weight_bytes_after)),
            ("state of a sequence", *_bytes(self.state_bytes_before, self.state_bytes_after)),
        ]
        lines = aligned(rows, left=1)
        for old, new in dict.fromkeys((old, new) for _, old, new in self.padded):
            layers = in_runs(layer for layer, *sizes in self.padded if sizes == [old, new])
            lines.append(f"padded with channels that change no answer: state_dim {old} -> {new} in layers {layers}")
        if self.travelling:
            lines.append(
                f"{self.travelling} tensors of parts that longrecall does not run are written back as they were"
            )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _numbers(before: int, after: int) -> tuple[str, str, str]:
    return f"{before:,}", f"{after:,}", f"{after - before:+,}"


def _bytes(before: int, after: int) -> tuple[str, str, str]:
    sign = "+" if after >= before else "-"
    return format_bytes(before), format_bytes(after), f"{sign}{format_bytes(abs(after - before))}"
