"""Builds the notebooks and checks that they still say what they said.

``notebooks/NN_room.py`` is the source (jupytext, py:percent), ``NN_room.ipynb`` beside it is the
executed page. ``build`` runs the sources and writes the pages, free of what differs between two
runs; ``check`` runs them again and compares what they print. A cell tagged ``volatile`` (times,
device names) may print something else, and a second build of the same source keeps its output.
"""

import argparse
import difflib
import hashlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from minidflash.kit.start import HOUSE

ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def sources(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """The notebook sources in a folder, in order; all of them, or those that are named.

    Raises:
        ValueError: a name fits no source.
    """
    found = sorted(folder.glob("[0-9][0-9]_*.py"))
    for name in names:
        if not any(name in (path.stem, path.name) for path in found):
            raise ValueError(f"there is no notebook {name!r} in {folder}")
    return [path for path in found if not names or {path.stem, path.name} & set(names)]


def read(source: Path) -> Any:
    """A source as an unexecuted notebook with stable cell ids and no version of anything."""
    import jupytext

    text = source.read_text()
    notebook = jupytext.reads(text, fmt="py:percent")
    for i, cell in enumerate(notebook.cells):
        cell.id = f"{source.stem}-{i:03d}"
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
        "source_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    return notebook


def execute(source: Path, cell_seconds: int = 300, env: Mapping[str, str] = os.environ) -> Any:
    """Run a source in its own folder and return the normalised notebook.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed without the tag ``raises-exception``.
    """
    from nbclient import NotebookClient

    notebook = read(source)
    here = {"PYTHONPATH": os.pathsep.join([str(HOUSE), env.get("PYTHONPATH", "")])}
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    NotebookClient(
        notebook,
        timeout=cell_seconds,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(source.parent)}},
    ).execute(env={**env, **here, **quiet})
    for count, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), 1):
        cell.outputs = _normalise(cell.outputs)
        cell.execution_count = count
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = count
    notebook.metadata = read(source).metadata
    return notebook


def _normalise(outputs: list[Any]) -> list[Any]:
    """Join what a stream printed in pieces; drop addresses, colours, progress bars and widgets."""
    kept: list[Any] = []
    for output in outputs:
        output.pop("transient", None)
        if output.output_type == "stream":
            if kept and kept[-1].output_type == "stream" and kept[-1].name == output.name:
                kept[-1].text += output.text
            else:
                kept.append(output)
        elif output.output_type == "error":
            output.traceback = [f"{output.ename}: {output.evalue}"]
            kept.append(output)
        elif "application/vnd.jupyter.widget-view+json" not in output.data:
            output.metadata = {}
            if "text/plain" in output.data:
                output.data["text/plain"] = ADDRESS.sub("0x...", output.data["text/plain"])
            kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            lines = ESCAPE.sub("", output.text).split("\n")
            lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
            output.text = ADDRESS.sub("0x...", "\n".join(lines))
    return [output for output in kept if output.get("text") != ""]


def build(source: Path) -> bool:
    """Execute a source and write its page; says whether a byte changed."""
    import nbformat

    page = source.with_suffix(".ipynb")
    notebook = execute(source)
    if page.exists():
        old = nbformat.read(page, as_version=4)
        if old.metadata.get("source_sha256") == notebook.metadata["source_sha256"]:
            for before, after in zip(old.cells, notebook.cells, strict=True):
                if "volatile" in after.metadata.get("tags", ()):
                    after.outputs = before.outputs
    nbformat.validate(notebook)
    text = nbformat.writes(notebook, version=4) + "\n"
    changed = not page.exists() or page.read_text() != text
    if changed:
        page.write_text(text)
    return changed


