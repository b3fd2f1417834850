"""One option decides whose rooms the specs examine.

pytest                       minidflash/   the reference
pytest --mine                work/         yours
pytest --rooms=DIR           DIR/          anybody's (the grader and the gates use this)
pytest --exercise=7.1        only the tests that mark exercise 7.1 (may be repeated)

Set HYPOTHESIS_PROFILE to dev (default), ci, thorough, judge or dice.
"""

import functools
import importlib
import os
import re
import sys
import types
import typing
from pathlib import Path

import hypothesis
import jaxtyping
import pytest
import torch
from beartype import beartype

import minidflash

# The kernel's spec runs in Triton's interpreter, with or without a GPU, which is chosen before
# triton is imported. `make gpu` sets it to 0 and runs tests/gpu/ through the compiler.
if "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it brings


def _has_shape(annotation) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(_has_shape(part) for part in typing.get_args(annotation))


def check_shapes(function):
    """Beartype for the arguments that have a shape; a fake may stand in for everything else.

    A row of m+1 logits for a list of m tokens cannot be checked: no array says what m is.
    """
    notes = {k: v for k, v in function.__annotations__.items() if _has_shape(v)}
    function.__annotations__ = notes
    if not notes:
        return function
    checked = beartype(function)

    @functools.wraps(function)
    def check(*args, **kwargs):
        try:
            return checked(*args, **kwargs)
        except jaxtyping.AnnotationError:
            return function(*args, **kwargs)

    return check


# Every shape in a room's signature is checked at run time, in the reference and in your own rooms.
ROOMS = re.findall(r"^    \d\d (\w+)  ", minidflash.__doc__, re.M)
jaxtyping.install_import_hook(
    [f"{package}.{name}" for package in ("minidflash", "work") for name in ROOMS],
    f"{__name__}.check_shapes",
)

_CALM = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
_SAME = {"derandomize": True, "database": None, "print_blob": False}
# A judge needs a failure, not the smallest one.
# Looking for an explanation of a failure costs minutes here and ends in torch's own lines.
_TEACH = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]
_FIND = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
hypothesis.settings.register_profile("dev", max_examples=25, phases=_TEACH, **_CALM)
hypothesis.settings.register_profile("ci", max_examples=50, **_SAME, **_CALM)
hypothesis.settings.register_profile("thorough", max_examples=2000, **_CALM)
_JUDGE = {"max_examples": 50, "phases": _FIND, **_CALM}
hypothesis.settings.register_profile("judge", **_JUDGE, **_SAME)
hypothesis.settings.register_profile("dice", **_JUDGE, database=None)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev")
)


def pytest_addoption(parser):
    group = parser.getgroup("minidflash")
    group.addoption("--mine", action="store_true", help="examine work/ instead of minidflash/")
    group.addoption("--rooms", metavar="DIR", help="examine the rooms in DIR")
    group.addoption("--exercise", action="append", metavar="N.M", help="only this exercise's tests")


def rooms_folder(config) -> Path | None:
    """The folder whose rooms are examined; None for the reference."""
    if config.getoption("--rooms"):
        return Path(config.getoption("--rooms")).resolve()
    return config.rootpath / "work" if config.getoption("--mine") else None


def room_name(module_name: str) -> str | None:
    """tests/test_07_verify.py is about the room verify; other test files are about no room."""
    parts = module_name.rpartition(".")[2].split("_", 2)
    return parts[2] if len(parts) == 3 and parts[0] == "test" and parts[1].isdigit() else None


def pytest_configure(config):
    folder = rooms_folder(config)
    if folder is None:
        return
    # `work` is the package whose only folder is the one under examination.
    package = types.ModuleType("work")
    package.__path__ = [str(folder)]
    sys.modules["work"] = package
    if config.args_source is not pytest.Config.ArgsSource.ARGS:  # no spec was named: those begun
        specs = sorted((config.rootpath / "tests").glob("test_[0-9][0-9]_*.py"))
        config.args = [str(p) for p in specs if (folder / f"{room_name(p.stem)}.py").exists()]
        if not config.args:
            raise pytest.UsageError(f"{folder} has no room yet:  python -m minidflash start ROOM")


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(config, items):
    wanted, kept, dropped = set(config.getoption("--exercise") or ()), [], []
    for item in items:
        labels = {label for mark in item.iter_markers("exercise") for label in mark.args}
        (kept if not wanted or wanted & labels else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    # Under `pytest -n 2 --dist loadgroup` (make test) a file stays in one process, because its
    # tests share what is costly. The catalogue of wrong answers shares per room, and goes first.
    if hasattr(config, "workerinput"):
        catalogue = "test_wrong_answers.py"
        for item in items:
            room = re.search(r"\[(?:\d\d_)?([a-z_0-9]+?)[-/]", item.name)
            shared = item.path.name if item.path.name != catalogue or not room else room[1]
            item.add_marker(pytest.mark.xdist_group(shared))
        items.sort(key=lambda item: item.path.name != catalogue)


SKIPS_ALLOWED = ("needs a CUDA device",)  # how the reason of a skip begins, if CI may meet it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and os.environ.get("CI"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(SKIPS_ALLOWED):
            report.outcome, report.longrepr = "failed", f"CI does not allow this skip: {reason}"
    labels = [label for mark in item.iter_markers("exercise") for label in mark.args]
    if report.failed and len(labels) > 1:
        told = f"A mistake in any of them fails it. Begin with the first:  --exercise={labels[0]}"
        report.sections.append((f"this test needs exercises {' and '.join(labels)}", told))
    return report


@pytest.fixture(scope="session", autouse=True)
def a_terminal_like_any_other():
    """What your own terminal cannot, or how wide it is, decides nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")  # hypothesis refuses function-scoped fixtures
def room(request):
    """The module a spec is about: minidflash.verify for tests/test_07_verify.py, or yours."""
    name = room_name(request.module.__name__)
    folder = rooms_folder(request.config)
    if folder is None:
        return importlib.import_module(f"minidflash.{name}")
    path = folder / f"{name}.py"
    if not path.exists():
        pytest.fail(
            f"{path.parent.name}/{name}.py does not exist yet; make it with:  "
            f"python -m minidflash start {name}",
            pytrace=False,
        )
    try:
        return importlib.import_module(f"work.{name}")
    except (Exception, SystemExit) as error:
        pytest.fail(
            f"{path.parent.name}/{name}.py does not import: {type(error).__name__}: {error}",
            pytrace=False,
        )
