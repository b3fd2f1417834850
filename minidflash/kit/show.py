"""What a reader sees: masks, rounds, histograms, timelines, training curves, and streamed text.

Every picture is a `Picture`: put it on the last line of a notebook cell, or call `.save(path)`. It
always carries a text as well, for terminals and screen readers. Colours are Okabe and Ito's, which
colour-blind readers can tell apart, and never stand alone: a glyph or a hatch says the same.

    accepted  blue ✓    rejected  orange ✗    bonus  purple +    prompt  grey

Everything is drawn from the records of room 08 (`Generation`, `Round`); nothing is measured here.
matplotlib is imported only when something is drawn: streaming to a terminal does without.
"""

import base64
import io
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from minidflash import measure
from minidflash.speculate import Drafter, Generation, Round

COLOURS = {"accepted": "#0072B2", "rejected": "#E69F00", "bonus": "#CC79A7", "prompt": "#BBBBBB"}
GLYPHS = {"accepted": "✓", "rejected": "✗", "bonus": "+", "prompt": ""}
ANSI = {
    "accepted": "38;5;32", "rejected": "9;38;5;172", "bonus": "1;38;5;175", "prompt": "38;5;245",
}
# For series that mean none of the four: colour, hatch, marker and line style go together.
SERIES = (
    ("#0072B2", "", "o", "-"),
    ("#E69F00", "////", "s", "--"),
    ("#009E73", "....", "^", "-."),
    ("#CC79A7", "\\\\\\\\", "D", ":"),
    ("#56B4E9", "", "v", "-"),
    ("#D55E00", "++++", "P", "--"),
)


class Picture:
    """A matplotlib figure and the same thing said in text.

    Attributes:
        figure: the `matplotlib.figure.Figure`, to change it further.
        text: what stands in its place where pictures cannot be seen.
    """

    def __init__(self, figure: Any, text: str):
        self.figure, self.text = figure, text

    def png(self) -> bytes:
        """The picture as PNG; the same figure gives the same bytes."""
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            # A token may hold a letter that the font lacks: it is drawn as a box.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            self.figure.savefig(
                buffer, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None}
            )
        return buffer.getvalue()

    def save(self, path: str | Path) -> None:
        """Write the PNG to a file."""
        Path(path).write_bytes(self.png())

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        image = base64.b64encode(self.png()).decode()
        return {"text/plain": self.text, "image/png": image}


def _axes(width: float, height: float, title: str, rows: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, 1)
    if title:
        (axes[0] if rows > 1 else axes).set_title(title, fontsize=11, parse_math=False)
    return figure, axes


