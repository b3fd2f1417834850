"""The little world: right answers, the same on every Python, held out by prompt."""

import hashlib
import itertools
import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidflash.kit import world
from minidflash.kit.looks import FORMS_WITH_LOOKS, looks, without_looks
from minidflash.kit.world import KINDS, SPLITS, Document, document, documents, is_right

ANA = Document(
    "maths",
    "more",
    "Question: Ana has 12 apples and buys 5 more. How many apples does Ana have now?\nAnswer:",
    "\n1. At first Ana has 12 apples.\n2. Then come 5 more, so 12 + 5 = 17.\n"
    "3. Now Ana has 17 apples.\nThe answer is 17.",
)
KEEP = Document(
    "code",
    "keep_even",
    "Task: Write a function only_even that drops all odd ages. Then show only_even([3, 8]).\n"
    "Python:",
    "\ndef only_even(ages):\n"
    '    """Return only the even ages."""\n'
    "    return [age for age in ages if age % 2 == 0]\n"
    ">>> only_even([3, 8])\n[8]",
)
ORDER = Document(
    "chat",
    "order",
    'Record: {"customer": "Eva", "order": {"pens": 4, "hats": 30}, "euros": 70, "ship_to": "Lima",'
    ' "by": "bus", "arrives": "Sunday"}\nIn words:',
    "\nEva orders 4 pens and 30 hats. It will reach Lima by bus on Sunday. The price is 70 euros.",
    (
        ("Eva orders 4 pens and 30 hats.", "4 pens and 30 hats are on the list of Eva."),
        ("It will reach Lima by bus on Sunday.",),
        ("The price is 70 euros.", "Eva pays 70 euros for it."),
    ),
)
PEOPLE = {  # the forms with two people, and where their record names them
    "pet": ("owner", "called"), "trip": ("traveller", "guest"), "match": ("winner", "loser"),
}


def some(kind, split="train", count=400, seed=0):
    return list(itertools.islice(documents(split, seed, (kind,)), count))


def evaluate(expression):
    """Arithmetic by hand: two numbers and one sign."""
    a, sign, b = expression.split()
    a, b = int(a), int(b)
    if sign == "/":
        assert a % b == 0, f"{expression} does not come out even"
        return a // b
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


@pytest.mark.parametrize(
    "made, kind, text, right",
    [
        (ANA, "the answer itself", ANA.answer, True),
        (ANA, "an end token and more", ANA.answer + "<|endoftext|>The answer is 3.", True),
        (ANA, "another number", ANA.answer.replace("is 17.", "is 18."), False),
        (ANA, "a longer number", ANA.answer.replace("is 17.", "is 170."), False),
        (ANA, "the last one counts", ANA.answer + "\nThe answer is 16.", False),
        (ANA, "no answer", "\n1. At first Ana has 12 apples.", False),
        (KEEP, "the answer itself", KEEP.answer, True),
        (KEEP, "another docstring", KEEP.answer.replace("Return only", "Give"), True),
        (KEEP, "another result", KEEP.answer.replace("[8]", "[3]"), False),
        (KEEP, "another call", KEEP.answer.replace(">>> only_even([3", ">>> only_even([5"), False),
        (KEEP, "another program", KEEP.answer.replace("== 0", "== 1"), False),
        (KEEP, "no call", KEEP.answer.split(">>>")[0], False),
        (KEEP, "more after the result", KEEP.answer + "\n[9]", False),
        (KEEP, "looks behind the call", KEEP.answer.replace(
            "[3, 8])", "[3, 8])  # 3 % 2 = 1 no, 8 % 2 = 0 yes: 8"), True),
        (KEEP, "looks, another call", KEEP.answer.replace("[3, 8])", "[3])  # [3, 8])"), False),
        (KEEP, "no Python", KEEP.answer.replace("return", "retrun"), False),
        (KEEP, "nothing", "", False),
        (ORDER, "the answer itself", ORDER.answer, True),
        (ORDER, "another wording", ORDER.answer.replace("The price is", "Eva pays").replace(
            "euros.", "euros for it."), True),
        (ORDER, "free words", "\nOn Sunday a bus brings Eva 4 pens, 30 hats to Lima: 70.", False),
        (ORDER, "two numbers swapped", ORDER.answer.replace("4 pens and 30", "30 pens and 4"),
         False),
        (ORDER, "a sentence missing", ORDER.answer.replace(" The price is 70 euros.", ""), False),
        (ORDER, "a sentence twice", ORDER.answer + " The price is 70 euros.", False),
        (ORDER, "nothing", "", False),
        (ORDER, "a fact missing", ORDER.answer.replace(" by bus", ""), False),
        (ORDER, "another number", ORDER.answer.replace("30 hats", "31 hats"), False),
        (ORDER, "a thing too many", ORDER.answer + " And nuts.", False),
        (ORDER, "a name too many", ORDER.answer.replace("Eva orders", "Eva and Ana order"), False),
    ],
)
def test_is_right_by_hand(made, kind, text, right):
    """An answer is right when its number, its program, call and result, or its sentences are."""
    assert is_right(made, text) is right, f"{kind} counts as {'right' if not right else 'wrong'}"


