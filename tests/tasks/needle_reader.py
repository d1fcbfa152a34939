"""An independent reader of needle prompts: what is hidden, what is asked, and what the right answer is."""

from __future__ import annotations

import re
from dataclasses import dataclass

NEEDLE = r"One of the special magic (numbers|uuids) for ([a-z0-9-]+) is: ([a-z0-9-]+)\."
BEGIN = re.compile(
    r"(?:A special magic (?P<one>number|uuid) is|Some special magic (?P<many>numbers|uuids) are) hidden within the "
    r"following text\. Make sure to memorize it\. I will quiz you about the (?P<name>[a-z]+) afterwards\.\n"
)
END = re.compile(
    r"\nWhat (?:is|are all) the special magic (?P<type>[a-z]+) for (?P<keys>[^\n]*?) mentioned in the provided text\? "
    r"The special magic (?P=type) for (?P=keys) mentioned in the provided text (?P<last>is|are) "
    r"(?P<answer>[a-z0-9, -]+)$"
)


@dataclass(frozen=True)
class Reading:
    """`hidden`: (key, value) in the order of the text; `body` with needles, `rest` without them."""

    hidden: list[tuple[str, str]]
    asked: list[str]
    answer: list[str]
    plural: bool
    body: str
    rest: str


def read(text: str) -> Reading:
    """Parse a prompt with its answer; fails where the wording is not RULER's."""
    begin, end = BEGIN.match(text), END.search(text)
    assert begin and end, text
    plural = end["last"] == "are"
    assert bool(begin["many"]) == plural
    assert end["type"] == begin["name"] == (begin["many"] if plural else begin["one"])
    body = text[begin.end() : end.start()]
    hidden = [(match[1], match[2]) for match in re.findall(NEEDLE, body)]
    asked = re.split(r", and |, ", end["keys"])
    assert end["keys"] == (asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}")
    assert body == body.strip()
    rest = re.sub(rf" ?{NEEDLE}[\n]?", "", body).strip(" ")
    return Reading(hidden, asked, end["answer"].split(", "), plural, body, rest)
