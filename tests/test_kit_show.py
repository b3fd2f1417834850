"""What a reader sees: text that never breaks a character, pictures that never rely on colour."""

import base64
import io
import re

import pairs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidflash.anchors import training_mask
from minidflash.kit import models, show
from minidflash.kit.tokenizer import load_tokenizer
from minidflash.speculate import Generation, NGramDrafter, NoDrafter, Round, speculate

ROUND = Round([5, 9, 4], 1, [5, 8], 0.004, 0.017)
MADE = Generation([7, 5, 8, 3], [ROUND, Round([], 0, [3], 0.0, 0.016)], "length", 0.02, 0.06)


@pytest.fixture(scope="module")
def words():
    return load_tokenizer()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return models.load(*pairs.write_pair(tmp_path_factory.mktemp("pair")))


class Terminal(io.StringIO):
    def isatty(self):
        return True


# ---------------------------------------------------------------------- by hand


def test_a_mask_as_text():
    """Rows look and columns are looked at: two blocks of two see two and four context positions."""
    mask = training_mask(torch.tensor([[2, 4]]), 2, 5)[0]
    found = show.mask_text(mask, ["2", "3", "4", "5"], [*"01234", *"2345"])
    assert found.splitlines() == [
        "  0 1 2 3 4 2 3 4 5",
        "2 ■ ■ · · · ■ ■ · ·",
        "3 ■ ■ · · · ■ ■ · ·",
        "4 ■ ■ ■ ■ · · · ■ ■",
        "5 ■ ■ ■ ■ · · · ■ ■",
    ]


def test_a_mask_of_several_kinds():
    """Whole numbers in a mask are shown as they are, and named in the legend of the picture."""
    mask = [[1, 0], [2, 1]]
    assert show.mask_text(mask).splitlines()[1:] == ["0 1 ·", "1 2 1"]
    found = show.mask(mask, title="M", kinds=("context", "block"), row_breaks=[1])
    legend = [text.get_text() for text in found.figure.legends[0].get_texts()]
    assert legend == ["hidden", "context", "block"]
    assert found.text.startswith("M\n")


def test_the_parts_of_a_round():
    """One of three guesses kept: 5 is accepted, 9 and 4 are rejected, 8 is the bonus; behind a stop
    token nothing is called rejected."""
    assert show.parts(ROUND) == [("accepted", [5]), ("rejected", [9, 4]), ("bonus", [8])]
    stopped = Round([5, 0, 4], 2, [5, 0], 0.0, 0.0)
    assert show.parts(stopped) == [("accepted", [5, 0]), ("rejected", []), ("bonus", [])]


def test_a_stream_off_a_terminal_is_the_text(words):
    """Into a file or a pipe goes the text alone, without marks and without what was rejected."""
    out = io.StringIO()
    one = Round(words.encode("ab"), 1, [*words.encode("a"), *words.encode("c")], 0.0, 0.0)
    stream = show.Stream(words, out)
    stream.prompt("x")
    stream.round(one)
    stream.end()
    assert out.getvalue() == "xac\n"


def test_a_stream_on_a_terminal_has_glyphs_and_colours(words):
    """On a terminal each fate has its own glyph and colour, and what was rejected is shown."""
    out = Terminal()
    one = Round([*words.encode("a"), *words.encode("b")], 1, [*words.encode("a"),
                *words.encode("c")], 0.0, 0.0)  # fmt: skip
    show.Stream(words, out).round(one)
    found = out.getvalue()
    for fate, letter in (("accepted", "✓a"), ("rejected", "✗b"), ("bonus", "+c")):
        assert f"\x1b[{show.ANSI[fate]}m{letter}\x1b[0m" in found
    assert found.index("✓a") < found.index("✗b") < found.index("+c")
    assert len(set(show.ANSI.values())) == 4


