"""Runs a spec in a process of its own and says what became of every test.

`examine` starts pytest in a subprocess and survives whatever the examined code does: an endless
loop, an exit, a crash. Over there the plugin ``minidflash.kit.record`` writes down what happens.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minidflash.kit.start import HOUSE


@dataclass
class Outcome:
    """What became of one test.

    Attributes:
        test: pytest's name of it, such as "tests/test_07_verify.py::test_prefix".
        labels: the exercises that it marks.
        sentence: its docstring.
        passed: whether it ran to its end and passed.
        message: why not; empty if it passed.
        phase: "call", or "setup" when the room itself could not be had.
    """

    test: str
    labels: tuple[str, ...]
    sentence: str
    passed: bool = False
    message: str = ""
    phase: str = ""


def spec_path(number: str, name: str) -> Path:
    """The spec of a room.

    Raises:
        ValueError: it does not lie where the repository keeps it.
    """
    path = HOUSE / "tests" / f"test_{number}_{name}.py"
    if not path.exists():
        raise ValueError(
            f"{path.relative_to(HOUSE)} is missing: the course runs from a full checkout"
        )
    return path


def examine(
    specs: Sequence[Path],
    rooms: Path | None = None,
    seconds: float = 600,
    test_seconds: float = 60,
    options: Sequence[str] = (),
) -> list[Outcome]:
    """Run specs in a subprocess and return an outcome for every test that was collected.

    Args:
        specs: spec files.
        rooms: the folder whose rooms are examined; the reference if None.
        seconds: limit for all of it.
        test_seconds: limit for one test, of computing.
        options: more options for pytest.

    A process that dies during one test is started again for the tests after it, twice at most.
    """
    deadline = time.monotonic() + seconds
    outcomes: dict[str, Outcome] = {}
    finished: set[str] = set()
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder, "record.jsonl")
            Path(folder, "done.json").write_text(json.dumps(sorted(finished)))
            command = [sys.executable, "-m", "pytest", "-q", "-p", "minidflash.kit.record"]
            command += ["-p", "no:cacheprovider", f"--record={folder}"]
            command += [f"--test-seconds={test_seconds}", *options, *map(str, specs)]
            command += [f"--rooms={rooms.resolve()}"] if rooms is not None else []
            status, output = _run(command, max(1.0, deadline - time.monotonic()))
            lines = record.read_text().splitlines() if record.exists() else []
        running, ended = _read(lines, outcomes, finished)
        if not outcomes and status not in (0, 5):
            raise ValueError(f"the specs could not be collected:\n{output[-2000:]}")
        if running is None:
            break
        finished.add(running)
        outcomes[running].message = (
            f"did not end within {seconds:g} s: an endless loop?"
            if status is None
            else f"the whole process ended during this test (exit status {status})"
        )
        outcomes[running].phase = "call" if ended else "setup"
        if not ended or status is None:  # the room cannot be imported, or no time is left
            break
    for outcome in outcomes.values():
        if outcome.test not in finished:
            last = next((o.message for o in outcomes.values() if o.phase == "setup"), "")
            outcome.message = last or "not reached: an earlier test ended the process"
    return list(outcomes.values())


def _run(command: list[str], seconds: float) -> tuple[int | None, str]:
    """Exit status (None if it had to be ended) and output of a command in its own session."""
    quiet = {"HYPOTHESIS_PROFILE": "judge", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        cwd=HOUSE,
        env={**os.environ, **quiet},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _read(
    lines: list[str], outcomes: dict[str, Outcome], finished: set[str]
) -> tuple[str | None, bool]:
    """Take in a record; return the test during which it broke off, and whether one had ended."""
    running, ended = None, False
    for line in lines:
        event = json.loads(line)
        match event["event"]:
            case "collected":
                test = Outcome(event["test"], tuple(event["labels"]), event["sentence"])
                outcomes.setdefault(test.test, test)
            case "started":
                running = event["test"]
            case "ended":
                outcome = outcomes[event["test"]]
                outcome.passed, outcome.message = event["passed"], event["message"]
                outcome.phase = event["phase"]
                finished.add(outcome.test)
                running, ended = None, True
    return running, ended
