"""From a checkpoint to one that the tools of others load: stock formats, or ours with code that finds longrecall."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longrecall.late_names import late_names

if TYPE_CHECKING:
    from longrecall.export.exporting import export_checkpoint
    from longrecall.export.summary import ExportSummary

__all__ = ["ExportSummary", "export_checkpoint"]

_HOMES = {"ExportSummary": "longrecall.export.summary", "export_checkpoint": "longrecall.export.exporting"}

__getattr__ = late_names(__name__, _HOMES)
