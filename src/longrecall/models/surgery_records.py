"""surgery.json: what was done to a checkpoint. People can edit it, so what is read of it is checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longrecall.errors import UserError
from longrecall.models.limits import check_nesting, read_description_text

SURGERY_FILE = "surgery.json"


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(number, int) for number in value.values())


_RECORD_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "layers": (_is_list_of(int), "a list of layers"),
    "touched": (_is_list_of(str), "a list of tensor names"),
    "state_size": (_is_count, "a mapping of whole numbers"),
    "parameters": (_is_count, "a mapping of whole numbers"),
}
"""What longrecall reads of a surgery record, where it is there: what fits, and what to call it in an error."""


def read_surgery(path: Path) -> list[dict[str, Any]]:
    """Return the records of a surgery.json, oldest first; none without the file.

    Raises:
        UserError: no JSON, no list of records, or a field of a record that does not fit; the file is named.
    """
    if not path.is_file():
        return []
    try:
        records = json.loads(read_description_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error})") from None
    check_nesting(records, str(path))
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise UserError(f"{path} must hold a list of surgery records")
    for index, record in enumerate(records):
        for key, (fits, called) in _RECORD_FIELDS.items():
            if key in record and not fits(record[key]):
                raise UserError(f'{path}: record {index}: "{key}" is {record[key]!r}; it must be {called}')
    return records
