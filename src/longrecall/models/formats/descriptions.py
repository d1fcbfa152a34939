"""What is read whole of a checkpoint, and so has a limit: JSON files and the headers of safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longrecall.errors import UserError
from longrecall.models.limits import DESCRIPTION_BYTES, check_nesting, read_description_text
from longrecall.units import format_bytes


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; UserError when the file is missing, empty, not UTF-8, not JSON or not an object."""
    try:
        text = read_description_text(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; a checkpoint folder needs it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        raise UserError(f"{path} is not valid JSON ({error}); the file may be empty or damaged") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}")
    check_nesting(value, str(path))
    return value


def check_header(path: Path) -> None:
    """Raise UserError when the header of a safetensors file, which is read whole, is larger than any model's."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if DESCRIPTION_BYTES < size < path.stat().st_size:
        raise UserError(
            f"{path} has a header of {format_bytes(size)}; longrecall reads at most {format_bytes(DESCRIPTION_BYTES)}"
        )
