"""Pages that are made, not written: results, the specification with its tests, README's figures.

    python docs/pages.py readme     write README's table of figures from docs/results/shipped.json
    python docs/pages.py check      exit with 1 if that would change it

The site's build (conf.py) calls the others.
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

from minidflash.kit import spec

HOUSE = Path(__file__).parent.parent
RESULTS = HOUSE / "docs" / "results"
BEGIN, END = "<!-- figures: made by python docs/pages.py readme -->", "<!-- /figures -->"

COLUMNS = {  # of the figures of kit/bench, with the words that stand above them
    "tau": "acceptance length", "speedup": "speed-up", "tokens_per_s": "tokens/s",
    "draft_ms": "draft ms", "verify_ms": "verify ms", "distinct4": "distinct 4-grams",
    "identical": "identical",
}


def said(value: Any) -> str:
    """One figure as text: three significant digits at most behind the point."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    text = "" if value is None else str(value).replace("\n", " ")
    return re.sub(r"([|$<\[\]])", r"\\\1", text)  # what Markdown would take for its own


def table(head: list[str], rows: list[list[Any]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return [*lines, *("| " + " | ".join(said(x) for x in row) + " |" for row in rows), ""]


def is_flat(value: Any) -> bool:
    """Whether a dict holds nothing but plain values."""
    return isinstance(value, dict) and not any(isinstance(x, dict | list) for x in value.values())


def bench(found: dict[str, Any]) -> list[str]:
    """The tables of a file that kit/bench wrote: all prompts, then one kind after the other."""
    rows = [["all", name, *(f.get(k) for k in COLUMNS)] for name, f in found["overall"].items()]
    for kind, decoders in found.get("by_kind", {}).items():
        rows += [[kind, name, *(f.get(k) for k in COLUMNS)] for name, f in decoders.items()]
    return table(["prompts", "decoder", *COLUMNS.values()], rows)


def anything(value: Any, name: str, level: int = 4) -> list[str]:
    """Any JSON as tables: uniform rows become one table, the rest headings and lists."""
    title = [f"{'#' * min(level, 6)} {name.replace('_', ' ')}", ""] if name else []
    if is_flat(value):
        rows = [[k.replace("_", " "), v] for k, v in value.items()]
        return [*title, *table(["", ""], rows)] if rows else []
    if isinstance(value, dict):
        values = list(value.values())
        if level > 2 and all(is_flat(x) for x in values):
            keys = list(dict.fromkeys(k for x in values for k in x))
            rows = [[k, *(x.get(key) for key in keys)] for k, x in value.items()]
            return [*title, *table(["", *keys], rows)]
        plain = {k: x for k, x in value.items() if not isinstance(x, dict | list)}
        head = anything(plain, "") if plain else []
        nested = {k: x for k, x in value.items() if k not in plain}
        below = [line for k, x in nested.items() for line in anything(x, k, level + 1)]
        return [*title, *head, *below]
    if isinstance(value, list) and value and all(is_flat(x) for x in value):
        keys = list(dict.fromkeys(k for x in value for k in x))
        shown = table(keys, [[x.get(key) for key in keys] for x in value[:40]])
        more = [f"({len(value) - 40} more rows in the file.)", ""] if len(value) > 40 else []
        return [*title, *shown, *more]
    if isinstance(value, list):
        shown = [x for x in value if not isinstance(x, dict | list)]
        nested = f"{len(value)} entries, in the file" if len(shown) < len(value) else ""
        return [*title, nested or ", ".join(map(said, shown[:60])), ""]
    return [*title, said(value), ""]


def setting(found: dict[str, Any]) -> list[str]:
    """Where and with what it was measured, in one line."""
    told = found.get("setting") or found.get("made_with") or {}
    if not told:
        return ["*The file does not say where it was measured.*", ""]
    flat = {k: v for k, v in told.items() if not isinstance(v, dict | list)}
    return ["*Measured with:* " + ", ".join(f"{k} {said(v)}" for k, v in flat.items()) + ".", ""]


def results(folder: Path = RESULTS) -> str:
    """Every file of results as tables, each with a link to the file."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        lines += [f"## {path.stem.replace('_', ' ')}", ""]
        lines += [f"The file: {{download}}`{path.name} </docs/results/{path.name}>`.", ""]
        if not isinstance(found, dict):
            lines += anything(found, "")
            continue
        lines += setting(found)
        rest = {k: v for k, v in found.items() if k not in ("setting", "made_with")}
        rows = rest.get("overall", {})
        if rows and all(isinstance(f, dict) and "tau" in f for f in rows.values()):
            lines += bench(rest)
            rest = {k: v for k, v in rest.items() if k not in ("overall", "by_kind", "prompts")}
        lines += anything(rest, "", 2) if rest else []
    return "\n".join(lines) + "\n"


def specification() -> dict[str, str]:
    """The specification's page, and for each room a page with its tests; by file name."""
    pages, front = {}, ["# The specification", ""]
    front += ["Every sentence is a test, and leads to it. `make spec` runs them all.", ""]
    for path in spec.specs().values():
        title, what = spec.heading(path)
        number, lines = title.split()[0], path.read_text().splitlines()
        front += [f"## {title}", "", what[:1].upper() + what[1:], ""]
        page = [f"# The tests of {title}", ""]
        page += [f"From `tests/{path.name}`. Run them with `python -m pytest -q tests/{path.name}`;"
                 " helpers stand in the file.", ""]
        for one, node in zip(spec.sentences(path), tests(path), strict=True):
            target = f"spec-{number}-{node.name.replace('_', '-')}"
            marks = f" *(exercise {', '.join(one.exercises)})*" if one.exercises else ""
            front.append(f"- [{one.text}](#{target}){marks}")
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            page += [f"({target})=", f"## {node.name.removeprefix('test_').replace('_', ' ')}", ""]
            page += [f"{one.text}{marks}", "", "````python"]
            page += [*lines[first - 1 : node.end_lineno], "````", ""]
        front.append("")
        pages[f"tests_{path.stem.removeprefix('test_')}"] = "\n".join(page)
    pages["spec"] = "\n".join(front)
    return pages


def tests(path: Path) -> list[ast.FunctionDef]:
    """The tests of a file in the order of `spec.sentences`."""
    found: list[ast.FunctionDef] = []

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                visit(node.body)
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.append(node)

    visit(ast.parse(path.read_text()).body)
    return found


def figures() -> str:
    """README's block: one table from the shipped pair's results."""
    found = json.loads((RESULTS / "shipped.json").read_text())
    parts = {**found["by_kind"], "**maths, code and chat**": found["overall"]}
    rows = [
        [kind, f"{d['dflash']['tau']:.2f}", f"{d['n-gram']['tau']:.2f}",
         f"{d['dflash']['speedup']:.1f}x", f"{d['dflash']['distinct4']:.2f}",
         d["dflash"]["identical"]]
        for kind, d in parts.items()
    ]  # fmt: skip
    head = ["unseen prompts", "tokens per target pass, DFlash", "n-gram lookup (no training)",
            "speed-up of DFlash", "distinct 4-grams", "same tokens"]  # fmt: skip
    where = found["setting"]
    count = sum(d["dflash"]["prompts"] for d in found["by_kind"].values())
    note = (f"{count} prompts, greedy, {where['threads']} CPU threads, {where['dtype']}, torch"
            f" {where['torch'].split('+')[0]};"
            " from [docs/results/shipped.json](docs/results/shipped.json).")
    return "\n".join([BEGIN, *table(head, rows), note, END])


def with_figures(text: str) -> str:
    """README's text with its block written anew."""
    before, rest = text.split(BEGIN)
    return before + figures() + rest.split(END)[1]


def main(argv: list[str]) -> int:
    """Write or check README's block."""
    path = HOUSE / "README.md"
    text = path.read_text()
    fresh = with_figures(text)
    if argv == ["check"]:
        return int(fresh != text)
    if argv != ["readme"]:
        print(__doc__)
        return 2
    path.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
