"""Stories in words: a sentence per event, the questions of each task, and how an answer in words is judged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from longrecall.tasks.babilong.world import (
    DIRECTIONS,
    PEOPLE,
    PLACES,
    THINGS,
    Draws,
    Event,
    Relation,
    World,
    lay_out,
    simulate,
)

SENTENCES = {
    "move": ("{0.person} went to the {0.place}.", "{0.person} walked to the {0.place}."),
    "take": ("{0.person} took the {0.thing}.", "{0.person} picked up the {0.thing}."),
    "drop": ("{0.person} dropped the {0.thing}.", "{0.person} put down the {0.thing}."),
    "give": ("{0.person} gave the {0.thing} to {0.receiver}.", "{0.person} handed the {0.thing} to {0.receiver}."),
}
"""Kind of event -> its wordings, all equally likely."""
RELATION = "The {0.place} is {0.direction} of the {0.other}."

LABELS: dict[str, tuple[str, ...]] = {
    "qa1": PLACES,
    "qa2": PLACES,
    "qa3": PLACES,
    "qa4": PLACES,
    "qa5": (*PEOPLE, *THINGS),
}
"""Task -> the words that can be an answer."""

FACTS: dict[str, tuple[int, int]] = {"qa1": (2, 10), "qa2": (4, 16), "qa3": (6, 24), "qa4": (2, 2), "qa5": (6, 20)}
"""Task -> fewest and most sentences of a story, unless asked otherwise."""
FEWEST_FACTS = {"qa1": 1, "qa2": 2, "qa3": 3, "qa4": 2, "qa5": 4}
"""What a question needs at least."""
MOST_RELATIONS = 4


class Question(NamedTuple):
    """A question and the one word that answers it."""

    text: str
    answer: str


def tell(draws: Draws, task: str, facts: int, questions: int) -> tuple[list[str], list[Question]]:
    """Return a story of `facts` sentences and `questions` independent questions about how it stands at its end.

    * qa1, one supporting fact: where a person is;
    * qa2, two: where a thing is, held or dropped;
    * qa3, three: where a thing was before it came to a place (for the last time);
    * qa4, two-argument relations: what lies in a direction of a place;
    * qa5, three-argument relations: who gave what to whom (the last time that fits).
    """
    if task == "qa4":
        relations = lay_out(draws, facts)
        story = [RELATION.format(relation) for relation in relations]
        return story, [_ask_direction(draws, relations) for _ in range(questions)]
    events, world = simulate(draws, task, facts)
    ask = {"qa1": _ask_person, "qa2": _ask_thing, "qa3": _ask_before, "qa5": _ask_gift}[task]
    story = [draws.choice(SENTENCES[event.kind]).format(event) for event in events]
    return story, [ask(draws, world) for _ in range(questions)]


def _ask_person(draws: Draws, world: World) -> Question:
    person = draws.choice([person for person in PEOPLE if person in world.place])
    return Question(f"Where is {person}?", world.place[person])


def _ask_thing(draws: Draws, world: World) -> Question:
    thing = draws.choice([thing for thing in THINGS if thing in world.visits])
    return Question(f"Where is the {thing}?", world.visits[thing][-1])


def _ask_before(draws: Draws, world: World) -> Question:
    thing = draws.choice([thing for thing in THINGS if len(world.visits.get(thing, ())) > 1])
    visits = world.visits[thing]
    last = {place: index for index, place in enumerate(visits)}
    place = draws.choice([place for place in PLACES if last.get(place, 0) > 0])
    return Question(f"Where was the {thing} before the {place}?", visits[last[place] - 1])


def _ask_direction(draws: Draws, relations: Sequence[Relation]) -> Question:
    # Both forms ask for the outer place: which relation says where the middle lies can be ambiguous, this cannot.
    middle = next(p for p in PLACES if all(p in (relation.place, relation.other) for relation in relations))
    relation = draws.choice(relations)
    outer, direction = (
        (relation.place, relation.direction)
        if relation.other == middle
        else (relation.other, DIRECTIONS[relation.direction])
    )
    if draws.below(2) == 0:
        return Question(f"What is {direction} of the {middle}?", outer)
    return Question(f"What is the {middle} {DIRECTIONS[direction]} of?", outer)


def _ask_gift(draws: Draws, world: World) -> Question:
    gift, form = draws.choice(world.gifts), draws.below(5)
    given = [g for g in world.gifts if g.thing == gift.thing]
    if form == 0:
        match = [g for g in given if g.receiver == gift.receiver][-1]
        return Question(f"Who gave the {gift.thing} to {gift.receiver}?", match.person)
    if form == 1:
        match = [g for g in world.gifts if (g.person, g.receiver) == (gift.person, gift.receiver)][-1]
        return Question(f"What did {gift.person} give to {gift.receiver}?", match.thing)
    if form == 2:
        match = [g for g in given if g.person == gift.person][-1]
        return Question(f"Who did {gift.person} give the {gift.thing} to?", match.receiver)
    if form == 3:
        return Question(f"Who gave the {gift.thing}?", given[-1].person)
    return Question(f"Who received the {gift.thing}?", given[-1].receiver)


def longest_story(task: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return every sentence and every question that the task can hold, for bounds on their sizes."""
    if task == "qa4":
        relations = [Relation(*parts) for parts in product(PLACES, DIRECTIONS, PLACES)]
        asked = [f"What is {direction} of the {place}?" for place, direction, _ in relations]
        asked += [f"What is the {place} {direction} of?" for place, direction, _ in relations]
        return tuple(RELATION.format(relation) for relation in relations), tuple(dict.fromkeys(asked))
    events = [Event("", *parts) for parts in product(PEOPLE, THINGS, PLACES, PEOPLE)]
    kinds = {"qa1": ("move",), "qa5": ("move", "take", "give")}.get(task, ("move", "take", "drop"))
    forms = {
        "qa1": ("Where is {0.person}?",),
        "qa2": ("Where is the {0.thing}?",),
        "qa3": ("Where was the {0.thing} before the {0.place}?",),
        "qa5": (
            "Who gave the {0.thing} to {0.receiver}?",
            "What did {0.person} give to {0.receiver}?",
            "Who did {0.person} give the {0.thing} to?",
            "Who gave the {0.thing}?",
            "Who received the {0.thing}?",
        ),
    }[task]
    told = [wording.format(event) for kind in kinds for wording in SENTENCES[kind] for event in events]
    return tuple(dict.fromkeys(told)), tuple(dict.fromkeys(form.format(event) for form in forms for event in events))


def judge(task: str, question: str, target: str, said: str) -> bool:
    """Return whether generated text answers the question, by the published rule.

    Of the first sentence that was said, in lower case: `target` must be the only possible answer left once those that
    stand in the question are removed (BABILong, Kuratov et al. 2024). Here a line feed ends a sentence too, as it ends
    an answer in training, and only whole words count.
    """
    labels = {label.lower() for label in LABELS[task]}
    first = re.split(r"[.\n]", said.strip(), maxsplit=1)[0]
    return (_words(first) & labels) - _words(question) == {target.lower()}


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))
