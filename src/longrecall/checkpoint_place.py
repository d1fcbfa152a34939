"""Where a checkpoint lies that a user has named: a folder here, or the hub. It is known before torch is imported."""

from __future__ import annotations

import re
from pathlib import Path

from longrecall.errors import UserError
from longrecall.files import expand_home

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def local_folder(path_or_hub_id: str | Path) -> Path | None:
    """Return the folder of that name, None for a hub id; an existing path always wins.

    Raises:
        UserError: a file instead of a folder, or neither a folder nor a hub id.
    """
    path = expand_home(path_or_hub_id)
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{path} is a file; a checkpoint is a folder with config.json and model.safetensors")
    if not HUB_ID.fullmatch(str(path_or_hub_id)):
        raise UserError(f"{path_or_hub_id} does not exist; give a checkpoint folder or a hub id such as org/name")
    return None