def _calm(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


# --------------------------------------------------------------------------------------------------
# masks


def _cells(mask: Any) -> list[list[int]]:
    rows = mask.tolist() if hasattr(mask, "tolist") else [list(row) for row in mask]
    if not rows or not isinstance(rows[0], list) or not rows[0] or isinstance(rows[0][0], list):
        raise ValueError(f"mask must be [queries keys], got shape {getattr(mask, 'shape', None)}")
    return [[int(cell) for cell in row] for row in rows]


def _labels(labels: Sequence[Any] | None, count: int, name: str) -> list[str]:
    found = [str(x) for x in (range(count) if labels is None else labels)]
    if len(found) != count:
        raise ValueError(f"{name} has {len(found)} labels; the mask has {count}")
    return found


def mask_text(
    mask: Any, row_labels: Sequence[Any] | None = None, column_labels: Sequence[Any] | None = None
) -> str:
    """A mask as text: row = who looks, column = what is looked at, ■ where it may look.

    A mask of whole numbers shows them, and · for 0.

    >>> print(mask_text([[1, 0], [1, 1]], ["a", "b"]))
      0 1
    a ■ ·
    b ■ ■

    Raises:
        ValueError: the mask has not two axes, or the labels do not fit it.
    """
    cells = _cells(mask)
    rows = _labels(row_labels, len(cells), "row_labels")
    columns = _labels(column_labels, len(cells[0]), "column_labels")
    left, width = max(map(len, rows)), max(map(len, columns))
    several = max(max(row) for row in cells) > 1
    lines = [" " * left + "".join(f" {c:>{width}}" for c in columns)]
    for label, row in zip(rows, cells, strict=True):
        shown = ("·" if not x else str(x) if several else "■" for x in row)
        lines.append(f"{label:<{left}}" + "".join(f" {x:>{width}}" for x in shown))
    return "\n".join(lines)


def mask(
    mask: Any,
    row_labels: Sequence[Any] | None = None,
    column_labels: Sequence[Any] | None = None,
    title: str = "",
    kinds: Sequence[str] = ("may look",),
    row_breaks: Sequence[int] = (),
    column_breaks: Sequence[int] = (),
) -> Picture:
    """A mask as a picture: row = who looks, column = what is looked at.

    Args:
        mask: [queries keys]. Bool (True = may look), or whole numbers: 0 is hidden and n is drawn
            and named as `kinds[n - 1]`, so that one picture can show several reasons to look.
        row_labels: one per row; their numbers if not given.
        column_labels: one per column.
        title: above the picture.
        kinds: names for the legend.
        row_breaks: draw a line above these rows (where a block starts).
        column_breaks: draw a line left of these columns.

    Raises:
        ValueError: the mask has not two axes, or labels or kinds do not fit it.
    """
    cells = _cells(mask)
    height, width = len(cells), len(cells[0])
    rows = _labels(row_labels, height, "row_labels")
    columns = _labels(column_labels, width, "column_labels")
    if (most := max(max(row) for row in cells)) > min(len(kinds), len(SERIES)):
        raise ValueError(f"the mask holds {most}, but kinds names only {len(kinds)}")
    from matplotlib.patches import Patch, Rectangle

    size = min(0.3, 9 / max(width, height))
    figure, axes = _axes(width * size + 1.6, height * size + 1.4, title)
    for y, row in enumerate(cells):
        for x, kind in enumerate(row):
            colour, hatch = ("white", "//") if not kind else SERIES[kind - 1][:2]
            edge = "#cccccc" if not kind else "white"
            cell = Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=edge, linewidth=0.5)
            cell.set_hatch(hatch)
            axes.add_patch(cell)
    for place in row_breaks:
        axes.axhline(place, color="black", linewidth=1.5)
    for place in column_breaks:
        axes.axvline(place, color="black", linewidth=1.5)
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    font = {"fontsize": min(9, 30 * size), "parse_math": False}
    turned = 90 if max(map(len, columns)) > 2 else 0
    axes.set_xticks([x + 0.5 for x in range(width)], columns, rotation=turned, **font)
    axes.set_yticks([y + 0.5 for y in range(height)], rows, **font)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_xlabel("is looked at (key)")
    axes.set_ylabel("looks (query)")
    used = sorted({x for row in cells for x in row})
    legend = []
    for x in used:
        colour, hatch = ("white", "////") if not x else SERIES[x - 1][:2]
        name, edge = ("hidden", "#cccccc") if not x else (kinds[x - 1], "white")
        legend.append(Patch(facecolor=colour, edgecolor=edge, hatch=hatch, label=name))
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    return Picture(figure, f"{title}\n{mask_text(mask, rows, columns)}".strip())


# --------------------------------------------------------------------------------------------------
# rounds


def parts(one: Round) -> list[tuple[str, list[int]]]:
    """A round's tokens by fate: accepted, rejected, bonus. Nothing is rejected behind a stop token.

    >>> parts(Round([5, 9, 4], 1, [5, 8], 0.0, 0.0))
    [('accepted', [5]), ('rejected', [9, 4]), ('bonus', [8])]
    """
    bonus = one.emitted[one.accepted :]
    rejected = one.proposed[one.accepted :] if bonus else []
    return [("accepted", one.emitted[: one.accepted]), ("rejected", rejected), ("bonus", bonus)]


