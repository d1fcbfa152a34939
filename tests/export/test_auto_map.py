"""A native checkpoint with code of its own: transformers loads it in a process that never heard of longrecall."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import longrecall
from longrecall.export import export_checkpoint
from longrecall.models.checkpoint import open_checkpoint
from longrecall.models.loading import load

ASSETS = Path(longrecall.__file__).parent / "assets"

CODE = """
import json, sys

import torch
from transformers import AutoModelForCausalLM, pipeline

folder = sys.argv[1]
assert "longrecall" not in sys.modules
# First as if it were not installed.
sys.modules["longrecall"] = None
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
except ImportError as error:
    print(json.dumps(str(error)))
del sys.modules["longrecall"]

model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
ids = torch.arange(20)[None]
print(json.dumps(model(ids).logits[0, -1, :8].tolist()))
print(json.dumps(model.generate(ids, max_new_tokens=4, do_sample=False)[0, 20:].tolist()))
write = pipeline("text-generation", model=folder, trust_remote_code=True, device="cpu")
print(json.dumps(write("The state", max_new_tokens=4, do_sample=False)[0]["generated_text"]))
"""


@pytest.mark.long
def test_merged_heads_and_retrieval_load_with_remote_code(tmp_path: Path) -> None:
    longrecall.expand(ASSETS / "gla-base", tmp_path / "merged", method="merge_heads", layers=[0], init="preserve")
    longrecall.expand(tmp_path / "merged", tmp_path / "big", method="add_retrieval", layers=[1])
    summary = export_checkpoint(tmp_path / "big", tmp_path / "out", "auto_map")
    assert summary.parameters_after == summary.parameters_before
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_longrecall.RecurrentLM"
    assert "trust_remote_code=True" in (tmp_path / "out" / "README.md").read_text()
    # Read natively, the code does not count, and it is not handed on to what is made of the checkpoint.
    assert open_checkpoint(tmp_path / "out").plain == open_checkpoint(tmp_path / "big").plain
    source = str(Path(longrecall.__file__).parents[1])
    environment = os.environ | {"HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": source, "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    missing, logits, tokens, text = map(json.loads, done.stdout.splitlines())
    assert missing.startswith("This checkpoint is a model of the package longrecall, which is not installed here")
    import torch

    model, ids = load(tmp_path / "big", torch.float32), torch.arange(20)[None]
    with torch.no_grad():
        expected = model(ids).logits[0, -1, :8]
    # The same code on the same numbers, in another process: threads may sum in another order.
    torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-5, rtol=0)
    assert tokens == model.generate(ids, max_new_tokens=4, do_sample=False)[0, 20:].tolist()
    assert text.startswith("The state") and len(text) > len("The state")
