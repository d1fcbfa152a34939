"""What answers at once must not import torch: it takes seconds. Modules are counted, not times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import longrecall
from longrecall.cli.main import VERBS

ROOT = Path(__file__).parents[2]
ASSETS = Path(longrecall.__file__).parent / "assets"
HEAVY = ("torch", "transformers", "triton", "scipy", "pandas", "sklearn", "accelerate", "datasets", "lm_eval")
CODE = """
import contextlib, io, json, sys
from longrecall.cli.main import main

runs, expected, forbidden = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
for words in runs:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    assert code == expected and (out if code == 0 else err).getvalue(), words
    found = sorted(set(forbidden) & sys.modules.keys())
    assert not found, f"{words} imports {found}"
"""


def check(runs: list[list[str]], forbidden: tuple[str, ...], expected: int = 0) -> None:
    words = [sys.executable, "-c", CODE, json.dumps(runs), str(expected), *forbidden]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_imports_nothing_heavy() -> None:
    helps = [[verb, "--help"] for verb in VERBS if verb != "eval"]
    check([["--help"], ["--version"], *helps], (*HEAVY, "numpy", "safetensors"))
    # Its flags are those that the tasks declare in their own files, which make samples with numpy.
    check([["eval", "--help"], ["eval", "--list-suites"]], (*HEAVY, "safetensors"))


def test_info_and_compare_need_no_torch() -> None:
    description = ROOT / "recipes" / "configs" / "gated_delta_net_400m_e8.json"
    results = [f"experiments/results/demo/{name}.json" for name in ("before", "after")]
    check(
        [
            *(["info", str(ASSETS / name)] for name in ("gla-base", "mamba2-base")),
            ["info", str(description), "--json"],
            ["compare", *results],
            ["eval", "--harness-path"],
        ],
        HEAVY,
    )


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    results = [f"experiments/results/{name}.json" for name in ("demo/before", "demo/after", "mad_baseline")]
    check([["report", *results, "-o", str(tmp_path / "page.html")]], HEAVY)


def test_a_checkpoint_that_is_not_there_needs_no_torch() -> None:
    check(
        [
            ["eval", "nowhere"],
            ["diagnose", "nowhere", "--text", "README.md"],
            ["generate", "nowhere", "--prompt", "Once"],
            ["bench", "nowhere"],
            ["serve", "nowhere"],
            ["expand", "nowhere", "out", "--method", "grow_state"],
            ["export", "nowhere", "out", "--to", "transformers_mamba2"],
            ["train", "recipes/post_train.yaml", "--set", "model.checkpoint=nowhere"],
        ],
        HEAVY,
        expected=2,
    )