def _token(tokenizer: Any, token: int) -> str:
    text = tokenizer.decode([token]) if tokenizer is not None else str(token)
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")


def rounds(
    generation: Generation, tokenizer: Any = None, title: str = "", most: int = 16
) -> Picture:
    """One row per round: accepted tokens, the bonus token, and behind a gap what was rejected.

    Args:
        generation: what `speculate` returned.
        tokenizer: to show text; without one, ids are shown.
        title: above the picture.
        most: rounds to draw; the last line says how many were left out.
    """
    from matplotlib.patches import Patch, Rectangle

    shown = generation.rounds[:most]
    lines, laid = [title] if title else [], []
    for number, one in enumerate(shown, 1):
        cells = {fate: [_token(tokenizer, t) for t in tokens] for fate, tokens in parts(one)}
        said = [f"{GLYPHS[fate]} {' '.join(cells[fate])}" for fate in cells if cells[fate]]
        lines.append(f"round {number:>2}  wrote {len(one.emitted):>2}:  " + "  ".join(said))
        laid.append(cells)
    if left := len(generation.rounds) - len(shown):
        lines.append(f"... and {left} more round{'s' * (left > 1)}")
    widest = 1.0
    figure, axes = _axes(10, 0.36 * max(1, len(laid)) + 1.0, title)
    for y, cells in enumerate(laid):
        x = 0.0
        for fate in ("accepted", "bonus", "rejected"):
            x += 0.8 if fate == "rejected" and cells[fate] else 0
            for text in cells[fate]:
                width = 0.75 * len(text) + 0.7
                box = Rectangle((x, y + 0.1), width, 0.8, facecolor=COLOURS[fate])
                # Rejected tokens are pale, so that black letters stay readable over the hatch.
                box.set(edgecolor="white", linewidth=0.8, alpha=0.45 if fate == "rejected" else 1)
                if fate == "rejected":
                    box.set(hatch="///", edgecolor="#8a5f00")
                axes.add_patch(box)
                ink = "white" if fate == "accepted" else "black"
                where = {"ha": "center", "va": "center", "family": "monospace", "fontsize": 7.5}
                axes.text(x + width / 2, y + 0.5, text, color=ink, parse_math=False, **where)
                x += width
        widest = max(widest, x)
    axes.set(xlim=(0, max(widest, 60)), ylim=(max(1, len(laid)), 0))
    names = [f"{n}: {len(one.emitted)}" for n, one in enumerate(shown, 1)]
    axes.set_yticks([y + 0.5 for y in range(len(names))], names, fontsize=8)
    axes.set_ylabel("round: tokens written", fontsize=9)
    axes.set_xticks([])
    if left:
        axes.set_xlabel(lines[-1], fontsize=9, loc="left")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.set_size_inches(min(14, max(6, max(widest, 60) * 0.088)), figure.get_size_inches()[1])
    handles = [
        Patch(facecolor=COLOURS[fate], hatch="///" if fate == "rejected" else "",
              edgecolor="#8a5f00" if fate == "rejected" else "white",
              alpha=0.45 if fate == "rejected" else 1, label=f"{GLYPHS[fate]} {fate}")
        for fate in ("accepted", "bonus", "rejected")
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return Picture(figure, "\n".join(lines))


# --------------------------------------------------------------------------------------------------
# figures of many rounds

Runs = Generation | Sequence[Generation] | Mapping[str, Any]


def _named(runs: Runs) -> dict[str, list[Generation]]:
    if isinstance(runs, Generation):
        runs = {"": runs}
    elif not isinstance(runs, Mapping):
        runs = {"": runs}
    return {k: [v] if isinstance(v, Generation) else list(v) for k, v in runs.items()}


def _rounds_of(runs: Runs) -> dict[str, list[Round]]:
    found = {name: [r for g in runs for r in g.rounds] for name, runs in _named(runs).items()}
    if empty := [name for name, seen in found.items() if not seen]:
        raise ValueError(f"no rounds to draw{f' in {empty[0]!r}' if empty[0] else ''}")
    return found


def acceptance(runs: Runs, title: str = "Tokens written per round") -> Picture:
    """Histogram: in which share of the rounds were 1, 2, 3, ... tokens written, the bonus included?

    Args:
        runs: one `Generation`, several, or a dict of name -> one or several to compare.
        title: above the picture.
    """
    found = _rounds_of(runs)
    longest = max(len(r.emitted) for seen in found.values() for r in seen)
    lines, groups = [title], {}
    for name, seen in found.items():
        lengths = [len(r.emitted) for r in seen]
        tau = sum(lengths) / len(lengths)
        label = f"{name}  tau = {tau:.2f}".strip()
        groups[label] = {n: lengths.count(n) / len(seen) for n in range(1, longest + 1)}
        lines.append(f"{label} over {len(seen)} rounds")
    picture = bars(groups, ylabel="share of rounds", title=title, values=False)
    picture.figure.axes[0].set_xlabel("tokens written in the round (accepted + bonus)")
    return Picture(picture.figure, "\n".join(lines))


def survival(runs: Runs, title: str = "How often slot k survives") -> Picture:
    """How likely each slot is kept, by room 18's estimate: a text's end is no refusal.

    Args:
        runs: as in `acceptance`.
        title: above the picture.
    """
    lines, series = [title], {}
    for name, seen in _rounds_of(runs).items():
        ys = measure.survival(seen)
        series[name] = (list(range(1, len(ys) + 1)), ys)
        lines.append(f"{name}: ".lstrip(": ") + " ".join(f"{y:.2f}" for y in ys))
    picture = curves(series, xlabel="slot k of the block", ylabel="kept", title=title)
    picture.figure.axes[0].set_ylim(0, 1.02)
    return Picture(picture.figure, "\n".join(lines))


def bars(
    groups: Mapping[Any, Any], ylabel: str = "", title: str = "", values: bool = True,
    reference: float | None = None,
) -> Picture:
    """Bars, one per name; or, for a dict of dicts, one group per inner name and one series each.

    Args:
        groups: {"greedy": 90.0, "DFlash": 310.0}, or {"DFlash": {"maths": 9.1, "code": 9.8}, ...}.
        ylabel: what the height means, with its unit.
        title: above the picture.
        values: write each height above its bar.
        reference: draw a dashed line at this height.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not groups:
        raise ValueError("groups is empty: no bar to draw")
    if isinstance(next(iter(groups.values())), Mapping):
        series = {str(k): dict(v) for k, v in groups.items()}
    else:
        series = {"": dict(groups)}
    names = list(dict.fromkeys(n for inner in series.values() for n in inner))
    wide = max(5.0, min(11.0, 0.45 * len(names) * len(series) + 2))
    figure, axes = _axes(wide, 3.4, title)
    width, lines = 0.8 / len(series), [title] if title else []
    for i, (name, inner) in enumerate(series.items()):
        colour, hatch = SERIES[i % len(SERIES)][:2]
        xs = [names.index(n) + (i - (len(series) - 1) / 2) * width for n in inner]
        drawn = axes.bar(xs, list(inner.values()), width * 0.95, color=colour, hatch=hatch,
                         edgecolor="white", label=name)
        if values:
            axes.bar_label(drawn, fmt="{:.3g}", fontsize=8)
        said = "  ".join(f"{n} {v:.3g}" for n, v in inner.items())
        lines.append(f"{name}: {said}" if name else said)
    if reference is not None:
        axes.axhline(reference, color="black", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(names)), [str(n) for n in names], fontsize=9, parse_math=False)
    axes.set_ylabel(ylabel)
    _calm(axes)
    if len(series) > 1 or next(iter(series)):
        axes.legend(frameon=False, fontsize=9)
    return Picture(figure, "\n".join(lines))


def timeline(
    runs: Runs, title: str = "Where the time goes", most: int = 12
) -> Picture:
    """Draft, verify and the rest of each round on one clock, one lane per run.

    Args:
        runs: a `Generation`, or a dict of name -> `Generation` to compare on the same clock.
        title: above the picture.
        most: rounds to draw; a lane that has more says so.
    """
    from matplotlib.patches import Patch

    lanes = {name: found[0] for name, found in _named(runs).items()}
    figure, axes = _axes(10, 0.7 * len(lanes) + 1.4, title)
    labels, lines = [], [title]
    used = (SERIES[4], SERIES[2], (COLOURS["prompt"], "", "", ""))
    for y, (name, run) in enumerate(lanes.items()):
        if not run.rounds:
            raise ValueError(f"no rounds to draw{f' in {name!r}' if name else ''}")
        busy = sum(r.draft_seconds + r.verify_seconds for r in run.rounds)
        rest = max(0.0, run.seconds - run.prefill_seconds - busy) / len(run.rounds) * 1e3
        clock = 0.0
        for one in run.rounds[:most]:
            start = clock
            spans = (one.draft_seconds * 1e3, one.verify_seconds * 1e3, rest)
            for (colour, hatch, *_), ms in zip(used, spans, strict=True):
                axes.barh(y, ms, 0.55, left=clock, color=colour, edgecolor="white",
                          hatch=hatch, linewidth=0.4)
                clock += ms
            axes.text((start + clock) / 2, y - 0.3, len(one.emitted), ha="center", va="bottom",
                      fontsize=8)
        drawn = run.rounds[:most]
        tokens = sum(len(r.emitted) for r in drawn)
        cut = len(drawn) < len(run.rounds)
        of = f"first {len(drawn)} of {len(run.rounds)} rounds" if cut else f"{len(drawn)} rounds"
        lines.append(f"{name}: ".lstrip(": ") + f"{of} wrote {tokens} tokens")
        labels.append("\n".join(filter(None, (name, of if cut else ""))))
    axes.set_yticks(range(len(lanes)), labels, parse_math=False)
    axes.set(ylim=(len(lanes) - 0.5, -0.6), xlabel="milliseconds after the prefill")
    axes.spines[["top", "right", "left"]].set_visible(False)
    spoken = ("draft", "verify", "rest")
    handles = [Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=label)
               for (colour, hatch, *_), label in zip(used, spoken, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False,
                  title="number above a round: tokens it wrote", title_fontsize=8)
    return Picture(figure, "\n".join(lines))


def curves(
    series: Mapping[str, Any] | Sequence[Any], y: str = "loss", x: str = "step", xlabel: str = "",
    ylabel: str = "", title: str = "", log_y: bool = False,
) -> Picture:
    """Lines, each with its own colour, dash and marker.

    Args:
        series: {name: (xs, ys)}, or training logs as `train.fit` returns them: {name: [{"step": 1,
            "loss": 6.9}, ...]}. A single log or pair needs no dict. Entries without `y` are passed.
        y: which key of a log goes up.
        x: which key of a log goes to the right.
        xlabel: `x` if not given.
        ylabel: `y` if not given.
        title: above the picture.
        log_y: a logarithmic axis.

    Raises:
        ValueError: a log has no entry with `x` and `y`.
    """
    named = series if isinstance(series, Mapping) else {"": series}
    figure, axes = _axes(7, 3.6, title)
    lines, logs = [title] if title else [], False
    for i, (name, found) in enumerate(named.items()):
        if len(found) and isinstance(found[0], Mapping):
            kept = [line for line in found if x in line and y in line]
            if not kept:
                raise ValueError(f"no entry of {name!r} has both {x!r} and {y!r}")
            xs, ys, logs = [line[x] for line in kept], [line[y] for line in kept], True
        else:
            xs, ys = (list(values) for values in found)
        colour, _, marker, dash = SERIES[i % len(SERIES)]
        every = max(1, len(xs) // 12)
        axes.plot(xs, ys, dash, color=colour, marker=marker, markevery=every, markersize=5,
                  label=name)
        if xs:
            lines.append(f"{name}: ".lstrip(": ") + f"{ys[0]:.3g} at {xs[0]:g}, "
                         f"{ys[-1]:.3g} at {xs[-1]:g}")
    axes.set_xlabel(xlabel or (x if logs else ""))
    axes.set_ylabel(ylabel or (y if logs else ""))
    if log_y:
        axes.set_yscale("log")
    _calm(axes)
    if any(named):
        axes.legend(frameon=False, fontsize=9)
    return Picture(figure, "\n".join(lines))


# --------------------------------------------------------------------------------------------------
# text as it is written


class Detokenizer:
    """Tokens in, text out, at once, and never half a character.

    A byte-level token may hold only some bytes of a character. Its text is kept back until the rest
    has come. All texts together, `end()` included, are `tokenizer.decode(all_ids)`.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.ids = tokenizer, list[int]()
        # Of `ids`, so many have been written out, and so many characters of their text.
        self.kept, self.done = 0, 0

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def put(self, ids: Iterable[int]) -> str:
        """The text that has become certain through these tokens; "" while a character is open."""
        self.ids += ids
        text = self._decode(self.ids)
        if text.endswith("\ufffd"):  # what decoders write for bytes that make no character yet
            return ""
        new = text[self.done :]
        if new:
            # Keep the last piece: some tokenizers write a space only after another token.
            self.ids = self.ids[self.kept :]
            self.kept, self.done = len(self.ids), len(self._decode(self.ids))
        return new

    def peek(self, ids: Sequence[int]) -> str:
        """The text that these tokens would have added; the tokens are not taken in."""
        return self._decode([*self.ids, *ids])[self.done :].rstrip("\ufffd")

    def end(self) -> str:
        """What is still kept back, a broken character included."""
        new = self._decode(self.ids)[self.done :]
        self.ids, self.kept, self.done = [], 0, 0
        return new


def wants_colour(out: TextIO) -> bool:
    """Whether to colour: `out` is a terminal, NO_COLOR is not set, and TERM is not dumb."""
    return (
        bool(getattr(out, "isatty", lambda: False)())
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )


def paint(text: str, fate: str | None) -> str:
    """ANSI colour around a text, anew on every line, its control characters made visible.

    Without a fate nothing is coloured.

    The text comes from a model: without this it could send commands to your terminal.
    """
    safe = "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text)
    safe = "".join("␡" if 127 <= ord(c) < 160 else c for c in safe)
    if fate is None:
        return safe
    lines = (f"\x1b[{ANSI[fate]}m{line}\x1b[0m" if line else "" for line in safe.split("\n"))
    return "\n".join(lines)


LEGEND = "  ".join(
    paint(f"{GLYPHS[fate]}{fate}", fate) for fate in ("accepted", "rejected", "bonus")
)


class Fold:
    r"""Breaks what is written piece by piece into lines of at most `width`, between words.

    >>> fold = Fold(12)
    >>> fold.put("draft and"), fold.put(" verify"), fold.put("\nok")
    ('draft and', '\nverify', '\nok')
    """

    def __init__(self, width: int):
        self.width, self.column = width, 0

    def put(self, text: str) -> str:
        """The same text, with a line end before each word that would not fit."""
        out = []
        for word in re.findall(r"\n| *[^ \n]+| +", text):
            if self.column and word != "\n" and self.column + len(word) > self.width:
                out.append("\n")
                self.column, word = 0, word.removeprefix(" ")
            out.append(word)
            self.column = 0 if word == "\n" else self.column + len(word)
        return "".join(out)


class Stream:
    """Writes a generation while it is made: give `stream.round` to `speculate` as `on_round`.

    On a terminal the tokens show their fate by colour and glyph: ✓ before accepted tokens, ✗ before
    the rejected ones (struck out), + before the bonus token. A token without a draft before it has
    no fate and no mark. Where there is no terminal the text comes out as it is.

    Args:
        tokenizer: turns ids into text.
        out: where to write; standard output if not given.
        colour: overrides what `wants_colour(out)` finds.
        most_rejected: of a round's rejected tokens show so many; "…" stands for the others.
    """

    def __init__(
        self, tokenizer: Any, out: TextIO | None = None, colour: bool | None = None,
        most_rejected: int = 3,
    ):
        self.out = sys.stdout if out is None else out
        self.colour = wants_colour(self.out) if colour is None else colour
        self.words, self.most, self.count = Detokenizer(tokenizer), most_rejected, 0
        # On a terminal lines are broken between words; elsewhere the text stays as it is.
        wide = getattr(self.out, "isatty", lambda: False)()
        self.fold = Fold(shutil.get_terminal_size().columns) if wide else None

    def _write(self, text: str, fate: str | None) -> None:
        if text:
            # The mark stands before the first word, not before the space or line end in front.
            gap = text[: len(text) - len(text.lstrip(" \n"))] if fate and self.colour else ""
            mark = GLYPHS[fate] if fate and self.colour else ""
            shown = gap + mark + text[len(gap) :]
            shown = self.fold.put(shown) if self.fold else shown
            painted = paint(shown, fate if self.colour else None)
            self.out.write(painted if self.colour or self.fold else text)

    def prompt(self, text: str) -> None:
        """Write the prompt, in grey."""
        self._write(text, "prompt")
        self.out.flush()

    def watch(self, drafter: Drafter) -> Drafter:
        """The same drafter; it also shows the prefill's token, which belongs to no round."""
        return _Watched(drafter, self)

    def first(self, token: int) -> None:
        """Write the token of the prefill, once."""
        if not self.count:
            self.count = 1
            self._write(self.words.put([token]), None)
            self.out.flush()

    def round(self, one: Round) -> None:
        """Write what a round wrote, and on a terminal what it rejected."""
        for fate, tokens in parts(one):
            if fate == "rejected":
                if tokens and self.colour:
                    more = "…" if len(tokens) > self.most else ""
                    text = self.words.peek(tokens[: self.most]).replace("\n", "⏎")
                    text = text.replace("\ufffd", "·") + more  # bytes that make no character
                    self._write(text, fate)
                continue
            self.count += len(tokens)
            self._write(self.words.put(tokens), fate if one.proposed else None)
        self.out.flush()

    def end(self, generation: Generation | None = None) -> None:
        """Write what is still missing (all of it, if no round was watched) and end the line."""
        if generation is not None and self.count < len(generation.tokens):
            self._write(self.words.put(generation.tokens[self.count :]), None)
        self._write(self.words.end(), None)
        self.out.write("\n")
        self.out.flush()


class _Watched(Drafter):
    """Passes everything on; the first anchor it is asked about is the prefill's token."""

    def __init__(self, drafter: Drafter, stream: Stream):
        self.inner, self.stream = drafter, stream
        self.block_size, self.taps = drafter.block_size, drafter.taps

    def begin(self, capacity):
        self.inner.begin(capacity)

    def commit(self, tokens, features):
        self.inner.commit(tokens, features)

    def propose(self, anchor, count):
        self.stream.first(anchor)
        return self.inner.propose(anchor, count)




def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns of text: the first to the left, the others to the right.

    >>> print(table(["kind", "tau"], [["maths", 9.25], ["code", "-"]]))
    kind    tau
    maths  9.25
    code      -
    """
    cells = [[str(x) for x in row] for row in (header, *rows)]
    wide = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        padded = [x.rjust(wide[i]) if i else x.ljust(wide[i]) for i, x in enumerate(row)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
