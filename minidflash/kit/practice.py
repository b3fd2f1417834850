"""More of what is hard: one function of the little world, and many calls of it.

Most tokens of a code document are easy after a while: the function follows from the task. What is
hard is the last line, the true result of the call, a dozen tokens in a hundred. A page of practice
has one function and eight calls, so half of its weight lies on results. It asks for "several
calls" instead of one that it names, so a model can tell it from a document.

Not every function is hard. Of 120 unseen code documents an earlier target failed 23, all of them of
the forms in HARD: they look at each entry of a list and decide. Only these are practised.
"""

from minidflash.kit.world import FORMS, Dice, run, source_of

CALLS = 8
HARD = (
    "keep_odd", "keep_even", "keep_above", "keep_below", "add_each", "count_above", "tally", "drop",
    "replace", "contains", "position", "multiples", "long_words",
)
_TASKS = (
    "Write a function {name} that {does}. Then show several calls.",
    "Define {name}, a function that {does}. Show what several calls give.",
    "I need a Python function called {name} that {does}. Try it with several calls.",
    "Please write {name}. The function {does}. Run several calls as an example.",
)


def practice(index: int, seed: int = 0) -> list[tuple[str, float]]:
    """Page number `index`: its text in pieces, each with the weight of its tokens in the loss.

    The task weighs a quarter, like every prompt; a call is random and weighs nothing; the function
    and the results weigh 1.

    Raises:
        ValueError: a negative index.
    """
    if index < 0:
        raise ValueError(f"index is {index}; allowed are 0, 1, 2, ...")
    dice = Dice(f"{seed}/practice/{index}")
    form = FORMS["code"][dice.choice(HARD)]
    names, does, parameters, docstring, body, first = form(dice)
    name = dice.choice(names)
    source = source_of(name, parameters, docstring, body)
    task = dice.choice(_TASKS).format(name=name, does=dice.choice(does))
    pieces = [(f"Task: {task}\nPython:", 0.25), (f"\n{source}", 1.0)]
    for arguments in [first, *(form(dice)[5] for _ in range(CALLS - 1))]:
        call = f"{name}({', '.join(map(repr, arguments))})"
        pieces += [(f"\n>>> {call}", 0.0), (f"\n{run(source, call)}", 1.0)]
    return pieces
