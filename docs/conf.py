"""The site: chapters from tutorial/, pages from notebooks/, the reference from the docstrings.

The source folder is the repository itself, so that chapters and notebooks keep their own place:
sphinx-build -c docs . build/site
"""

import sys
from pathlib import Path

import docutils.core
import docutils.nodes

from minidflash.kit import start

sys.path.insert(0, str(Path(__file__).parent))
from pages import results, specification  # noqa: E402

project = "minidflash"
author = "the minidflash authors"
root_doc = "docs/index"
include_patterns = ["docs/**", "tutorial/**", "notebooks/**"]
exclude_patterns = [".*", "build", "work", "tests", "minidflash", "runs", "**/.ipynb_checkpoints"]
exclude_patterns += ["docs/root", "docs/_static", "docs/results"]
exclude_patterns += [f"docs/_generated/{name}.md" for name in ("contents", "more", "results")]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
extensions += ["sphinx.ext.mathjax", "sphinx_design", "sphinx_copybutton"]

nb_execution_mode = "off"  # pages are executed by `make notebooks-build`
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
mathjax_path = "mathjax/tex-svg.js"  # fetched by `make docs`; the site works offline

html_theme = "furo"
html_title = "minidflash"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "icon.svg"
html_extra_path = ["root"]  # index.html, which leads to docs/index.html
html_show_sourcelink = False
html_show_sphinx = False

napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_mock_imports = ["pytest"]  # the site is built without the test tools
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


misread = {}  # docstrings that docutils would misread, by the name of their object


def read(app, what, name, obj, options, lines):
    """Most docstrings are plain sentences; note those that are no reStructuredText."""
    quiet = {"report_level": 5, "file_insertion_enabled": False, "env": app.env}
    tree = docutils.core.publish_doctree("\n".join(lines), settings_overrides=quiet)
    if any(tree.findall(docutils.nodes.problematic)) or any(
        tree.findall(docutils.nodes.system_message)
    ):
        misread[name] = list(lines)


def keep_as_text(app, what, name, obj, options, lines):
    """Show those as they stand, after napoleon has read the sections of the others."""
    if name in misread:
        lines[:] = ["::", "", *("    " + line for line in misread[name]), ""]
    elif what == "module":  # what a room uses and gives: a line each, as in the file
        heads, inside = ("Uses ", "Gives ", "Knows ", "Axes "), False
        for n, line in enumerate(lines):
            head = line.startswith(heads)
            inside = head or (inside and bool(line.strip()))
            lines[n] = f"| {line}" if head else f"  {line.strip()}" if inside else line


def write_pages(app):
    """The lists of what there is: chapters and notebooks, the specification, the rooms, the kit."""
    folder = Path(app.confdir, "_generated")
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    made = {**specification(), "results": results()}
    for name, text in made.items():
        (folder / f"{name}.md").write_text(text)
    names = sorted(name for name in made if name.startswith("tests_"))
    (folder / "tests.md").write_text(
        "# The tests\n\n```{toctree}\n:maxdepth: 1\n\n" + "\n".join(names) + "\n```\n"
    )
    toctrees = []
    for caption, pattern in (("The course", "tutorial/*.md"), ("Pictures", "notebooks/*.ipynb")):
        if pages := sorted(Path(app.srcdir).glob(pattern)):
            pages.sort(key=lambda page: page.stem != "README")  # the overview comes first
            names = "\n".join(f"/{page.parent.name}/{page.stem}" for page in pages)
            toctrees.append(f"```{{toctree}}\n:caption: {caption}\n:maxdepth: 1\n\n{names}\n```\n")
    (folder / "contents.md").write_text("\n".join(toctrees))
    listed = Path(app.confdir, "index.md").read_text().split()
    more = sorted(p.stem for p in Path(app.confdir).glob("*.md") if p.stem not in listed)
    rest = "\n".join(f"/docs/{name}" for name in more if name != "index")
    tree = f"```{{toctree}}\n:caption: More\n:maxdepth: 1\n\n{rest}\n```\n"
    (folder / "more.md").write_text(tree if rest else "")
    plan = start.rooms().items()
    built = {n: number for n, number in plan if (start.PACKAGE / f"{n}.py").exists()}
    kit = [p.stem for p in sorted((start.PACKAGE / "kit").glob("*.py")) if p.stem != "__init__"]
    for page, title, names in (
        ("rooms", "The rooms", {f"{number} {n}": f"minidflash.{n}" for n, number in built.items()}),
        ("kit", "The kit", {name: f"minidflash.kit.{name}" for name in kit}),
    ):
        parts = [f"# {title}\n"]
        for heading, module in names.items():
            parts.append(f"## {heading}\n\n```{{eval-rst}}\n.. automodule:: {module}\n```\n")
        (folder / f"{page}.md").write_text("\n".join(parts))


def setup(app):
    """Write the lists first; look at each docstring before and after napoleon."""
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", read, priority=400)
    app.connect("autodoc-process-docstring", keep_as_text, priority=600)