def test_a_token_without_a_draft_has_no_mark(words):
    """Plain decoding looks plain on a terminal too: where nothing was drafted nothing is marked."""
    out = Terminal()
    stream = show.Stream(words, out)
    stream.first(words.encode("a")[0])
    stream.round(Round([], 0, words.encode("b"), 0.0, 0.0))
    stream.end()
    assert out.getvalue() == "ab\n"


def test_a_terminal_breaks_lines_between_words(words, monkeypatch):
    """On a terminal no word is cut at the right edge, and a file gets the text as it is."""
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = "Question: what is broken between its words?\nThis."
    seen, file = Terminal(), io.StringIO()
    for out in (seen, file):
        show.Stream(words, out).prompt(text)
    plain = re.sub(r"\x1b\[[\d;]*m", "", seen.getvalue())
    assert plain.splitlines() == ["Question: what is", "broken between its", "words?", "This."]
    assert file.getvalue() == text


def test_lines_are_broken_without_colour_too(words, monkeypatch):
    """NO_COLOR takes the colour and the marks away, not the line ends; and nothing from the model
    reaches the terminal raw."""
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    show.Stream(words, out).prompt("Question: what is broken between\x1b its words?")
    assert out.getvalue() == "Question: what is\nbroken between␛ its\nwords?"


