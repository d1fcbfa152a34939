"""What the commands that train share: their first options, and the head of the file that they write."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from longrecall.version import __version__


def training_parser(about: str | None) -> argparse.ArgumentParser:
    """A parser with the texts to train on and to measure on, and the place of the results."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="books to train on")
    parser.add_argument("--validation", type=Path, required=True, help="books that are not trained on")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Options of the commands whose batches come from processes of their own."""
    parser.add_argument("--compiled", action="store_true", help="fuse the layers: twice as fast, a slower start")
    parser.add_argument("--workers", type=int, default=12, help="processes that make batches")


def add_budget(parser: argparse.ArgumentParser, steps: int) -> None:
    """Options of the commands whose training ends with the steps or with the time (`from_scratch.trained`)."""
    parser.add_argument("--tiny", action="store_true", help="sizes for a test: nothing is learned")
    parser.add_argument("--steps", type=int, default=steps, help="at most")
    parser.add_argument("--seconds", type=float, default=1e9, help="of training; as many steps as fit")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after the start when training ends")


def provenance(settings: Mapping[str, Any]) -> dict[str, Any]:
    """When, on what and with what; `settings` without paths and without what changes no number."""
    triton = None
    if torch.cuda.is_available() and find_spec("triton"):
        import triton as installed

        triton = installed.__version__
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "longrecall": __version__,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "triton": triton,
        "transformers": transformers.__version__,
        "settings": {key: value for key, value in settings.items() if key != "workers" and not isinstance(value, Path)},
    }