def pairing(source: Path) -> list[str]:
    """What is wrong with a page, without running it: missing, stale, edited, never run."""
    import nbformat

    page = source.with_suffix(".ipynb")
    again = f"make notebooks-build (or: python -m minidflash.kit.notebooks build {source.stem})"
    if not page.exists():
        return [f"{page.name} is missing: {again}"]
    old, new = nbformat.read(page, as_version=4), read(source)
    if old.metadata.get("source_sha256") != new.metadata["source_sha256"]:
        return [f"{page.name} was built from another version of {source.name}: {again}"]
    if [(c.id, c.source) for c in old.cells] != [(c.id, c.source) for c in new.cells]:
        return [f"{page.name} was edited: edit {source.name}, then {again}"]
    code = [cell for cell in old.cells if cell.cell_type == "code"]
    if any(cell.execution_count is None for cell in code):
        return [f"{page.name} has cells that were never run: {again}"]
    return []


def texts(cell: Any) -> list[str]:
    """What a cell printed: one entry per output, a picture by its kind only."""
    found = []
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            found.append(f"{output.name}: {output.text}")
        elif output.output_type == "error":
            found.append(f"{output.ename}: {output.evalue}")
        else:
            kinds = sorted(kind for kind in output.data if kind != "text/plain")
            plain = "" if kinds else output.data.get("text/plain", "")
            found.append(f"{', '.join(kinds)}{plain}")
    return found


def compare(old: Any, new: Any) -> list[str]:
    """How two executed notebooks differ in what they print, cells tagged ``volatile`` aside."""
    differences = []
    for before, after in zip(old.cells, new.cells, strict=True):
        if "volatile" in after.metadata.get("tags", ()) or texts(before) == texts(after):
            continue
        then, now = ("\n".join(texts(cell)).splitlines() for cell in (before, after))
        diff = difflib.unified_diff(then, now, "committed", "now", lineterm="", n=1)
        differences.append(f"cell {after.id} prints something else:\n" + "\n".join(diff))
    return differences


def check(source: Path, env: Mapping[str, str] = os.environ) -> list[str]:
    """What is wrong with a page: `pairing`, or else what a new run prints differently."""
    import nbformat
    from nbclient.exceptions import CellExecutionError

    wrong = pairing(source)
    if wrong:
        return wrong
    try:
        new = execute(source, env=env)
    except CellExecutionError as error:
        return [f"a cell failed:\n{ESCAPE.sub('', str(error))}"]
    return compare(nbformat.read(source.with_suffix(".ipynb"), as_version=4), new)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m minidflash.kit.notebooks``; the exit status is 1 if a check failed."""
    parser = argparse.ArgumentParser(
        prog="python -m minidflash.kit.notebooks", description="Build or check the notebooks."
    )
    parser.add_argument("action", choices=("build", "check"))
    parser.add_argument("name", nargs="*", help="such as 07_verify; all if none is given")
    parser.add_argument("--folder", type=Path, default=HOUSE / "notebooks")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="check so many at a time")
    args = parser.parse_args(argv)
    try:
        if args.jobs < 1 or (args.jobs > 1 and args.action == "build"):
            raise ValueError("--jobs is at least 1, and 1 for build: a page shows how long it took")
        found = sources(args.folder, args.name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    # Kernels side by side get one thread each: two with two threads each would wait for each other.
    env = os.environ | ({"OMP_NUM_THREADS": "1"} if args.jobs > 1 else {})

    def run(source: Path) -> bool:
        """Build or check one notebook and print what came of it; False if it failed."""
        begin = time.perf_counter()
        if args.action == "build":
            wrong, word = [], "written" if build(source) else "unchanged"
        else:
            wrong = check(source, env)
            word = "\n".join(["FAILED", *wrong]) if wrong else "agrees"
        print(f"{source.stem}: {word} ({time.perf_counter() - begin:.0f} s)", flush=True)
        return not wrong

    with ThreadPoolExecutor(args.jobs) as pool:
        failed = list(pool.map(run, found)).count(False)
    done = "built" if args.action == "build" else "agree"
    print(f"{len(found) - failed} of {len(found)} notebooks {done}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