@pytest.mark.parametrize("setting, value", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_who_wants_no_colour_gets_text(words, monkeypatch, setting, value):
    """NO_COLOR, or a terminal that cannot, gets plain text."""
    monkeypatch.setenv(setting, value)
    out = Terminal()
    stream = show.Stream(words, out)
    stream.round(Round([], 0, words.encode("a"), 0.0, 0.0))
    stream.end()
    assert out.getvalue() == "a\n"


def test_a_model_cannot_command_your_terminal():
    """Control characters in a model's text are made visible, so no escape sequence gets through."""
    found = show.paint("a\x1b[2Jb\x9b\x07c\nd", "accepted")
    assert found.replace("\x1b[38;5;32m", "").replace("\x1b[0m", "") == "a␛[2Jb␡␇c\nd"


def test_a_table():
    """The first column stands left, the others right, and no line has blanks at its end."""
    found = show.table(["", "tau"], [["maths", "9.25"], ["c", "1"]])
    assert found.splitlines() == ["        tau", "maths  9.25", "c         1"]


# ---------------------------------------------------------------------- never half a character


@given(st.text(), st.data())
@settings(max_examples=60)
def test_half_a_character_is_never_shown(words, text, data):
    """However tokens arrive, each piece of text is whole characters, and all pieces together are
    the text: Chinese, emoji and all."""
    ids, shown = words.encode(text, add_special_tokens=False), ""
    detokenizer = show.Detokenizer(words)
    while ids:
        count = data.draw(st.integers(1, min(4, len(ids))))
        shown += detokenizer.put(ids[:count])
        ids = ids[count:]
        assert text.startswith(shown)
    assert shown + detokenizer.end() == text


def test_an_emoji_waits_for_its_last_byte(words):
    """Four tokens of one byte each are shown as one emoji, with the fourth."""
    ids = words.encode("😀")
    assert len(ids) == 4
    detokenizer = show.Detokenizer(words)
    assert [detokenizer.put([i]) for i in ids] == ["", "", "", "😀"]


def test_bytes_that_never_become_a_character(words):
    """A broken character is kept back until it is certain that it is broken, and lost never."""
    half = words.encode("😀")[:2]
    detokenizer = show.Detokenizer(words)
    assert detokenizer.put(half) == ""
    assert detokenizer.put(words.encode("a")) == words.decode([*half, *words.encode("a")])
    assert detokenizer.put(half) + detokenizer.end() == words.decode(half)


def test_a_rejected_half_character_is_left_out(words):
    """Looking at rejected tokens changes nothing and shows whole characters only."""
    detokenizer, half = show.Detokenizer(words), words.encode("😀")[:2]
    detokenizer.put(words.encode("ab"))
    assert detokenizer.peek([*words.encode("c"), *half]) == "c"
    assert detokenizer.put(words.encode("d")) == "d"


# ---------------------------------------------------------------------- watching a real loop


@given(st.integers(0, 20), st.text(min_size=1, max_size=8), st.sampled_from("dpn"))
@settings(max_examples=20)
def test_a_watched_generation_is_shown_whole(pair, count, prompt, kind):
    """Whatever drafts and however much is written, the stream shows the prompt and the tokens'
    text, and watching changes no token."""
    drafter = {"d": pair.drafter(), "p": NoDrafter(), "n": NGramDrafter(4)}[kind]
    ids = pair.encode(prompt)
    expected = speculate(pair.target, drafter, ids, count, pair.stop_ids)
    out = io.StringIO()
    stream = show.Stream(pair.tokenizer, out)
    stream.prompt(prompt)
    found = speculate(pair.target, stream.watch(drafter), ids, count, pair.stop_ids,
                      on_round=stream.round)  # fmt: skip
    stream.end(found)
    assert found.tokens == expected.tokens
    assert out.getvalue() == prompt + pair.decode(found.tokens) + "\n"


# ---------------------------------------------------------------------- pictures


def pictures(words):
    return {
        "mask": show.mask(torch.eye(3).bool(), title="mask"),
        "rounds": show.rounds(MADE, words, "rounds"),
        "acceptance": show.acceptance({"DFlash": MADE, "n-gram": [MADE, MADE]}),
        "survival": show.survival(MADE),
        "timeline": show.timeline({"DFlash": MADE}),
        "curves": show.curves({"a": [{"step": 1, "loss": 3.0}, {"step": 2}]}, title="curves"),
        "bars": show.bars({"greedy": 1.0, "DFlash": 5.0}, "x", "bars", reference=1.0),
        "groups": show.bars({"DFlash": {"maths": 9.0}, "n-gram": {"code": 1.0}}, title="groups"),
    }


def test_every_picture_also_has_a_text(words):
    """A notebook gets an image and a text of every picture; the text alone says what is drawn."""
    for name, picture in pictures(words).items():
        bundle = picture._repr_mimebundle_()
        assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG"), name
        assert bundle["text/plain"] == repr(picture) and picture.text, name


def test_the_same_picture_has_the_same_bytes(words):
    """Drawn twice, a picture is the same file: rebuilding a notebook changes nothing."""
    first, second = pictures(words), pictures(words)
    assert all(first[name].png() == second[name].png() for name in first)


def test_a_picture_is_saved(words, tmp_path):
    """save writes the PNG."""
    show.survival(MADE).save(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_rounds_say_in_text_what_they_draw(words):
    """The picture of rounds names every round, what it wrote, and every fate by its glyph."""
    ids = [words.encode(c)[0] for c in "abcd"]
    made = Generation([], [Round(ids[:3], 1, [ids[0], ids[3]], 0, 0)] * 20)
    found = show.rounds(made, words, most=2)
    assert found.text.splitlines() == [
        "round  1  wrote  2:  ✓ a  ✗ b c  + d",
        "round  2  wrote  2:  ✓ a  ✗ b c  + d",
        "... and 18 more rounds",
    ]
    drawn = [text.get_text() for text in found.figure.axes[0].texts]
    assert drawn == [*"adbc", *"adbc"]
    legend = [text.get_text() for text in found.figure.legends[0].get_texts()]
    assert legend == ["✓ accepted", "+ bonus", "✗ rejected"]
    assert found.figure.axes[0].get_xlabel() == "... and 18 more rounds", "the picture is cut, too"
    assert not show.rounds(made, words, most=20).figure.axes[0].get_xlabel()


def test_a_timeline_says_when_it_is_cut():
    """A lane that shows its first rounds only says of how many, in the picture and in the text."""
    long, short = (Generation([], [Round([1], 1, [1, 2], 0.1, 0.1)] * n) for n in (20, 3))
    found = show.timeline({"long": long, "short": short}, "t", most=12)
    labels = [text.get_text() for text in found.figure.axes[0].get_yticklabels()]
    assert labels == ["long\nfirst 12 of 20 rounds", "short"]
    assert found.text.splitlines() == [
        "t", "long: first 12 of 20 rounds wrote 24 tokens", "short: 3 rounds wrote 6 tokens"
    ]


def test_a_dollar_is_a_dollar(words):
    """Text with dollar signs or backslashes is drawn as it is, never as a formula."""
    ids = words.encode("$x_1$ \\frac")
    show.rounds(Generation([], [Round(ids, len(ids), ids, 0, 0)]), words, "$a$").png()
    show.mask([[1]], ["$a"], ["$b$"], "$\\c$").png()


def test_survival_never_rises():
    """Slot 1 was kept in one of two rounds; slot 2 whenever it was judged: half of the rounds."""
    made = Generation([], [Round([1, 2], 2, [1, 2, 3], 0, 0), Round([1], 0, [5], 0, 0)])
    assert show.survival(made).text.splitlines()[1] == "0.50 0.50"


def test_the_histogram_of_a_known_generation():
    """Rounds that wrote 3 and 1 tokens: half and half, and tau is 2."""
    made = Generation([], [Round([1, 2], 2, [1, 2, 3], 0, 0), Round([1], 0, [5], 0, 0)])
    picture = show.acceptance(made)
    assert picture.text.splitlines()[1] == "tau = 2.00 over 2 rounds"
    assert [bar.get_height() for bar in picture.figure.axes[0].patches] == [0.5, 0, 0.5]


def test_series_differ_in_more_than_colour(words):
    """Bars of two series differ in hatch, and lines in dash and marker."""
    drawn = show.bars({"a": {"x": 1.0}, "b": {"x": 2.0}}).figure.axes[0].patches
    assert len({bar.get_hatch() for bar in drawn}) == 2
    lines = show.curves({"a": ([1], [1]), "b": ([1], [2])}).figure.axes[0].lines
    assert len({line.get_linestyle() for line in lines}) == 2
    assert len({line.get_marker() for line in lines}) == 2


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_letters_can_be_read_on_their_colour():
    """White on the accepted blue and black on the others have a contrast of 4.5 or more."""
    for fate, colour in show.COLOURS.items():
        light = luminance(colour)
        contrast = 1.05 / (light + 0.05) if fate == "accepted" else (light + 0.05) / 0.05
        assert contrast >= 4.5, f"{fate}: {contrast:.1f}"


# ---------------------------------------------------------------------- messages


@pytest.mark.parametrize("call, message", [
    (lambda: show.mask([[1]], ["a", "b"]), "row_labels has 2 labels; the mask has 1"),
    (lambda: show.mask_text([[1, 0]], None, ["a"]), "column_labels has 1 labels; the mask has 2"),
    (lambda: show.mask(torch.zeros(2, 2, 2)), "mask must be .queries keys."),
    (lambda: show.mask([[2]]), "the mask holds 2, but kinds names only 1"),
    (lambda: show.acceptance(Generation()), "no rounds to draw"),
    (lambda: show.timeline({"a": Generation()}), "no rounds to draw in 'a'"),
    (lambda: show.bars({}), "groups is empty"),
    (lambda: show.curves({"a": [{"step": 1}]}), "no entry of 'a' has both 'step' and 'loss'"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused(call, message):
    """Labels that do not fit, and nothing to draw, are named."""
    with pytest.raises(ValueError, match=message):
        call()


def test_refused_guesses_show_no_half_characters():
    """Bytes that make no character appear as a dot, also in the middle of a refused guess."""

    class Bytes:
        def decode(self, ids, **options):
            return "".join("a\ufffdb" if i == 1 else "x" for i in ids)

    out = io.StringIO()
    stream = show.Stream(Bytes(), out, colour=True)
    stream.round(Round([1, 2], 0, [3], 0.0, 0.0))
    assert "✗a·bx" in out.getvalue() and "\ufffd" not in out.getvalue()
