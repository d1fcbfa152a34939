"""Turn weights that pretrain.py left into the checkpoints that ship in the package (bfloat16, byte tokenizer).

Usage: python -m experiments.pretraining.package_bases mamba2=FOLDER/mamba2_n4_g5-4 gla=FOLDER/gla-1
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from experiments.common.pages import ROOT
from longrecall.models.byte_tokenizer import byte_tokenizer
from longrecall.models.checkpoint import save
from longrecall.models.config import RecurrentConfig
from longrecall.models.recurrent_lm import RecurrentLM

ASSETS = ROOT / "src" / "longrecall" / "assets"


def main() -> None:
    for argument in sys.argv[1:]:
        name, _, source = argument.partition("=")
        model = RecurrentLM(RecurrentConfig.from_dict(json.loads(Path(f"{source}.json").read_text())))
        missing = model.load_state_dict(load_file(f"{source}.safetensors"), strict=False)
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
