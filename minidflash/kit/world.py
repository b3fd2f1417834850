"""The little world: endless seeded text with right answers, in three kinds.

*maths* is a word problem and numbered steps that compute. *code* is a task, a small function, and
a call with its true result: the function is really run to get it, and where it has to decide or to
add, a comment does so step by step (kit/looks.py). *chat* is a JSON record and the
same facts in words. The prompt is random. The answer of maths and code follows from it; that of
chat may be told in three voices, so that temperature matters.

The text is the same on every Python. The only source of chance is `random.Random(seed).random()`,
whose sequence the language guarantees, and no set order or `hash()` plays a part.
"""

import ast
import functools
import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from minidflash.kit.looks import looks, without_looks

T = TypeVar("T")
KINDS = ("maths", "code", "chat")
SPLITS = ("train", "held_out")
END = "<|endoftext|>"
HELD_OUT_BUCKETS = 50  # one prompt in fifty belongs to the held-out split, whatever the seed

NAMES = (
    "Ana Emil Ivan Mia Tom Lea Omar Nina Paul Sara Leo Eva Max Ida Jonas Clara Hugo"
    " Lina Felix Zoe Karl Maya Oskar Rosa"
    " Adam Vera Noah Ella Samir Greta Pedro Alma Viktor Iris Bruno Tessa"
).split()
CITIES = (
    "Bonn Paris Rome Oslo Lima Delhi Cairo Porto Turin Kyoto Lagos Quito Perth Leeds"
    " Vienna Prague Dublin Madrid Lisbon"
    " Athens Berlin Havana Nairobi Geneva Milan Boston Seoul Tunis Basel Ghent Malmo Riga"
).split()
THINGS = (
    "apples cards marbles pens coins oranges books stamps shells stones pears plums"
    " lemons eggs buttons stickers flowers"
    " balls candles tickets cups hats keys pencils ribbons beads nuts melons carrots"
    " muffins kites lamps"
).split()
BOXES = "boxes bags baskets jars trays packets".split()
JOBS = (
    "farmer baker teacher doctor painter driver nurse singer lawyer tailor pilot cook dancer"
    " gardener"
).split()
ANIMALS = "cat dog rabbit parrot horse goat hamster turtle duck donkey mouse lizard".split()
COLOURS = "red blue green yellow white black brown grey purple golden".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
SKIES = "sunny rainy cloudy windy foggy stormy snowy clear".split()
TITLE_FIRST = "Silver Hidden Broken Quiet Golden Distant Frozen Secret Burning Lonely".split()
TITLE_LAST = "Garden River Castle Island Mirror Forest Bridge Harbour Tower Valley".split()
TOPICS = "music history chess gardening sailing cooking physics poetry painting football".split()
ROOMS = "library kitchen gym hall studio cellar office garage".split()
VEHICLES = "train bus car ferry bike plane".split()
SPORTS = "tennis hockey rugby volleyball handball badminton".split()
WORDS = (
    "sun moon star tree leaf bird fish river stone cloud rain snow wind fire bread"
    " milk apple lemon table chair house door"
    " lamp book paper music green water garden bridge"
).split()
NOUNS = "values numbers scores prices ages sizes points weights".split()


@dataclass(frozen=True)
class Document:
    """One text of the world.

    Attributes:
        kind: "maths", "code" or "chat".
        form: which of the kind's forms it is, such as "change".
        prompt: everything up to and including the cue "Answer:", "Python:" or "In words:".
        answer: a right continuation; it starts with a newline and holds no end token.
        wordings: of chat, for each sentence all wordings that are right; else empty.
    """

    kind: str
    form: str
    prompt: str
    answer: str
    wordings: tuple[tuple[str, ...], ...] = field(default=(), repr=False)

    @property
    def text(self) -> str:
        """The whole document: prompt and answer."""
        return self.prompt + self.answer


