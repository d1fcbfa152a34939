"""Turn the weights that pretrain.py left into the two checkpoints that ship in the package (bfloat16, byte tokenizer).

Usage: python experiments/package_bases.py FOLDER_OF_PRETRAIN
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import save
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM

ASSETS = Path(__file__).parent.parent / "src" / "longrecall" / "assets"


def main() -> None:
    source = Path(sys.argv[1])
    for name in ("gla", "mamba2"):
        model = RecurrentLM(RecurrentConfig.from_dict(json.loads((source / f"{name}.json").read_text())))
        missing = model.load_state_dict(load_file(source / f"{name}.safetensors"), strict=False)
        if missing.unexpected_keys or set(missing.missing_keys) - {"lm_head.weight"}:
            raise SystemExit(f"{name}: {missing}")
        model.tie_weights()
        folder = ASSETS / f"{name}-base"
        # The card in the repository was written by hand; `save` would put a generated one in its place.
        card = (folder / "README.md").read_text() if folder.exists() else None
        save(model.to(torch.bfloat16), folder, byte_tokenizer(), force=True)
        if card is not None:
            (folder / "README.md").write_text(card)


if __name__ == "__main__":
    main()