def test_the_shape_of_a_document():
    """A prompt ends at its cue, the answer starts on a new line, and no end token is inside."""
    cue = {"maths": "\nAnswer:", "code": "\nPython:", "chat": "\nIn words:"}
    for kind in KINDS:
        for made in some(kind):
            assert made.kind == kind
            assert made.prompt.endswith(cue[kind]), made.prompt
            assert made.answer.startswith("\n") and not made.answer.endswith("\n"), made.answer
            assert "<|" not in made.text
            assert made.text == made.prompt + made.answer


def test_anas_apples():
    """The question of the demo is one that the world itself asks, with those very words."""
    pattern = re.compile(
        r"Question: (\w+) has (\d+) (\w+) and buys (\d+) more\. "
        r"How many \3 does \1 have now\?\nAnswer:"
    )
    matched = [m for made in some("maths", count=4000) if (m := pattern.fullmatch(made.prompt))]
    assert matched, "no document asks: Ana has 12 apples and buys 5 more"


def test_every_form_appears_in_several_wordings():
    """There are at least 12 maths, 12 code and 6 chat forms, each with three wordings or more."""
    for kind, least in (("maths", 12), ("code", 12), ("chat", 6)):
        assert len(world.FORMS[kind]) >= least, f"only {len(world.FORMS[kind])} forms of {kind}"
    for kind in KINDS:
        assert {made.form for made in some(kind, count=1000)} == set(world.FORMS[kind])
        for form, draw in world.FORMS[kind].items():
            drawn = draw(world.Dice(form))
            places = {"maths": drawn[:1], "code": drawn[:2], "chat": drawn[-1]}[kind]
            for wordings in places:
                assert len(set(wordings)) >= 3, f"{kind} form {form} has only {wordings}"


def test_each_step_computes_right():
    """Every sum in a maths answer is one operation and true, and the last one is the answer."""
    for made in some("maths", count=2000):
        sums = re.findall(r"(\d+ [-+*/] \d+) = (\d+)", made.answer)
        assert sums, made.text
        for expression, result in sums:
            assert evaluate(expression) == int(result), made.text
            assert 0 < int(result) < 200
            if expression.split()[1] == "*":
                assert max(map(int, expression.split(" * "))) <= 10, made.text
        assert made.answer.endswith(f"The answer is {sums[-1][1]}."), made.text
        numbers = set(re.findall(r"\d+", made.prompt))
        known = numbers | {result for _, result in sums}
        steps = re.sub(r"(?m)^\d\. ", "", made.answer)
        assert set(re.findall(r"\d+", steps)) <= known, f"a number from nowhere: {made.text}"


def test_code_results_are_true():
    """The result under each call is what Python really gives for that program."""
    for made in some("code", count=1000):
        source, _, shown = made.answer.partition("\n>>> ")
        line, result = shown.split("\n")
        call = line.split("  # ")[0]
        namespace = {}
        exec(source, namespace)  # our own text, not a model's
        assert repr(eval(call, namespace)) == result, made.text
        assert call in made.prompt
        name = call.split("(")[0]
        assert namespace[name].__doc__


