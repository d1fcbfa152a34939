"""A small world of people, places and things: what happens in it, and the rules that events keep to.

The types of story are those of the first five bAbI tasks (Weston et al., "Towards AI-Complete Question Answering",
2015). Rules:

* a person goes from place to place, never to where they are; where they are is unknown until they first go somewhere;
* who is somewhere can take a thing that nobody holds, if it was never touched or lies there; held things travel along;
* a held thing can be dropped, or given to another person in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

PEOPLE = ("Alice", "Brian", "Clara", "Simon")
PLACES = ("attic", "cellar", "garden", "kitchen", "library", "workshop")
THINGS = ("apple", "coin", "lantern")
DIRECTIONS = {"north": "south", "south": "north", "east": "west", "west": "east"}
"""Direction -> its opposite."""

_BLOCK = 512
_T = TypeVar("_T")


class Draws:
    """Whole numbers, one at a time, from a generator.

    Doubles are taken in blocks, which is many times faster than one by one. Only `random()` is used: numpy promises its
    bit stream. A generator that was handed over should not be used elsewhere.
    """

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        self._block: list[float] = []

    def below(self, high: int) -> int:
        """Return a number in [0, high), all equally likely."""
        if not self._block:
            self._block = self._generator.random(_BLOCK).tolist()
            self._block.reverse()
        return int(self._block.pop() * high)

    def choice(self, options: Sequence[_T]) -> _T:
        """Return one of `options`, all equally likely."""
        return options[self.below(len(options))]


class Event(NamedTuple):
    """One thing that happens: `kind` is move, take, drop or give; unused fields are empty."""

    kind: str
    person: str
    thing: str = ""
    place: str = ""
    receiver: str = ""


class Relation(NamedTuple):
    """`place` lies to the `direction` of `other`."""

    place: str
    direction: str
    other: str


class World:
    """What is known after the events so far.

    `place`: person -> place; `holder`: thing -> person; `visits`: thing -> the places it has been to, in order, no two
    neighbours equal; `gifts`: the events of giving, in order.
    """

    def __init__(self) -> None:
        self.place: dict[str, str] = {}
        self.holder: dict[str, str] = {}
        self.visits: dict[str, list[str]] = {}
        self.gifts: list[Event] = []

    def apply(self, event: Event) -> None:
        """Let `event` happen; it must keep to the rules."""
        if event.kind == "move":
            self.place[event.person] = event.place
            for thing, holder in self.holder.items():
                if holder == event.person:
                    self.visits[thing].append(event.place)
        elif event.kind == "take":
            self.holder[event.thing] = event.person
            visits = self.visits.setdefault(event.thing, [])
            if not visits:
                visits.append(self.place[event.person])
        elif event.kind == "drop":
            del self.holder[event.thing]
        else:
            self.holder[event.thing] = event.receiver
            self.gifts.append(event)

    def moves(self, people: Sequence[str] = PEOPLE, places: Sequence[str] = PLACES) -> list[Event]:
        """Return every move of `people` to `places` that is possible now."""
        return [
            Event("move", person, place=place)
            for person in people
            for place in places
            if self.place.get(person) != place
        ]

    def takes(self) -> list[Event]:
        """Return every taking that is possible now."""
        return [
            Event("take", person, thing)
            for person in PEOPLE
            if person in self.place
            for thing in THINGS
            if thing not in self.holder and (thing not in self.visits or self.visits[thing][-1] == self.place[person])
        ]

    def drops(self) -> list[Event]:
        """Return every dropping that is possible now."""
        return [Event("drop", self.holder[thing], thing) for thing in THINGS if thing in self.holder]

    def gives(self) -> list[Event]:
        """Return every giving that is possible now."""
        return [
            Event("give", self.holder[thing], thing, receiver=other)
            for thing in THINGS
            if thing in self.holder
            for other in PEOPLE
            if other != self.holder[thing] and self.place.get(other) == self.place[self.holder[thing]]
        ]


_MIX = {
    "qa1": ("move",),
    "qa2": ("move", "move", "move", "take", "take", "drop"),
    "qa3": ("move", "move", "move", "take", "take", "drop"),
    "qa5": ("move", "move", "take", "take", "give", "give", "give"),
}
"""What happens next, all entries equally likely; where it is impossible, somebody moves."""


def _missing(world: World, task: str) -> tuple[int, list[Event]]:
    """Return how many events are missing until the task has a question, and the events that bring it one closer.

    Before that nothing is dropped, so what is missing grows by one at most, when a holder leaves the only company.
    """
    if task == "qa1":
        return (0, []) if world.place else (1, world.moves())
    ready = {
        "qa2": bool(world.visits),
        "qa3": any(len(visits) > 1 for visits in world.visits.values()),
        "qa5": bool(world.gifts),
    }[task]
    if ready:
        return 0, []
    steps = {"qa2": 0, "qa3": 1, "qa5": 2}[task]
    if not world.place:
        return steps + 2, world.moves()
    holders = sorted(set(world.holder.values()))
    if not holders:
        return steps + 1, world.takes()
    if task == "qa3":
        return 1, world.moves(holders)
    gives = world.gives()
    if gives:
        return 1, gives
    others = [person for person in PEOPLE if person not in holders]
    return 2, world.moves(others, [world.place[holders[0]]])


def simulate(draws: Draws, task: str, count: int) -> tuple[list[Event], World]:
    """Return `count` events of qa1, qa2, qa3 or qa5 after which the task has a question, and the world after them."""
    world, events = World(), []
    for left in range(count, 0, -1):
        missing, helpful = _missing(world, task)
        if missing and left <= missing + 1:
            possible = helpful
        else:
            possible = _possible(world, draws.choice(_MIX[task]), undo=not missing)
        events.append(draws.choice(possible))
        world.apply(events[-1])
    return events, world


def _possible(world: World, kind: str, undo: bool) -> list[Event]:
    found: list[Event] = []
    if kind == "take":
        found = world.takes()
    elif kind == "give":
        found = world.gives()
    elif kind == "drop" and undo:
        found = world.drops()
    return found or world.moves()


def lay_out(draws: Draws, count: int) -> list[Relation]:
    """Return `count` (1 to 4) relations of qa4: places around one, each in a direction of its own, said either way."""
    places, directions = list(PLACES), list(DIRECTIONS)
    centre = places.pop(draws.below(len(places)))
    relations = []
    for _ in range(count):
        place = places.pop(draws.below(len(places)))
        direction = directions.pop(draws.below(len(directions)))
        forth = draws.below(2) == 0
        relations.append(
            Relation(place, direction, centre) if forth else Relation(centre, DIRECTIONS[direction], place)
        )
    return relations
