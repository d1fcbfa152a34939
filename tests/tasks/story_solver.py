"""Answers from the text alone: a second reading of the stories, which shares nothing with the code that wrote them."""

from __future__ import annotations

import re

NAME, THING, PLACE = (
    "(Alice|Brian|Clara|Simon)",
    "(apple|coin|lantern)",
    "(attic|cellar|garden|kitchen|library|workshop)",
)
SIDES = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
SIDE = f"({'|'.join(SIDES)})"


def facts(text: str) -> list[str]:
    """The lines of `text` that belong to a story, in order."""
    wordings = (
        rf"{NAME} (went|walked) to the {PLACE}\.",
        rf"{NAME} (took|picked up|dropped|put down) the {THING}\.",
        rf"{NAME} (gave|handed) the {THING} to {NAME}\.",
        rf"The {PLACE} is {SIDE} of the {PLACE}\.",
    )
    return [line for line in text.split("\n") if any(re.fullmatch(wording, line) for wording in wordings)]


def solve(text: str, question: str) -> str:
    """The answer to `question` after the story in `text`; fails when the story breaks the world's rules."""
    lines = facts(text)
    if match := re.fullmatch(rf"Where is {NAME}\?", question):
        return whereabouts(lines)[match[1]]
    if match := re.fullmatch(rf"Where is the {THING}\?", question):
        return journeys(lines)[match[1]][-1]
    if match := re.fullmatch(rf"Where was the {THING} before the {PLACE}\?", question):
        journey = journeys(lines)[match[1]]
        latest = max(index for index, place in enumerate(journey) if place == match[2])
        assert latest > 0
        return journey[latest - 1]
    if match := re.fullmatch(rf"What is {SIDE} of the {PLACE}\?", question):
        return neighbour(lines, match[2], SIDES[match[1]])
    if match := re.fullmatch(rf"What is the {PLACE} {SIDE} of\?", question):
        dx, dy = SIDES[match[2]]
        return neighbour(lines, match[1], (-dx, -dy))
    return gift(lines, question)


def whereabouts(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        if match := re.fullmatch(rf"{NAME} \w+ to the {PLACE}\.", line):
            assert found.get(match[1]) != match[2], "moved to where they were"
            found[match[1]] = match[2]
    return found


def journeys(lines: list[str]) -> dict[str, list[str]]:
    """Thing -> the places it was in, told by following every line."""
    at: dict[str, str] = {}
    hands: dict[str, set[str]] = {}
    been: dict[str, list[str]] = {}
    for line in lines:
        who = line.split()[0]
        words = re.findall(r"\w+", line)
        thing = next((word for word in words if re.fullmatch(THING, word)), "")
        if re.search(r" (went|walked) ", line):
            at[who] = words[-1]
            for carried in hands.get(who, set()):
                been[carried].append(words[-1])
        elif re.search(r" (took|picked) ", line):
            assert all(thing not in held for held in hands.values()), "took what is held"
            assert thing not in been or been[thing][-1] == at[who], "took what lies elsewhere"
            hands.setdefault(who, set()).add(thing)
            been.setdefault(thing, [at[who]])
        elif re.search(r" (dropped|put) ", line):
            hands[who].remove(thing)
        else:
            receiver = words[-1]
            assert receiver != who and at[receiver] == at[who], "gave to somebody elsewhere"
            hands[who].remove(thing)
            hands.setdefault(receiver, set()).add(thing)
    return been


def neighbour(lines: list[str], place: str, step: tuple[int, int]) -> str:
    """The only place that lies one `step` from `place`, by the lines read as a map."""
    found = set()
    for line in lines:
        match = re.fullmatch(rf"The {PLACE} is {SIDE} of the {PLACE}\.", line)
        assert match
        dx, dy = SIDES[match[2]]
        if match[3] == place and (dx, dy) == step:
            found.add(match[1])
        if match[1] == place and (-dx, -dy) == step:
            found.add(match[3])
    (only,) = found
    return only


def gift(lines: list[str], question: str) -> str:
    journeys(lines)  # checks the rules
    forms = {
        rf"Who gave the {THING} to {NAME}\?": ((1, 2), 0),
        rf"What did {NAME} give to {NAME}\?": ((0, 2), 1),
        rf"Who did {NAME} give the {THING} to\?": ((0, 1), 2),
        rf"Who gave the {THING}\?": ((1,), 0),
        rf"Who received the {THING}\?": ((1,), 2),
    }
    gifts = [match.groups() for line in lines if (match := re.fullmatch(rf"{NAME} \w+ the {THING} to {NAME}\.", line))]
    for form, (given, wanted) in forms.items():
        if match := re.fullmatch(form, question):
            fitting = [gift for gift in gifts if tuple(gift[place] for place in given) == match.groups()]
            return fitting[-1][wanted]
    raise AssertionError(f"no such question: {question}")