@pytest.mark.parametrize(
    "form, docstring, arguments, comment",
    [
        ("keep_odd", "", [[3, 8]], "3 % 2 = 1 yes: 3, 8 % 2 = 0 no"),
        ("keep_even", "", [[3, 8]], "3 % 2 = 1 no, 8 % 2 = 0 yes: 8"),
        ("keep_above", "", [[28, 3, 22], 22], "28 > 22 yes: 28, 3 > 22 no, 22 > 22 no"),
        ("keep_below", "", [[28, 3, 22], 22], "28 < 22 no, 3 < 22 yes: 3, 22 < 22 no"),
        ("multiples", "The ages that 3 divides.", [[9, 8]], "9 % 3 = 0 yes: 9, 8 % 3 = 2 no"),
        ("drop", "", [[5, 6], 6], "5 != 6 yes: 5, 6 != 6 no"),
        ("long_words", "", [["sun", "moon"], 4], "'sun' 3 >= 4 no, 'moon' 4 >= 4 yes: 'moon'"),
        ("count_above", "", [[12, 9, 30], 10], "12 > 10 yes: 1, 9 > 10 no: 1, 30 > 10 yes: 2"),
        ("tally", "", [[4, 7, 4], 4], "4 = 4 yes: 1, 7 = 4 no: 1, 4 = 4 yes: 2"),
        ("total", "", [[3, 8, 1]], "0 + 3 = 3, 3 + 8 = 11, 11 + 1 = 12"),
        ("add_each", "Add 4 to each of the sizes.", [[3, 8]], "3 + 4 = 7, 8 + 4 = 12"),
        ("cap", "", [[28, 3], 22], "28 > 22 yes: 22, 3 > 22 no: 3"),
        ("replace", "", [[3, 8], 8, 45], "3 = 8 no: 3, 8 = 8 yes: 45"),
        ("contains", "", [[3, 8, 9], 8], "0: 3 = 8 no, 1: 8 = 8 yes"),
        ("contains", "", [[3, 9], 8], "0: 3 = 8 no, 1: 9 = 8 no"),
        ("position", "", [[3, 8, 9], 8], "0: 3 = 8 no, 1: 8 = 8 yes"),
        ("reverse", "", [[3, 8]], ""),
    ],
)
def test_looks_by_hand(form, docstring, arguments, comment):
    """Each look has all that decides beside it and ends with what it gives; a reversal has none."""
    assert looks(form, docstring, arguments) == comment


def test_looks_are_true_and_lead_to_the_result():
    """Read as arithmetic every look holds, and what the looks give is the result that is shown."""
    seen = set()
    for made in some("code", count=1500):
        line, result = made.answer.split("\n>>> ")[1].split("\n")
        call, _, comment = line.partition("  # ")
        assert bool(comment) == (made.form in FORMS_WITH_LOOKS), made.text
        if not comment:
            continue
        seen.add(made.form)
        gives, verdicts = [], []
        for look in comment.split(", "):
            place, question, verdict, given = re.fullmatch(
                r"(?:(\d+): )?(.*?)(?: (yes|no))?(?:: (.*))?", look).groups()
            sides = re.sub(r"^'(\w+)' (\d+)", lambda m: f"{len(m[1])} == {m[2]}", question)
            holds = eval(re.sub(r"(?<![!<>=])=(?!=)", "==", sides))
            if made.form in ("keep_odd", "keep_even", "multiples"):  # the remainder is stated
                assert holds, f"{look} is not so: {made.text}"
                holds = int(question[-1]) == (made.form == "keep_odd")
            assert verdict is None or (verdict == "yes") is holds, f"{look} is not so: {made.text}"
            assert place is None or int(place) == len(verdicts), made.text
            verdicts.append(holds)
            gives += [given] if given is not None else []
            gives += [question.split(" = ")[1]] if verdict is None else []
        last = {"total": gives[-1:], "count_above": gives[-1:], "tally": gives[-1:],
                "contains": [str(verdicts[-1])], "position": [str(len(verdicts) - 1)]}
        told = "".join(last[made.form]) if made.form in last else f"[{', '.join(gives)}]"
        assert told == result, made.text
        assert without_looks(made.answer) == made.answer.replace("  # " + comment, "")
    assert seen == set(FORMS_WITH_LOOKS)


def test_a_sentence_with_two_people_begins_with_one_of_them_only():
    """Who writes the name first and must then find out whose it was says "Mia lost to Mia"."""
    for form, (first, second) in PEOPLE.items():
        record, places = world.FORMS["chat"][form](world.Dice(form))
        for wordings in places:
            begun = {key for text in wordings for key in (first, second)
                     if text.startswith(record[key])}
            assert len(begun) <= 1, f"{form}: {wordings}"
            assert second not in begun, f"{form}: {wordings}"


def test_a_chat_document_keeps_one_voice():
    """All sentences of an answer are worded in one of the three voices, and each is heard."""
    heard = Counter()
    for made in some("chat", count=800):
        told = ["\n" + " ".join(sentences) for sentences in zip(*made.wordings, strict=True)]
        assert len(set(told)) == 3, f"{made.form} has no three voices: {told}"
        assert made.answer in told, f"mixed voices: {made.text}"
        heard[made.form, told.index(made.answer)] += 1
    assert len(heard) == 3 * len(world.FORMS["chat"]), heard


