"""More of what is hard: one function of the little world, and many calls of it.

Most tokens of a code document are easy after a while: the function follows from the task. What is
hard are the looks and the true result of the call. A page of practice has one function and eight
calls, so most of its weight lies there. It asks for "several calls" instead of one that it names,
so a model can tell it from a document.

Not every function is hard. Of 120 unseen code documents an earlier target failed 23, all of a form
that looks at each entry of a list and decides. Only those with looks (kit/looks.py) are practised.
"""

from minidflash.kit.looks import FORMS_WITH_LOOKS
from minidflash.kit.world import FORMS, Dice, shown, source_of

CALLS = 8
HARD = FORMS_WITH_LOOKS
_TASKS = (
    "Write a function {name} that {does}. Then show several calls.",
    "Define {name}, a function that {does}. Show what several calls give.",
    "I need a Python function called {name} that {does}. Try it with several calls.",
    "Please write {name}. The function {does}. Run several calls as an example.",
)


def practice(index: int, seed: int = 0) -> list[tuple[str, float]]:
    """Page number `index`: its text in pieces, each with the weight of its tokens in the loss.

    The task weighs a quarter, like every prompt; a call is random and weighs nothing; the function,
    the looks and the results weigh 1.

    Raises:
        ValueError: a negative index.
    """
    if index < 0:
        raise ValueError(f"index is {index}; allowed are 0, 1, 2, ...")
    dice = Dice(f"{seed}/practice/{index}")
    form = dice.choice(HARD)
    draw = FORMS["code"][form]
    names, does, parameters, docstring, body, first = draw(dice)
    name = dice.choice(names)
    source = source_of(name, parameters, docstring, body)
    task = dice.choice(_TASKS).format(name=name, does=dice.choice(does))
    pieces = [(f"Task: {task}\nPython:", 0.25), (f"\n{source}", 1.0)]
    for arguments in [first, *(draw(dice)[5] for _ in range(CALLS - 1))]:
        call = f"{name}({', '.join(map(repr, arguments))})"
        comment, result = shown(form, source, docstring, call, arguments)
        pieces += [(f"\n>>> {call}", 0.0), (f"{comment}\n{result}", 1.0)]
    return pieces
