"""README's picture: one answer written twice, by plain decoding and by DFlash, pass by pass.

    python docs/picture.py        writes docs/dflash.png from the shipped pair

The prompt is the first of the demo's unseen ones, not a chosen one. Both texts are the same tokens.
"""

from pathlib import Path

from matplotlib.patches import Rectangle

from minidflash.kit import bench, show
from minidflash.kit.models import load
from minidflash.speculate import NoDrafter, speculate

WIDE = 92  # letters in a line


def words(tokenizer, tokens: list[int]) -> list[str]:
    """Each token's own letters, with the line end visible."""
    return [tokenizer.decode([t]).replace("\n", "⏎").replace(" ", "␣") for t in tokens]


def lay(passes: list[list[tuple[str, str]]]) -> tuple[list, list, int]:
    """Boxes (x, y, text, fate) and ticks (x, y), line by line; one tick before every pass."""
    boxes, ticks, x, y = [], [], 0.0, 0
    for one in passes:
        for n, (text, fate) in enumerate(one):
            text = f"+{text}" if fate == "bonus" else text  # never by colour alone
            width = len(text) + 0.6
            if x + width > WIDE:
                x, y = 0.0, y + 1
            if n == 0:
                x += 0.9
                ticks.append((x - 0.45, y))
            boxes.append((x, y, width, text, fate))
            x += width
    return boxes, ticks, y + 1


def draw(axes, passes, title: str) -> None:
    """One text, its boxes coloured by fate, a black bar before each pass of the target."""
    boxes, ticks, lines = lay(passes)
    for x, y, width, text, fate in boxes:
        colour = show.COLOURS[fate]
        axes.add_patch(Rectangle((x, y + 0.14), width, 0.72, facecolor=colour, edgecolor="white"))
        ink = "white" if fate == "accepted" else "black"
        axes.text(x + width / 2, y + 0.5, text, color=ink, ha="center", va="center",
                  family="monospace", fontsize=8, parse_math=False)
    for x, y in ticks:
        axes.plot([x, x], [y + 0.04, y + 0.96], color="black", linewidth=2.2)
    axes.set(xlim=(-0.5, WIDE + 1), ylim=(lines, 0))
    axes.set_title(title, fontsize=10.5, loc="left", parse_math=False)
    axes.axis("off")


def picture() -> show.Picture:
    """Decode the prompt both ways and draw it."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    pair = load("tiny")
    prompt = bench.prompts(1, ("maths",))[0]
    ids = pair.encode(prompt.text)
    plain = speculate(pair.target, NoDrafter(), ids, 96, pair.stop_ids)
    fast = speculate(pair.target, pair.drafter(), ids, 96, pair.stop_ids)
    assert plain.tokens == fast.tokens, "DFlash changed the text"
    slow = [[(word, "prompt")] for word in words(pair.tokenizer, plain.tokens)]
    quick = [[(words(pair.tokenizer, fast.tokens[:1])[0], "bonus")]]
    for one in fast.rounds:
        fates = [(fate, t) for fate, tokens in show.parts(one) if fate != "rejected"
                 for t in tokens]
        texts = words(pair.tokenizer, [t for _, t in fates])
        quick.append([(text, fate) for text, (fate, _) in zip(texts, fates, strict=True)])
    heights = [lay(slow)[2], lay(quick)[2]]
    figure = Figure(figsize=(10, 0.26 * sum(heights) + 1.3), layout="constrained")
    figure.patch.set_facecolor("white")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    count = len(plain.tokens)
    draw(above, slow, f"Plain decoding: {count} tokens, {plain.target_forwards} target passes")
    draw(below, quick, f"DFlash: the same {count} tokens, {fast.target_forwards} target passes,"
         f" {len(fast.rounds)} drafts")
    handles = [Line2D([], [], color="black", linewidth=2.2, marker="", label="one target pass"),
               Patch(facecolor=show.COLOURS["accepted"], label="guessed by the drafter, confirmed"),
               Patch(facecolor=show.COLOURS["bonus"], label="+ written by the target itself")]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    text = f"{count} tokens: {plain.target_forwards} target passes, with DFlash"
    return show.Picture(figure, f"{text} {fast.target_forwards}")


if __name__ == "__main__":
    made = picture()
    made.save(Path(__file__).parent / "dflash.png")
    print(made)
