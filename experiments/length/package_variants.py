"""Turn weights that experiment.py left into checkpoints that `longrecall` reads (byte tokenizer).

Usage: python -m experiments.length.package_variants FOLDER NAME:SEED ...
FOLDER/NAME-SEED.safetensors becomes the folder FOLDER/NAME-SEED.
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import load_file

from experiments.length.experiment import fresh
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import save


def package(folder: Path, variant: str) -> Path:
    """Write the checkpoint of one variant and return its folder."""
    model, out = fresh(variant), folder / variant.replace(":", "-")
    missing = model.load_state_dict(load_file(f"{out}.safetensors"), strict=False)
    if missing.unexpected_keys or set(missing.missing_keys) - {"lm_head.weight"}:
        raise SystemExit(f"{variant}: {missing}")
    model.tie_weights()
    save(model, out, byte_tokenizer(), force=True)
    return out


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(package(Path(sys.argv[1]), name))