def test_the_first_word_tells_the_voice():
    """Two voices of a form never begin with the same word, so a draft can know how it goes on."""
    for made in some("chat", count=200):
        begun = {sentence.split()[0] for sentence in made.wordings[0]}
        assert len(begun) == 3, f"{made.form}: {made.wordings[0]}"


def test_what_a_reader_could_mix_up_differs_in_its_first_letter():
    """Two people, cities or things of one record have different initials."""
    for made in some("chat", count=800):
        record = json.loads(made.prompt.split("\n")[0].removeprefix("Record: "))
        both = [record[key] for key in PEOPLE.get(made.form, ())]
        both += record.get("likes", []) + list(record.get("order", {}))
        for one, other in zip(both[::2], both[1::2], strict=True):
            assert one[0] != other[0], made.prompt
        if made.form == "trip":
            assert record["from"][0] != record["to"][0], made.prompt


def test_chat_says_the_whole_record():
    """Every value of a chat record stands in the answer."""

    def leaves(value):
        if isinstance(value, dict):
            return [leaf for item in value.items() for part in item for leaf in leaves(part)]
        if isinstance(value, list):
            return [leaf for part in value for leaf in leaves(part)]
        return [str(value)]

    for made in some("chat", count=800):
        record = json.loads(made.prompt.split("\n")[0].removeprefix("Record: "))
        for value in record.values():
            for leaf in leaves(value):
                assert re.search(rf"\b{leaf}\b", made.answer), f"{leaf} is missing: {made.text}"


@given(st.sampled_from(KINDS), st.sampled_from(SPLITS), st.integers(0, 10**6), st.integers(0, 99))
def test_own_answers_are_right(kind, split, index, seed):
    """A document's own answer is right, and the answer of another prompt is not."""
    made, other = document(kind, split, index, seed), document(kind, split, index + 1, seed)
    assert is_right(made, made.answer), made.text
    numbers = [re.findall(r"The answer is \d+\.", d.answer) for d in (made, other)]
    if made.prompt != other.prompt and (kind != "maths" or numbers[0] != numbers[1]):
        assert not is_right(made, other.answer), f"{made.text}\n--- accepts ---\n{other.answer}"


@given(st.sampled_from(KINDS), st.integers(0, 500), st.text(max_size=80))
def test_is_right_never_stumbles(kind, index, text):
    """Any text at all gets a verdict, and nothing that a model writes is run."""
    assert is_right(document(kind, "train", index), text) is False


@given(st.sampled_from(KINDS), st.integers(0, 10**6), st.integers(0, 99))
def test_a_prompt_belongs_to_one_split(kind, index, seed):
    """Whether a prompt is held out depends on the prompt alone: bucket 0 of 50 by its SHA-256."""
    for split in SPLITS:
        prompt = document(kind, split, index, seed).prompt
        digest = int(hashlib.sha256(prompt.encode()).hexdigest()[:16], 16)
        assert (digest % 50 == 0) == (split == "held_out"), f"{split} holds {prompt!r}"


def test_the_same_on_every_python():
    """The first documents of each split have this fingerprint, whatever the Python or machine."""
    prints = []
    for split, count in (("train", 1500), ("held_out", 90)):
        stream = itertools.islice(documents(split), count)
        whole = hashlib.sha256(b"".join(made.text.encode() for made in stream))
        prints.append(whole.hexdigest()[:16])
    assert prints == ["a73f405649520efb", "1ba1af6414fc17d5"], (
        f"the world's text changed (now {prints}); the shipped models learnt the old one"
    )


def test_streams():
    """The kinds take turns, the same seed gives the same stream, another seed another one."""
    first = list(itertools.islice(documents("train", 3), 30))
    assert [made.kind for made in first] == list(KINDS) * 10
    assert first == list(itertools.islice(documents("train", 3), 30))
    assert first[4] == document("code", "train", 1, 3)
    assert first != list(itertools.islice(documents("train", 4), 30))


def test_prompts_hardly_repeat():
    """The world is large: of 2000 prompts of a kind at most 1 % are repeats."""
    for kind in KINDS:
        counts = Counter(made.prompt for made in some(kind, count=2000))
        assert len(counts) >= 1980, f"{kind}: {len(counts)} different prompts in 2000"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: documents("test"), "split is 'test'; allowed are 'train', 'held_out'"),
        (lambda: documents("train", 0, ("maths", "poems")), "kind is 'poems'; allowed are 'maths'"),
        (lambda: documents("train", 0, ()), "kinds is empty"),
        (lambda: document("code", "train", -1), "index is -1; allowed are 0, 1, 2"),
    ],
)
def test_what_is_refused(call, message):
    """An unknown split or kind is refused at the call, by name, before any document is made."""
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)
