"""The README.md of an exported checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longrecall.export.summary import ExportSummary
from longrecall.models.formats.native import surgery_line
from longrecall.version import __version__

_LIBRARIES = {"fla": "fla", "mamba_ssm": "mamba-ssm"}
"""How the names of formats begin -> the library that loads them; transformers for all others."""

_LOADING = {
    "transformers": """from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")""",
    "fla": """import fla  # its models register themselves
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")""",
    "mamba-ssm": """from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

model = MambaLMHeadModel.from_pretrained("path/to/this/folder")""",
}


def exported_card(summary: ExportSummary, architectures: Sequence[str], surgery: Sequence[dict[str, Any]]) -> str:
    """Return the model card of a stock checkpoint: what it is, what was done to it, and how to load it.

    Args:
        summary: of the export.
        architectures: the stock classes that config.json names.
        surgery: the records of surgery.json.
    """
    begins = (library for name, library in _LIBRARIES.items() if summary.format.startswith(name))
    library = next(begins, "transformers")
    done = "\n".join(surgery_line(record) for record in surgery)
    padded = "\n".join(
        f"- layer {layer} was filled up from {old} to {new} channels per group; the new channels change no answer"
        for layer, old, new in summary.padded
    )
    changes = "\n".join(part for part in (done, padded) if part)
    kind = f"a `{architectures[0]}`" if architectures else "a checkpoint"
    return f"""---
library_name: {library}
pipeline_tag: text-generation
tags:
- longrecall
- {summary.format}
---

# Exported by longrecall {__version__}

This is {kind} in the format of {library}: {summary.parameters_after:,} parameters, and a recurrent state of
{summary.state_bytes_after // 4:,} numbers for one sequence. It loads without longrecall.

## What was changed

{changes or "Nothing: every tensor equals that of the exported checkpoint."}

The full record of surgery is in `surgery.json` when there is one.

## Use

```python
{_LOADING[library]}
```

`longrecall export` wrote it, and `longrecall` reads it again.
"""