class Dice:
    """Chance from one seed, through `random()` alone, so that every Python throws the same."""

    def __init__(self, seed: str) -> None:
        """Start the sequence that belongs to the text `seed`."""
        self.random = random.Random(
            int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big")
        ).random

    def number(self, low: int, high: int) -> int:
        """A whole number in low ... high, both ends included."""
        return low + int(self.random() * (high - low + 1))

    def choice(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[int(self.random() * len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different items, in random order."""
        rest = list(items)
        return [rest.pop(int(self.random() * len(rest))) for _ in range(count)]


# -------------------------------------------------------------------------------------------------
# maths: each form returns (wordings of the question, steps, answer)

Maths = tuple[list[str], list[str], int]


def _more(d: Dice) -> Maths:
    n, t, a, b = d.choice(NAMES), d.choice(THINGS), d.number(3, 60), d.number(2, 20)
    verb, past = d.choice(
        (("buys", "bought"), ("finds", "found"), ("wins", "won"), ("picks", "picked"))
    )
    asks = [
        f"{n} has {a} {t} and {verb} {b} more. How many {t} does {n} have now?",
        f"At first {n} has {a} {t}. Then {n} {verb} {b} more. How many {t} is that in all?",
        f"{n} {past} {b} {t} and already had {a}. How many {t} does {n} have now?",
    ]
    steps = [
        f"At first {n} has {a} {t}.",
        f"Then come {b} more, so {a} + {b} = {a + b}.",
        f"Now {n} has {a + b} {t}.",
    ]
    return asks, steps, a + b


def _fewer(d: Dice) -> Maths:
    (n, m), t, a = d.sample(NAMES, 2), d.choice(THINGS), d.number(12, 70)
    b = d.number(2, min(20, a - 2))
    asks = [
        f"{n} has {a} {t} and gives {b} of them to {m}. How many {t} does {n} have left?",
        f"{n} had {a} {t}, but {m} took {b}. How many {t} are left for {n}?",
        f"Out of {a} {t}, {n} hands {b} to {m}. How many {t} does {n} keep?",
    ]
    steps = [
        f"{n} starts with {a} {t}.",
        f"{m} gets {b}, so {a} - {b} = {a - b}.",
        f"{n} still has {a - b} {t}.",
    ]
    return asks, steps, a - b


def _two_kinds(d: Dice) -> Maths:
    n, (t, u), a, b, c = (
        d.choice(NAMES),
        d.sample(THINGS, 2),
        d.number(3, 40),
        d.number(2, 20),
        d.number(2, 20),
    )
    asks = [
        f"{n} has {a} {t} and {b} {u}. {n} finds {c} more {t}. How many {t} and "
        f"{u} are there now in all?",
        f"In a drawer {n} keeps {a} {t} and {b} {u}, and then adds {c} {t}. How many "
        f"things are in the drawer?",
        f"{n} counts {a} {t}, {b} {u} and then another {c} {t}. How many does {n} count in all?",
    ]
    steps = [
        f"First there are {a} + {b} = {a + b} {t} and {u}.",
        f"{n} gets {c} more {t}, so {a + b} + {c} = {a + b + c}.",
        f"In all there are {a + b + c} {t} and {u}.",
    ]
    return asks, steps, a + b + c


def _boxes(d: Dice) -> Maths:
    n, t, box = d.choice(NAMES), d.choice(THINGS), d.choice(BOXES)
    a, b, c = d.number(2, 9), d.number(2, 9), d.number(2, 19)
    asks = [
        f"{n} has {a} {box} with {b} {t} in each, and {c} loose {t}. How many {t} does {n} have?",
        f"There are {a} {box} of {b} {t} and {c} single {t} on the table of "
        f"{n}. How many {t} are there?",
        f"{n} fills {a} {box} with {b} {t} each and has {c} {t} over. How many {t} were there?",
    ]
    steps = [
        f"The {a} {box} hold {a} * {b} = {a * b} {t}.",
        f"With the other {c} that makes {a * b} + {c} = {a * b + c}.",
        f"So {n} has {a * b + c} {t}.",
    ]
    return asks, steps, a * b + c


def _share(d: Dice) -> Maths:
    n, t, a, b, c = (
        d.choice(NAMES),
        d.choice(THINGS),
        d.number(2, 10),
        d.number(2, 10),
        d.number(2, 9),
    )
    asks = [
        f"{n} shares {a * b} {t} equally among {a} friends. Each friend already had {c}. How "
        f"many {t} has each friend now?",
        f"{a} friends of {n} had {c} {t} each. Now they split {a * b} more {t} evenly. "
        f"How many {t} has each one?",
        f"{n} deals {a * b} {t} fairly to {a} friends, who each owned {c} before. How many "
        f"{t} does each friend own now?",
    ]
    steps = [
        f"Each friend gets {a * b} / {a} = {b} {t}.",
        f"Each had {c} before, so {c} + {b} = {c + b}.",
        f"Now every friend of {n} has {c + b} {t}.",
    ]
    return asks, steps, c + b


def _change(d: Dice) -> Maths:
    n, t, a, b = d.choice(NAMES), d.choice(THINGS), d.number(2, 9), d.number(2, 9)
    cost = a * b
    note = d.choice([x for x in (20, 50, 100) if x > cost + 1])
    asks = [
        f"{n} buys {a} {t} for {b} euros each and pays with {note} euros. How "
        f"much change does {n} get?",
        f"One of the {t} costs {b} euros. {n} takes {a} and gives the seller {note} "
        f"euros. How many euros come back?",
        f"With {note} euros {n} goes out and buys {a} {t} at {b} euros a piece. "
        f"How many euros are left?",
    ]
    steps = [
        f"The {t} cost {a} * {b} = {cost} euros.",
        f"{n} paid {note}, so {note} - {cost} = {note - cost}.",
        f"{n} has {note - cost} euros left.",
    ]
    return asks, steps, note - cost


def _age(d: Dice) -> Maths:
    (n, m), a, b, c = d.sample(NAMES, 2), d.number(5, 50), d.number(2, 19), d.number(2, 9)
    asks = [
        f"{n} is {a} years old. {m} is {b} years older. How old will {m} be in {c} years?",
        f"{m} is {b} years older than {n}, who is {a}. What is the age of "
        f"{m} after {c} more years?",
        f"Today {n} turns {a}, and {m} was born {b} years before {n}. How old is "
        f"{m} {c} years from today?",
    ]
    steps = [
        f"{m} is older than {n}: {a} + {b} = {a + b} years.",
        f"After {c} years that is {a + b} + {c} = {a + b + c}.",
        f"Then {m} will be {a + b + c} years old.",
    ]
    return asks, steps, a + b + c


def _together(d: Dice) -> Maths:
    (n, m), t, a, b = d.sample(NAMES, 2), d.choice(THINGS), d.number(3, 30), d.number(2, 19)
    asks = [
        f"{n} has {a} {t}. {m} has {b} more than {n}. How many {t} do they have together?",
        f"{m} owns {b} {t} more than {n}, and {n} owns {a}. How many {t} do both own in all?",
        f"If {n} holds {a} {t} and {m} holds {b} more {t} than that, how many {t} do the two hold?",
    ]
    steps = [
        f"{m} has {a} + {b} = {a + b} {t}.",
        f"Together they have {a} + {a + b} = {a + a + b}.",
        f"So {n} and {m} have {a + a + b} {t}.",
    ]
    return asks, steps, a + a + b


def _times(d: Dice) -> Maths:
    (n, m), t, a, b = d.sample(NAMES, 2), d.choice(THINGS), d.number(2, 10), d.number(2, 6)
    asks = [
        f"{n} has {a} {t}. {m} has {b} times as many. How many {t} do {n} and {m} have together?",
        f"{m} collects {b} times as many {t} as {n}, who collects {a}. How many "
        f"{t} do the two have in all?",
        f"If {n} owns {a} {t} and {m} owns {b} times that number, how many {t} do they own?",
    ]
    steps = [
        f"{m} has {b} times {a}, so {b} * {a} = {a * b} {t}.",
        f"With the {a} of {n} that makes {a * b} + {a} = {a * b + a}.",
        f"The two of them have {a * b + a} {t}.",
    ]
    return asks, steps, a * b + a


def _bus(d: Dice) -> Maths:
    city, v, a = d.choice(CITIES), d.choice(("bus", "train", "tram", "ferry")), d.number(12, 60)
    b, c = d.number(2, min(20, a - 2)), d.number(2, 20)
    asks = [
        f"A {v} carries {a} people. In {city} {b} get off and {c} get on. How many "
        f"people are on the {v} now?",
        f"On a {v} to {city} there are {a} people. On arrival {b} leave and {c} "
        f"enter. How many are on board?",
        f"When the {v} stops in {city}, {b} of its {a} people get off and {c} new "
        f"ones get on. How many ride on?",
    ]
    steps = [
        f"In {city} {b} leave the {v}, so {a} - {b} = {a - b}.",
        f"Then {c} people get on: {a - b} + {c} = {a - b + c}.",
        f"Now the {v} carries {a - b + c} people.",
    ]
    return asks, steps, a - b + c


def _ride(d: Dice) -> Maths:
    n, city, a, b, c = (
        d.choice(NAMES),
        d.choice(CITIES),
        d.number(2, 10),
        d.number(2, 9),
        d.number(2, 19),
    )
    asks = [
        f"{n} rides {a} km an hour for {b} hours and then walks {c} km to {city}. "
        f"How many km is the whole way?",
        f"On the way to {city}, {n} travels {b} hours at {a} km an hour and then "
        f"{c} km more. How far is it?",
        f"{n} goes to {city}: first {b} hours at {a} km an hour, then the last "
        f"{c} km. How many km is that?",
    ]
    steps = [
        f"In {b} hours {n} covers {b} * {a} = {a * b} km.",
        f"The last part adds {c}, so {a * b} + {c} = {a * b + c}.",
        f"The way to {city} is {a * b + c} km long.",
    ]
    return asks, steps, a * b + c


def _fence(d: Dice) -> Maths:
    n, a, b = d.choice(NAMES), d.number(3, 25), d.number(2, 15)
    place = d.choice(("garden", "field", "yard", "park", "meadow"))
    asks = [
        f"The {place} of {n} is {a} m long and {b} m wide. How many m of fence go around it?",
        f"{n} walks once around a {place} that is {a} m by {b} m. How many m does {n} walk?",
        f"How long is a fence around the {place} of {n}, with sides of {a} m and {b} m?",
    ]
    steps = [
        f"One long and one short side are {a} + {b} = {a + b} m.",
        f"The {place} has both twice, so {a + b} + {a + b} = {2 * (a + b)}.",
        f"Around the {place} of {n} it is {2 * (a + b)} m.",
    ]
    return asks, steps, 2 * (a + b)


def _pages(d: Dice) -> Maths:
    n, (x, y), a, b = d.choice(NAMES), d.sample(DAYS, 2), d.number(2, 20), d.number(2, 20)
    total = a + b + d.number(2, 40)
    asks = [
        f"A book has {total} pages. {n} reads {a} on {x} and {b} on {y}. How many pages are left?",
        f"{n} has a book of {total} pages and reads {a} pages on {x}, then {b} "
        f"on {y}. How many remain?",
        f"On {x} {n} reads {a} pages and on {y} {b} pages of a book with {total}. How "
        f"many pages are still to read?",
    ]
    steps = [
        f"After {x} there are {total} - {a} = {total - a} pages left.",
        f"On {y} it goes down by {b}, so {total - a} - {b} = {total - a - b}.",
        f"{n} still has {total - a - b} pages to read.",
    ]
    return asks, steps, total - a - b


def _sales(d: Dice) -> Maths:
    n, t, (x, y), a, b = (
        d.choice(NAMES),
        d.choice(THINGS),
        d.sample(DAYS, 2),
        d.number(12, 40),
        d.number(2, 10),
    )
    asks = [
        f"On {x} {n} sells {a} {t}, on {y} {b} fewer. How many {t} does {n} sell on both days?",
        f"{n} sold {a} {t} on {x} and {b} fewer {t} on {y}. How many were sold in the two days?",
        f"The shop of {n} sells {a} {t} on {x}. On {y} it sells {b} less. How "
        f"many {t} is that in all?",
    ]
    steps = [
        f"On {y} {n} sells {a} - {b} = {a - b} {t}.",
        f"Both days give {a} + {a - b} = {a + a - b}.",
        f"From {x} and {y} that is {a + a - b} {t}.",
    ]
    return asks, steps, a + a - b


def _saving(d: Dice) -> Maths:
    n, t, a, b = d.choice(NAMES), d.choice(THINGS), d.number(2, 10), d.number(2, 9)
    c = d.number(2, min(20, a * b - 2))
    asks = [
        f"{n} saves {a} euros a week for {b} weeks and spends {c} euros on "
        f"{t}. How many euros remain?",
        f"Each week {n} puts {a} euros aside. After {b} weeks {n} buys {t} for "
        f"{c} euros. How much is left?",
        f"For {b} weeks {n} earns {a} euros each week, then pays {c} euros for {t}. "
        f"How many euros does {n} keep?",
    ]
    steps = [
        f"In {b} weeks {n} gets {b} * {a} = {a * b} euros.",
        f"The {t} cost {c}, so {a * b} - {c} = {a * b - c}.",
        f"That leaves {n} with {a * b - c} euros.",
    ]
    return asks, steps, a * b - c


def _before(d: Dice) -> Maths:
    n, t, a, b = d.choice(NAMES), d.choice(THINGS), d.number(3, 60), d.number(2, 20)
    asks = [
        f"{n} got {b} new {t} and has {a + b} now. How many {t} did {n} have before?",
        f"After buying {b} {t}, {n} has {a + b} of them. How many {t} were there at the start?",
        f"{n} counts {a + b} {t}, and {b} of them are new. How many {t} are old?",
    ]
    steps = [
        f"Now {n} has {a + b} {t}.",
        f"Without the {b} new ones it is {a + b} - {b} = {a}.",
        f"So before that there were {a} {t}.",
    ]
    return asks, steps, a


# -------------------------------------------------------------------------------------------------
# code: each form returns (names, what the function does in several wordings, parameters, docstring,
# body, arguments)

Code = tuple[list[str], list[str], str, str, list[str], list[Any]]


def _numbers(d: Dice, low: int = 1, high: int = 30, least: int = 3, most: int = 5) -> list[int]:
    return [d.number(low, high) for _ in range(d.number(least, most))]


def _noun(d: Dice) -> tuple[str, str]:
    plural = d.choice(NOUNS)
    return plural, plural[:-1]


def _keep_odd(d: Dice) -> Code:
    s, v = _noun(d)
    return (
        ["keep_odd", "only_odd", "odd_ones", "pick_odd"],
        [f"returns only the odd {s}", f"drops all even {s}", f"keeps the {s} that are odd"],
        s,
        f"Return only the odd {s}.",
        [
            "result = []",
            f"for {v} in {s}:",
            f"    if {v} % 2 == 1:",
            f"        result.append({v})",
            "return result",
        ],
        [_numbers(d)],
    )


def _keep_even(d: Dice) -> Code:
    s, v = _noun(d)
    return (
        ["keep_even", "only_even", "even_ones", "pick_even"],
        [f"returns only the even {s}", f"drops all odd {s}", f"keeps the {s} that are even"],
        s,
        f"Return only the even {s}.",
        [f"return [{v} for {v} in {s} if {v} % 2 == 0]"],
        [_numbers(d)],
    )


def _keep_above(d: Dice) -> Code:
    s, v = _noun(d)
    return (
        ["keep_above", "larger_than", "over_limit", "high_ones"],
        [
            f"returns the {s} above a limit",
            f"keeps only {s} greater than a limit",
            f"drops all {s} up to a limit",
        ],
        f"{s}, limit",
        f"Return the {s} above the limit.",
        [
            "result = []",
            f"for {v} in {s}:",
            f"    if {v} > limit:",
            f"        result.append({v})",
            "return result",
        ],
        [_numbers(d), d.number(5, 25)],
    )


def _keep_below(d: Dice) -> Code:
    s, v = _noun(d)
    return (
        ["keep_below", "smaller_than", "under_limit", "low_ones"],
        [
            f"returns the {s} below a limit",
            f"keeps only {s} less than a limit",
            f"lists the {s} under a limit",
        ],
        f"{s}, limit",
        f"Return the {s} below the limit.",
        [f"return [{v} for {v} in {s} if {v} < limit]"],
        [_numbers(d), d.number(5, 25)],
    )


def _add_each(d: Dice) -> Code:
    s, v = _noun(d)
    k = d.number(2, 9)
    return (
        ["add_to_each", "raise_all", "shift_up", "increase"],
        [
            f"adds {k} to each of the {s}",
            f"makes all {s} larger by {k}",
            f"returns the {s} plus {k}",
        ],
        s,
        f"Add {k} to each of the {s}.",
        ["result = []", f"for {v} in {s}:", f"    result.append({v} + {k})", "return result"],
        [_numbers(d)],
    )


def _times_each(d: Dice) -> Code:
    s, v = _noun(d)
    k = d.number(2, 9)
    return (
        ["scale", "multiply_all", "times_each", "grow"],
        [
            f"multiplies each of the {s} by {k}",
            f"makes all {s} {k} times as large",
            f"returns {k} times the {s}",
        ],
        s,
        f"Multiply each of the {s} by {k}.",
        [f"return [{v} * {k} for {v} in {s}]"],
        [_numbers(d, 1, 10)],
    )


def _total(d: Dice) -> Code:
    s, v = _noun(d)
    return (
        ["total", "add_up", "sum_of", "sum_all"],
        [f"adds up all the {s}", f"returns the sum of the {s}", f"gives the total of the {s}"],
        s,
        f"Return the sum of the {s}.",
        ["total = 0", f"for {v} in {s}:", f"    total = total + {v}", "return total"],
        [_numbers(d, 1, 6, 3, 3)],
    )


def _running(d: Dice) -> Code:
    s, v = _noun(d)
    return (
        ["running_total", "sums_so_far", "build_up", "cumulate"],
        [
            f"returns the running totals of the {s}",
            f"lists the sums of the {s} so far",
            f"adds the {s} up step by step",
        ],
        s,
        f"List the sums of the {s} so far.",
        [
            "total, result = 0, []",
            f"for {v} in {s}:",
            f"    total += {v}",
            "    result.append(total)",
            "return result",
        ],
        [_numbers(d, 1, 9, 3, 4)],
    )


def _largest(d: Dice) -> Code:
    s, v = _noun(d)
    return (
        ["largest", "biggest", "find_max", "top"],
        [
            f"returns the largest of the {s}",
            f"finds the biggest of all {s}",
            f"picks the highest of the {s}",
        ],
        s,
        f"Return the largest of the {s}.",
        [
            f"best = {s}[0]",
            f"for {v} in {s}:",
            f"    if {v} > best:",
            f"        best = {v}",
            "return best",
        ],
        [_numbers(d, 1, 30, 3, 4)],
    )


def _smallest(d: Dice) -> Code:
    s, v = _noun(d)
    return (
        ["smallest", "lowest", "find_min", "least"],
        [
            f"returns the smallest of the {s}",
            f"finds the least of all {s}",
            f"picks the lowest of the {s}",
        ],
        s,
        f"Return the smallest of the {s}.",
        [f"best = {s}[0]", f"for {v} in {s}[1:]:", f"    best = min(best, {v})", "return best"],
        [_numbers(d, 1, 30, 3, 4)],
    )


def _count_above(d: Dice) -> Code:
    s, v = _noun(d)
    return (
        ["count_above", "how_many_over", "count_high", "number_above"],
        [
            f"counts the {s} above a limit",
            f"tells how many {s} are over a limit",
            f"returns the count of {s} beyond a limit",
        ],
        f"{s}, limit",
        f"Count the {s} above the limit.",
        [
            "count = 0",
            f"for {v} in {s}:",
            f"    if {v} > limit:",
            "        count += 1",
            "return count",
        ],
        [_numbers(d, 1, 30, 3, 4), d.choice((10, 15, 20))],
    )


def _tally(d: Dice) -> Code:
    s, v = _noun(d)
    values = _numbers(d, 1, 9, 4, 5)
    wanted = d.choice(values)
    values[d.number(0, 3)] = wanted
    return (
        ["tally", "count_of", "occurrences", "how_often"],
        [
            f"counts how often one number is in the {s}",
            f"tells how many of the {s} equal a given one",
            f"returns how many times a number is among the {s}",
        ],
        f"{s}, wanted",
        f"Count how many of the {s} are the wanted one.",
        [f"hits = [{v} for {v} in {s} if {v} == wanted]", "return len(hits)"],
        [values, wanted],
    )


def _reverse(d: Dice) -> Code:
    s, v = _noun(d)
    return (
        ["reverse", "backwards", "turn_around", "flip"],
        [
            f"returns the {s} in reverse order",
            f"lists the {s} from last to first",
            f"turns the order of the {s} around",
        ],
        s,
        f"Return the {s} in reverse order.",
        ["result = []", f"for {v} in {s}:", f"    result.insert(0, {v})", "return result"],
        [_numbers(d)],
    )


def _first(d: Dice) -> Code:
    s, _ = _noun(d)
    values = _numbers(d, 1, 30, 4, 5)
    return (
        ["first_few", "take", "head", "beginning"],
        [
            f"returns the first few {s}",
            f"takes a number of {s} from the start",
            f"keeps the first {s}, as many as asked",
        ],
        f"{s}, count",
        f"Return the first few {s}.",
        ["if count <= 0:", "    return []", f"return {s}[:count]"],
        [values, d.number(1, 3)],
    )


def _drop(d: Dice) -> Code:
    s, v = _noun(d)
    values = _numbers(d)
    return (
        ["drop", "without", "remove_all", "leave_out"],
        [
            f"removes one number from the {s}",
            f"returns the {s} without a given number",
            f"leaves a given number out of the {s}",
        ],
        f"{s}, unwanted",
        f"Return the {s} without the unwanted one.",
        [f"return [{v} for {v} in {s} if {v} != unwanted]"],
        [values, d.choice(values)],
    )


def _replace(d: Dice) -> Code:
    s, v = _noun(d)
    values = _numbers(d, 1, 30, 3, 4)
    return (
        ["replace", "swap_in", "exchange", "change_one"],
        [
            f"replaces an old number in the {s} by a new one",
            f"puts a new number for an old one in the {s}",
            f"returns the {s} with the old number changed to the new one",
        ],
        f"{s}, old, new",
        f"Replace the old number in the {s} by the new one.",
        [f"return [new if {v} == old else {v} for {v} in {s}]"],
        [values, d.choice(values), d.number(31, 60)],
    )


def _contains(d: Dice) -> Code:
    s, v = _noun(d)
    values = _numbers(d)
    return (
        ["contains", "has_value", "is_in", "includes"],
        [
            f"tells whether a number is among the {s}",
            f"checks if the {s} contain a number",
            f"looks for a number in the {s}",
        ],
        f"{s}, wanted",
        f"Tell whether the wanted number is among the {s}.",
        [f"for {v} in {s}:", f"    if {v} == wanted:", "        return True", "return False"],
        [values, d.choice(values) if d.random() < 0.5 else d.number(1, 30)],
    )


def _position(d: Dice) -> Code:
    s, v = _noun(d)
    values = d.sample(range(1, 31), d.number(3, 5))
    return (
        ["position", "index_of", "where_is", "find"],
        [
            f"returns the position of a number in the {s}",
            f"finds where a number stands in the {s}",
            f"gives the index of a number among the {s}",
        ],
        f"{s}, wanted",
        f"Return the position of the wanted number in the {s}.",
        [
            f"for place, {v} in enumerate({s}):",
            f"    if {v} == wanted:",
            "        return place",
            "return -1",
        ],
        [values, d.choice(values)],
    )


def _cap(d: Dice) -> Code:
    s, v = _noun(d)
    return (
        ["cap", "cut_off", "limit_to", "at_most"],
        [
            f"cuts all {s} down to a limit",
            f"replaces {s} over the limit by the limit",
            f"caps the {s} at a limit",
        ],
        f"{s}, limit",
        f"Cut the {s} down to the limit.",
        [f"return [min({v}, limit) for {v} in {s}]"],
        [_numbers(d), d.number(5, 25)],
    )


def _ends(d: Dice) -> Code:
    s, _ = _noun(d)
    return (
        ["ends", "first_and_last", "outer_two", "edges"],
        [
            f"returns the first and the last of the {s}",
            f"gives the two outer {s}",
            f"picks both ends of the {s}",
        ],
        s,
        f"Return the first and the last of the {s}.",
        [f"first = {s}[0]", f"last = {s}[-1]", "return [first, last]"],
        [_numbers(d)],
    )


def _labels(d: Dice) -> Code:
    s, v = _noun(d)
    return (
        ["parity", "odd_or_even", "label", "name_kinds"],
        [
            f"says odd or even for each of the {s}",
            f"labels all {s} as odd or even",
            f"tells for the {s} if they are odd or even",
        ],
        s,
        f"Say odd or even for each of the {s}.",
        [
            "result = []",
            f"for {v} in {s}:",
            f'    result.append("odd" if {v} % 2 else "even")',
            "return result",
        ],
        [_numbers(d, 1, 30, 3, 4)],
    )


def _multiples(d: Dice) -> Code:
    s, v = _noun(d)
    k = d.choice((3, 5, 10))
    values = [
        d.number(1, 30 // k) * k if d.random() < 0.5 else d.number(1, 30)
        for _ in range(d.number(3, 5))
    ]
    return (
        ["multiples", "divisible", "in_table", "even_split"],
        [
            f"returns the {s} that {k} divides",
            f"keeps the multiples of {k} among the {s}",
            f"picks {s} in the table of {k}",
        ],
        s,
        f"Return the {s} that {k} divides.",
        [f"return [{v} for {v} in {s} if {v} % {k} == 0]"],
        [values],
    )


def _countdown(d: Dice) -> Code:
    return (
        ["countdown", "count_down", "down_from", "launch"],
        [
            "counts down from a number to 1",
            "lists the numbers from the start down to 1",
            "returns a countdown to 1",
        ],
        "start",
        "Count down from the start to 1.",
        [
            "result = []",
            "while start > 0:",
            "    result.append(start)",
            "    start -= 1",
            "return result",
        ],
        [d.number(3, 12)],
    )


def _larger(d: Dice) -> Code:
    a, b = d.sample(range(1, 61), 2)
    return (
        ["larger", "bigger", "larger_of_two", "winner"],
        [
            "returns the larger of two numbers",
            "picks the bigger of two numbers",
            "compares two numbers and gives the higher one",
        ],
        "a, b",
        "Return the larger of two numbers.",
        ["if a > b:", "    return a", "return b"],
        [a, b],
    )


def _lengths(d: Dice) -> Code:
    return (
        ["lengths", "word_lengths", "letter_counts", "measure"],
        [
            "returns the length of each word",
            "counts the letters of every word",
            "tells how long the words are",
        ],
        "words",
        "Return the length of each word.",
        ["result = []", "for word in words:", "    result.append(len(word))", "return result"],
        [d.sample(WORDS, d.number(2, 4))],
    )


def _initials(d: Dice) -> Code:
    return (
        ["initials", "first_letters", "starts", "heads"],
        [
            "returns the first letter of each word",
            "lists the letters that the words start with",
            "takes every first letter",
        ],
        "words",
        "Return the first letter of each word.",
        ["return [word[0] for word in words]"],
        [d.sample(WORDS, d.number(2, 4))],
    )


def _long_words(d: Dice) -> Code:
    return (
        ["long_words", "longer_than", "at_least", "keep_long"],
        [
            "keeps the words with enough letters",
            "returns the words of at least some length",
            "drops words that are too short",
        ],
        "words, least",
        "Keep the words with enough letters.",
        ["return [word for word in words if len(word) >= least]"],
        [d.sample(WORDS, d.number(3, 4)), d.number(4, 5)],
    )


# -------------------------------------------------------------------------------------------------
# chat: each form returns (record, sentences: for each place its wording in each of three voices).
# A document keeps its voice: who has read its first words knows how it goes on.

Chat = tuple[dict[str, Any], list[list[str]]]
VOICES = range(3)


def _two(d: Dice, items: Sequence[str]) -> tuple[str, str]:
    """Two items with different initials: a reader tells Mia from Tom sooner than from Max."""
    first = d.choice(items)
    return first, d.choice([item for item in items if item[0] != first[0]])


def _person(d: Dice) -> Chat:
    n, c, a, j, (x, y) = (
        d.choice(NAMES),
        d.choice(CITIES),
        d.number(20, 79),
        d.choice(JOBS),
        _two(d, THINGS),
    )
    k = d.choice(ANIMALS)
    return {"name": n, "city": c, "age": a, "job": j, "likes": [x, y], "pet": k}, [
        [
            f"{n} is a {a} year old {j} who lives in {c}.",
            f"In {c} there is a {j} called {n}, who is {a} years old.",
            f"At the age of {a}, {n} works in {c} as a {j}.",
        ],
        [
            f"{n} likes {x} and {y}.",
            f"What makes {n} happy are {x} and {y}.",
            f"The favourite things of {n} are {x} and {y}.",
        ],
        [f"{n} also has a {k}.", f"At home there is a {k} too.", f"A {k} lives in the same house."],
    ]


def _pet(d: Dice) -> Chat:
    (n, p), k, col, a, x = (
        _two(d, NAMES),
        d.choice(ANIMALS),
        d.choice(COLOURS),
        d.number(2, 19),
        d.choice(THINGS),
    )
    c = d.choice(CITIES)
    return {"owner": n, "pet": k, "called": p, "colour": col, "age": a, "toys": x, "born": c}, [
        [
            f"{n} has a {col} {k} called {p}.",
            f"The {col} {k} of {n} is called {p}.",
            f"A {col} {k} called {p} belongs to {n}.",
        ],
        [
            f"The animal is {a} years old and plays with {x}.",
            f"It is now {a} years old, and it loves {x}.",
            f"Its toys are {x}, and its age is {a} years.",
        ],
        [
            f"It was born in {c}.",
            f"It comes from {c}, where it was born.",
            f"Its place of birth is {c}.",
        ],
    ]


def _book(d: Dice) -> Chat:
    n, title, p = (
        d.choice(NAMES),
        f"{d.choice(TITLE_FIRST)} {d.choice(TITLE_LAST)}",
        d.number(40, 99),
    )
    c, t, e = d.choice(CITIES), d.choice(TOPICS), d.number(5, 30)
    return {"title": title, "author": n, "pages": p, "topic": t, "printed": c, "euros": e}, [
        [
            f"{title} is a book about {t} by {n}.",
            f"{n} wrote a book about {t} with the title {title}.",
            f"The book {title}, which {n} wrote, is about {t}.",
        ],
        [
            f"It has {p} pages and was printed in {c}.",
            f"It was printed in {c} and is {p} pages long.",
            f"A printer in {c} made it, with {p} pages.",
        ],
        [
            f"You can buy it for {e} euros.",
            f"The price is {e} euros.",
            f"It costs {e} euros in the shop.",
        ],
    ]


def _trip(d: Dice) -> Chat:
    (n, m), (x, y), v, day, h, e = (
        _two(d, NAMES),
        _two(d, CITIES),
        d.choice(VEHICLES),
        d.choice(DAYS),
        d.number(2, 12),
        d.number(13, 99),
    )
    return {
        "traveller": n,
        "from": x,
        "to": y,
        "by": v,
        "day": day,
        "hours": h,
        "euros": e,
        "guest": m,
    }, [
        [
            f"From {x} to {y}, {n} travels by {v} on {day}.",
            f"{n} leaves {x} on {day} and goes to {y} by {v}.",
            f"By {v}, {n} goes from {x} to {y} on {day}.",
        ],
        [
            f"The trip takes {h} hours and costs {e} euros.",
            f"It costs {e} euros and lasts {h} hours.",
            f"After {h} hours and for {e} euros the trip is done.",
        ],
        [
            f"A guest comes too: {m}.",
            f"The guest on this trip is {m}.",
            f"The guest is called {m}.",
        ],
    ]


def _weather(d: Dice) -> Chat:
    c, day, sky, w = (
        d.choice(CITIES),
        d.choice(DAYS),
        d.choice(SKIES),
        d.choice(("north", "south", "east", "west")),
    )
    low, gap, rain = d.number(2, 15), d.number(2, 15), d.number(31, 90)
    return {
        "city": c,
        "day": day,
        "sky": sky,
        "low": low,
        "high": low + gap,
        "wind": w,
        "rain": rain,
    }, [
        [
            f"{day} will be {sky} in {c}, with {low} to {low + gap} degrees.",
            f"In {c} it will be {sky} on {day}, between {low} and {low + gap} degrees.",
            f"Expect a {sky} {day} in {c}: {low} degrees at night and {low + gap} by day.",
        ],
        [
            f"The wind comes from the {w} and the chance of rain is {rain} percent.",
            f"Rain has a chance of {rain} percent, and the wind blows from the {w}.",
            f"With a wind from the {w}, rain falls with a chance of {rain} percent.",
        ],
    ]


def _order(d: Dice) -> Chat:
    n, (x, y), a, b, day, c = (
        d.choice(NAMES),
        _two(d, THINGS),
        d.number(2, 19),
        d.number(20, 60),
        d.choice(DAYS),
        d.choice(CITIES),
    )
    e, v = d.number(61, 99), d.choice(VEHICLES)
    return {
        "customer": n,
        "order": {x: a, y: b},
        "euros": e,
        "ship_to": c,
        "by": v,
        "arrives": day,
    }, [
        [
            f"{n} orders {a} {x} and {b} {y}.",
            f"The order of {n} is for {a} {x} and {b} {y}.",
            f"{a} {x} and {b} {y} are on the list of {n}.",
        ],
        [
            f"Everything goes to {c} by {v} and arrives on {day}.",
            f"It will reach {c} by {v} on {day}.",
            f"On {day} the goods come to {c} by {v}.",
        ],
        [f"The price is {e} euros.", f"{n} pays {e} euros for it.", f"All of it costs {e} euros."],
    ]


def _match(d: Dice) -> Chat:
    (x, y), s, day, c = _two(d, NAMES), d.choice(SPORTS), d.choice(DAYS), d.choice(CITIES)
    b = d.number(2, 12)
    a, p = b + d.number(1, 9), d.number(30, 99)
    return {
        "sport": s,
        "winner": x,
        "loser": y,
        "score": [a, b],
        "city": c,
        "day": day,
        "visitors": p,
    }, [
        [
            f"{x} beat {y} at {s} by {a} to {b}.",
            f"At {s}, {x} won against {y} with {a} to {b}.",
            f"The loser at {s} was {y}: {x} won by {a} to {b}.",
        ],
        [
            f"The match was on {day} in {c}.",
            f"They played in {c} on {day}.",
            f"{c} saw this game on {day}.",
        ],
        [
            f"There were {p} visitors.",
            f"It had {p} people watching.",
            f"The number of visitors was {p}.",
        ],
    ]


def _meeting(d: Dice) -> Chat:
    n, t, r, day, h, p = (
        d.choice(NAMES),
        d.choice(TOPICS),
        d.choice(ROOMS),
        d.choice(DAYS),
        d.number(8, 19),
        d.number(20, 70),
    )
    c, e = d.choice(CITIES), d.number(71, 99)
    return {
        "course": t,
        "teacher": n,
        "room": r,
        "day": day,
        "hour": h,
        "seats": p,
        "city": c,
        "fee": e,
    }, [
        [
            f"{n} gives a course on {t} in the {r}.",
            f"The course on {t} is held by {n} in the {r}.",
            f"In the {r}, {n} will talk about {t}.",
        ],
        [
            f"It starts on {day} at {h} and has {p} seats.",
            f"There are {p} seats, and it begins at {h} on {day}.",
            f"Come on {day} at {h}: {p} seats are free.",
        ],
        [
            f"The fee is {e} euros and the place is {c}.",
            f"It is held in {c} and costs {e} euros.",
            f"You pay {e} euros in {c}.",
        ],
    ]


Form = Callable[[Dice], Any]
FORMS: dict[str, dict[str, Form]] = {
    "maths": {
        "more": _more,
        "fewer": _fewer,
        "two_kinds": _two_kinds,
        "boxes": _boxes,
        "share": _share,
        "change": _change,
        "age": _age,
        "together": _together,
        "times": _times,
        "bus": _bus,
        "ride": _ride,
        "fence": _fence,
        "pages": _pages,
        "sales": _sales,
        "saving": _saving,
        "before": _before,
    },
    "code": {
        "keep_odd": _keep_odd,
        "keep_even": _keep_even,
        "keep_above": _keep_above,
        "keep_below": _keep_below,
        "add_each": _add_each,
        "times_each": _times_each,
        "total": _total,
        "running": _running,
        "largest": _largest,
        "smallest": _smallest,
        "count_above": _count_above,
        "tally": _tally,
        "reverse": _reverse,
        "first": _first,
        "drop": _drop,
        "replace": _replace,
        "contains": _contains,
        "position": _position,
        "cap": _cap,
        "ends": _ends,
        "labels": _labels,
        "multiples": _multiples,
        "countdown": _countdown,
        "larger": _larger,
        "lengths": _lengths,
        "initials": _initials,
        "long_words": _long_words,
    },
    "chat": {
        "person": _person,
        "pet": _pet,
        "book": _book,
        "trip": _trip,
        "weather": _weather,
        "order": _order,
        "match": _match,
        "meeting": _meeting,
    },
}
_TASKS = (
    "Write a function {name} that {does}. Then show {call}.",
    "Define {name}, a function that {does}. Show what {call} gives.",
    "I need a Python function called {name} that {does}. Try it with {call}.",
    "Please write {name}. The function {does}. Run {call} as an example.",
)


@functools.lru_cache(maxsize=4096)
def _compiled(source: str) -> Any:
    return compile(source, "<world>", "exec")


def source_of(name: str, parameters: str, docstring: str, body: Sequence[str]) -> str:
    """The text of a function of the world."""
    lines = [f"def {name}({parameters}):", f'    """{docstring}"""']
    return "\n".join([*lines, *("    " + line for line in body)])


def run(source: str, call: str) -> str:
    """Run our own function in a fresh namespace and return the repr of the call's result."""
    namespace: dict[str, Any] = {}
    exec(_compiled(source), namespace)
    return repr(eval(call, namespace))


def shown(
    form: str, source: str, docstring: str, call: str, arguments: Sequence[Any]
) -> tuple[str, str]:
    """What a session shows behind a call: its looks as a comment, or nothing, and its result."""
    comment = looks(form, docstring, arguments)
    return f"  # {comment}" if comment else "", run(source, call)


def _build(kind: str, form: str, dice: Dice) -> Document:
    drawn = FORMS[kind][form](dice)
    if kind == "maths":
        asks, steps, answer = drawn
        lines = [f"{i}. {step}" for i, step in enumerate(steps, 1)] + [f"The answer is {answer}."]
        prompt = f"Question: {dice.choice(asks)}\nAnswer:"
    elif kind == "code":
        names, does, parameters, docstring, body, arguments = drawn
        name = dice.choice(names)
        source = source_of(name, parameters, docstring, body)
        call = f"{name}({', '.join(map(repr, arguments))})"
        comment, result = shown(form, source, docstring, call, arguments)
        lines = [source, f">>> {call}{comment}", result]
        prompt = (
            "Task: "
            + dice.choice(_TASKS).format(name=name, does=dice.choice(does), call=call)
            + "\nPython:"
        )
    else:
        record, sentences = drawn
        voice = dice.choice(VOICES)
        lines = [" ".join(wordings[voice] for wordings in sentences)]
        prompt = f"Record: {json.dumps(record)}\nIn words:"
        told = tuple(map(tuple, sentences))
        return Document(kind, form, prompt, "\n" + "\n".join(lines), told)
    return Document(kind, form, prompt, "\n" + "\n".join(lines))


def check_split(split: str) -> None:
    """Raise a ValueError unless `split` is "train" or "held_out"."""
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; allowed are {', '.join(map(repr, SPLITS))}")


def _check(split: str, kinds: Sequence[str]) -> None:
    check_split(split)
    if not kinds:
        raise ValueError("kinds is empty; name at least one of " + ", ".join(map(repr, KINDS)))
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; allowed are {', '.join(map(repr, KINDS))}")


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out split: its SHA-256 falls in one bucket of fifty."""
    return (
        int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") % HELD_OUT_BUCKETS == 0
    )


def document(kind: str, split: str, index: int, seed: int = 0) -> Document:
    """Return document number `index` of one kind: the same for the same arguments, on every Python.

    Every form of the kind is equally likely. A document whose prompt belongs to the other split is
    thrown again, so a prompt is never in both splits, whatever the seeds.

    Raises:
        ValueError: for an unknown kind or split, or a negative index.
    """
    _check(split, (kind,))
    if index < 0:
        raise ValueError(f"index is {index}; allowed are 0, 1, 2, ...")
    dice = Dice(f"{seed}/{split}/{kind}/{index}")
    forms = list(FORMS[kind])
    while True:
        made = _build(kind, dice.choice(forms), dice)
        if is_held_out(made.prompt) == (split == "held_out"):
            return made


def documents(split: str, seed: int = 0, kinds: Sequence[str] = KINDS) -> Iterator[Document]:
    """Yield documents without end, the kinds in turn.

    Args:
        split: "train" or "held_out"; no prompt is ever in both.
        seed: another seed, another stream.
        kinds: which of "maths", "code", "chat", in which turn.

    Raises:
        ValueError: at the call, for an unknown split or kind.
    """
    _check(split, kinds)
    return (document(kind, split, index, seed) for index in itertools.count() for kind in kinds)


def _program(text: str) -> tuple[str, list[str]] | None:
    """A code answer's syntax tree without docstrings, and its lines from `>>>` on without looks."""
    source, mark, rest = without_looks(text.strip()).partition("\n>>> ")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree), (mark + rest).strip().split("\n")


def is_right(document: Document, continuation: str) -> bool:
    """Whether a continuation of the document's prompt is a right answer. Nothing of it is ever run.

    - maths: the last sentence "The answer is N." names the right number. The steps are not
      looked at.
    - code: the program is the document's own, docstring and layout aside (same syntax tree), and
      after it come exactly the call that was asked for and its true result. Another right program
      counts as wrong. The comment behind the call is not looked at.
    - chat: the record's facts in the world's own wordings, sentence by sentence; the voice may
      change between them. Two swapped numbers are wrong, and so are other words.

    Args:
        document: the document whose prompt was continued.
        continuation: the text after the prompt; anything from the end token on is ignored.
    """
    text = continuation.split(END)[0]
    if document.kind == "maths":
        said, true = (re.findall(r"The answer is (\d+)\.", t) for t in (text, document.answer))
        return bool(said) and said[-1] == true[-1]
    if document.kind == "code":
        return _program(text) is not None and _program(text) == _program(document.answer)
    tellings = itertools.product(*document.wordings)
    return text.strip() in {" ".join(sentences) for sentences in tellings}
