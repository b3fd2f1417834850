"""A pytest plugin that writes down what becomes of every test, and limits how long one may take.

``minidflash.kit.judge`` loads it with ``-p minidflash.kit.record --record DIR``. Each event is one
line of DIR/record.jsonl, written at once, so that nothing is lost when the process dies.
"""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ENDLESS = pytest.StashKey[set[str]]()  # exercises of which a test did not end


class TooLong(BaseException):
    """A test ran past its limit. Not an Exception, so that hypothesis does not try again."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise TooLong in the body after so many seconds of computing, and again every second.

    Seconds of the processor, not of the clock: a busy machine makes nobody's answer wrong.
    """

    def ring(signum, frame):
        raise TooLong(f"did not end within {seconds:g} s of computing: an endless loop?")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def explain(error: BaseException) -> str:
    """What a learner should read of an exception: its text, and hypothesis's example if any.

    >>> explain(NotImplementedError("exercise 7.1: longest_prefix"))
    'NotImplementedError: exercise 7.1: longest_prefix'
    >>> explain(AssertionError("two tokens agree, you kept 3"))
    'two tokens agree, you kept 3'
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = "\n".join(str(error).strip().splitlines()[:12])
    if not isinstance(error, AssertionError | TooLong | pytest.fail.Exception):
        text = f"{type(error).__name__}: {text}"
    notes = [
        note for note in getattr(error, "__notes__", []) if "test case" in note or "example" in note
    ]
    return "\n".join([text or type(error).__name__, *notes])[:2000]


def pytest_addoption(parser):
    """Where to write, and how long a test may take."""
    parser.addoption("--record", metavar="DIR")
    parser.addoption("--test-seconds", type=float, default=60)


def pytest_configure(config):
    """Nothing has run yet, so nothing is endless yet."""
    config.stash[ENDLESS] = set()


def _labels(item) -> set[str]:
    return {label for mark in item.iter_markers("exercise") for label in mark.args}


def _write(config, event: str, **what) -> None:
    if config.getoption("--record") is not None:
        with Path(config.getoption("--record"), "record.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, **what}) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Write down every test; leave out those that an earlier run has finished."""
    done = Path(config.getoption("--record") or "", "done.json")
    if config.getoption("--record") is not None and done.exists():
        finished = set(json.loads(done.read_text()))
        items[:] = [item for item in items if item.nodeid not in finished]
    for item in items:
        doc = " ".join((getattr(getattr(item, "obj", None), "__doc__", None) or "").split())
        _write(config, "collected", test=item.nodeid, labels=sorted(_labels(item)), sentence=doc)


def pytest_sessionfinish(session, exitstatus):
    """Say that the run came to its end: a process that exits halfway does not."""
    _write(session.config, "closed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Say which test runs, before it runs."""
    _write(item.config, "started", test=item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """The room is imported here, so an endless loop at import ends here too."""
    if item.config.stash[ENDLESS] & _labels(item):
        pytest.fail("an earlier test of this exercise did not end: an endless loop?", pytrace=False)
    with limit(item.config.getoption("--test-seconds")):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Limit the test itself."""
    with limit(item.config.getoption("--test-seconds")):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Write down how a test ended. A skipped test has not passed."""
    report = yield
    if report.when == "call" or (report.when == "setup" and not report.passed):
        message = "" if report.passed else explain(call.excinfo.value)
        passed, phase = report.passed, report.when
        if call.excinfo is not None and isinstance(call.excinfo.value, TooLong):
            item.config.stash[ENDLESS].update(_labels(item))
        _write(item.config, "ended", test=item.nodeid, passed=passed, message=message, phase=phase)
    return report
