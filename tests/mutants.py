"""Runs one room's spec on many variants of the room, quickly: collect once, then fork per variant.

``python tests/mutants.py JOB.json`` reads {"spec", "room", "seconds", "test_seconds", "variants":
[{"name", "exercise", "source"}, ...]} and writes JOB.out.json: for each variant's name how many
tests mark its exercise, the first of them that fails, and whether the run came to its end.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOUSE = Path(__file__).parent.parent
FORKS = sys.platform == "linux"  # a fork after importing torch is not safe on macOS
# Drawn examples are the same in every run, until a test is edited: then they are drawn anew. So no
# mistake may be noticed by luck. `GATE_SEED=3 make gate` draws other examples and shows which are.
SEED = os.environ.get("GATE_SEED")
ABROAD = {
    "HYPOTHESIS_PROFILE": "dice" if SEED else "judge",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def examine(
    spec: Path, room: str, variants: list[dict], seconds: float = 300, test_seconds: float = 20
) -> dict[str, dict]:
    """Run a spec on variants of its room, in another process; results by the variants' names.

    A result is {"tests", "failures": [{"test", "phase", "text"}], "finished"}.
    """
    results: dict[str, dict] = {}
    for chunk in [variants] if FORKS else [[variant] for variant in variants]:
        with tempfile.TemporaryDirectory() as folder:
            job = Path(folder, "job.json")
            limits = {"seconds": seconds, "test_seconds": test_seconds}
            what = {"spec": str(spec), "room": room, "variants": chunk, **limits}
            job.write_text(json.dumps(what))
            abroad = {**ABROAD, "PYTHONPATH": str(HOUSE), "PYTEST_DEBUG_TEMPROOT": folder}
            done = subprocess.run(
                [sys.executable, __file__, str(job)],
                cwd=HOUSE,
                env=os.environ | abroad,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
            out = job.with_suffix(".out.json")
            assert out.exists(), f"the spec could not be run:\n{done.stdout}\n{done.stderr}"
            results |= json.loads(out.read_text())
    return results


class Variants:
    """A pytest plugin: instead of running the collected tests once, run them on every variant."""

    def __init__(self, job: dict, base: Path):
        self.job, self.base, self.failures, self.results = job, base, [], {}

    def pytest_runtestloop(self, session) -> bool:
        """Fork one child per variant, as many at a time as there are cores."""
        waiting, running = list(enumerate(self.job["variants"])), {}
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                i, variant = waiting.pop(0)
                folder = self.base / str(i)
                folder.mkdir()
                child = os.fork() if FORKS else 0
                if child == 0:
                    try:
                        self.run(session, variant, folder)
                    finally:
                        if FORKS:
                            os._exit(0)
                running[child] = (variant["name"], folder, time.monotonic() + self.job["seconds"])
            for child, (name, folder, deadline) in list(running.items()):
                ended = not FORKS or os.waitpid(child, os.WNOHANG)[0]
                if not ended and time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                    ended = os.waitpid(child, 0)[0]
                if ended:
                    result = folder / "result.json"
                    died = {"tests": None, "failures": [], "finished": False}
                    self.results[name] = json.loads(result.read_text()) if result.exists() else died
                    del running[child]
            time.sleep(0.01)
        return True

    def run(self, session, variant: dict, folder: Path) -> None:
        """Run the tests that mark one exercise ("*": all) on one variant, to the first failure."""
        (folder / f"{self.job['room']}.py").write_text(variant["source"])
        session.config.option.rooms = str(folder)
        sys.modules["work"].__path__ = [str(folder)]
        self.failures = []
        chosen = [
            item
            for item in session.items
            if variant["exercise"] == "*"
            or any(variant["exercise"] in mark.args for mark in item.iter_markers("exercise"))
        ]
        for item, following in zip(chosen, [*chosen[1:], None], strict=False):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failures:
                break
        result = {"tests": len(chosen), "failures": self.failures, "finished": True}
        (folder / "result.json").write_text(json.dumps(result))

    def pytest_runtest_logreport(self, report) -> None:
        """Keep the failures."""
        if report.failed:
            text = report.longreprtext[-6000:]
            self.failures.append({"test": report.nodeid, "phase": report.when, "text": text})


def main(path: Path) -> None:
    """Collect the spec with the plugin above, and write down what it found."""
    import pytest

    job = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as base:
        plugin = Variants(job, Path(base))
        options = ["-q", "--tb=short", "-p", "minidflash.kit.record", "-p", "no:cacheprovider"]
        options += [f"--test-seconds={job['test_seconds']}", f"--rooms={base}", job["spec"]]
        options += [f"--hypothesis-seed={SEED}"] if SEED else []
        pytest.main(options, plugins=[plugin])
        if len(plugin.results) == len(job["variants"]):
            path.with_suffix(".out.json").write_text(json.dumps(plugin.results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
