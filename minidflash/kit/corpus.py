"""Wild text: the standard library's own sources, which every Python has.

Nothing is downloaded. The files are those of the Python that runs, so they differ a little between
Python versions. The split is by file, from the SHA-256 of its path below the library's folder, so a
file is never in both splits.
"""

import hashlib
import re
import sysconfig
from pathlib import Path

from minidflash.kit.world import Dice, check_split

HELD_OUT_BUCKETS = 20
LEFT_OUT = frozenset(
    "test tests idlelib encodings lib2to3 __pycache__ site-packages dist-packages pydoc_data"
    " turtledemo ensurepip lib-dynload".split()
)
GENERATED = frozenset(
    "html/entities.py token.py keyword.py _markupbase.py __phello__.foo.py sre_constants.py".split()
)


def is_held_out(path: str) -> bool:
    """Whether the file at this path below the library's folder is held out: about one in twenty."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % HELD_OUT_BUCKETS == 0


def _wanted(path: Path) -> bool:
    name = path.as_posix()
    if LEFT_OUT & set(path.parts) or name in GENERATED:
        return False
    return not any(
        part.startswith(("config-", "_sysconfigdata", "__phello__")) for part in path.parts
    )


def _is_prose(text: str) -> bool:
    """False for nearly empty files and for tables: many digits or very long lines."""
    digits = sum(map(text.count, "0123456789"))
    longest = max(map(len, text.split("\n")))
    return len(text) >= 400 and digits < 0.08 * len(text) and longest < 400


def wild_files(split: str, folder: str | Path | None = None) -> list[tuple[str, str]]:
    """Return (path, text) of each source file of a split, sorted by path.

    Tests, idlelib, the encodings' tables, installed packages and generated data are left out. Every
    line ends in a plain line feed.

    Args:
        split: "train" or "held_out".
        folder: where to look; the running Python's standard library if not given.

    Raises:
        ValueError: for an unknown split, or when the folder has no such file.
    """
    check_split(split)
    root = Path(folder) if folder is not None else Path(sysconfig.get_paths()["stdlib"])
    found = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if _wanted(path.relative_to(root))
    )
    chosen = []
    for name in found:
        if is_held_out(name) == (split == "held_out"):
            text = (root / name).read_bytes().decode("utf-8", errors="replace")
            text = text.replace("\r\n", "\n").replace("\r", "\n")
            if _is_prose(text):
                chosen.append((name, text))
    if not chosen:
        raise ValueError(f"folder is {str(root)!r}; it holds no {split} source files")
    return chosen


def wild_text(split: str, folder: str | Path | None = None) -> str:
    """Return all texts of a split in one string, in the order of `wild_files`."""
    return "\n".join(text for _, text in wild_files(split, folder))


def wild_prompts(
    count: int, seed: int = 0, split: str = "held_out", folder: str | Path | None = None
) -> list[str]:
    """Return prompts of 150 to 400 characters that stop in the middle of real Python.

    Each is a run of whole lines of one file and ends after a `def` line and the first line of its
    docstring, without its line end: the tokenizer joins that with the next line's indentation, so a
    prompt that ends in it would end in a token that the models hardly ever saw.

    Args:
        count: how many prompts; all different.
        seed: which ones.
        split: "held_out" (never seen in training) or "train".
        folder: as in `wild_files`.

    Raises:
        ValueError: when the split has fewer such places than `count`.
    """
    places = []
    for _, text in wild_files(split, folder):
        lines = text.split("\n")
        for i in range(1, len(lines)):
            if re.match(r"\s*def .*:$", lines[i - 1]) and re.match(r'\s*r?"""\S', lines[i]):
                start, size = i + 1, 0
                while start and size < 150:
                    start -= 1
                    size += len(lines[start]) + 1
                if 150 <= size <= 400:
                    places.append("\n".join(lines[start : i + 1]).lstrip("\n"))
    places = sorted({place for place in places if len(place) >= 150})
    if not 0 <= count <= len(places):
        raise ValueError(
            f"count is {count}; the {split} files have {len(places)} places for a prompt"
        )
    return Dice(f"wild prompts {seed}").sample(places, count)
