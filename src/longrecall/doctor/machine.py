"""What this machine has for longrecall: processors, torch, GPUs, folders of caches, and which kernels run.

It imports torch and touches the GPU's driver. `longrecall doctor` runs it in a process of its own, which may die:
``python -m longrecall.doctor.machine`` prints one JSON object.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from longrecall.errors import first_line
from longrecall.ops.machine import describe_backends, ops_here


def describe_machine() -> dict[str, Any]:
    """Return everything as plain data; what cannot be found out is a reason in words in its place."""
    return {
        "processors": os.cpu_count(),
        "memory_bytes": _memory(),
        "platform": platform.platform(),
        "torch": {
            "version": str(torch.__version__),
            "cuda": torch.version.cuda,
            "threads": torch.get_num_threads(),
        },
        "gpus": _asked(_gpus),
        "why_no_gpu": _asked(_why_no_gpu),
        "backends": _asked(describe_backends),
        "ops": _asked(ops_here),
        "folders": folders(),
    }


def folders() -> list[dict[str, Any]]:
    """Return the folders that longrecall and what it uses write to: what for, where, and whether that works.

    Nothing is created. Of a folder that is not there yet, the nearest one above it is asked.
    """
    places: list[tuple[str, Callable[[], str | Path]]] = [
        ("results, where no other place is named", Path.cwd),
        ("temporary files", tempfile.gettempdir),
        ("checkpoints and tokenizers of the hub", _hub),
        ("data sets of the hub", _datasets),
        ("compiled Triton kernels", _triton),
    ]
    found = []
    for what, ask in places:
        try:
            place = Path(ask())
        except ImportError:
            continue  # what would use it is not installed
        except Exception as error:
            found.append({"what": what, "path": None, "trouble": f"{type(error).__name__}: {first_line(error)}"})
            continue
        found.append({"what": what, "path": str(place), **_state(place)})
    return found


def _state(place: Path) -> dict[str, Any]:
    there = next((folder for folder in (place, *place.parents) if folder.exists()), Path("/"))
    trouble = None
    if not there.is_dir():
        trouble = f"{there} is no folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        trouble = f"{there} cannot be written to"
    elif not os.access(there, os.R_OK):
        trouble = f"{there} cannot be read"
    free = shutil.disk_usage(there).free if there.is_dir() else None
    return {"exists": place.exists(), "free_bytes": free, "trouble": trouble}


def _hub() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _datasets() -> str:
    from datasets import config

    return str(config.HF_DATASETS_CACHE)


def _triton() -> str:
    from triton import knobs

    return str(knobs.cache.dir)


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        found.append({"name": properties.name, "memory_bytes": properties.total_memory, "capability": capability})
    return found


def _why_no_gpu() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:
        return first_line(error)
    return "torch sees no CUDA device"


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # systems that do not tell
        return None


def _asked(ask: Callable[[], Any]) -> Any:
    """What a question gives, or the first line of the error that it raises."""
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"


if __name__ == "__main__":
    print(json.dumps(describe_machine()))
