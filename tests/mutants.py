"""Runs one room's spec on many variants of the room, quickly: one import, then a fork per variant.

``python tests/mutants.py JOB.json`` reads {"spec", "room", "seconds", "test_seconds", "variants":
[{"name", "exercise", "source"}, ...]} and writes JOB.out.json: for each variant's name the first
failure of the tests that mark its exercise, pytest's output and its exit status.
"""

import contextlib
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
ABROAD = {"HYPOTHESIS_PROFILE": "judge", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def examine(
    spec: Path, room: str, variants: list[dict], seconds: float = 90, test_seconds: float = 20
) -> dict[str, dict]:
    """Run a spec on variants of its room, in another process; results by the variants' names."""
    chunks = [variants] if FORKS else [[variant] for variant in variants]
    results: dict[str, dict] = {}
    for chunk in chunks:
        with tempfile.TemporaryDirectory() as folder:
            job = Path(folder, "job.json")
            limits = {"seconds": seconds, "test_seconds": test_seconds}
            job.write_text(
                json.dumps({"spec": str(spec), "room": room, "variants": chunk, **limits})
            )
            done = subprocess.run(
                [sys.executable, __file__, str(job)],
                cwd=HOUSE,
                env=os.environ | ABROAD | {"PYTHONPATH": str(HOUSE)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
            out = job.with_suffix(".out.json")
            assert out.exists(), f"the spec could not be run:\n{done.stdout}\n{done.stderr}"
            results |= json.loads(out.read_text())
    return results


def run_one(job: dict, variant: dict, folder: Path) -> int:
    """Run the tests that mark one exercise on one variant; stop at the first failure."""
    import pytest

    (folder / f"{job['room']}.py").write_text(variant["source"])
    options = [f"--rooms={folder}", f"--record={folder}", f"--exercise={variant['exercise']}"]
    options += ["-x", "-q", "-p", "minidflash.kit.record", "-p", "no:cacheprovider", "--tb=short"]
    with (
        open(folder / "output.txt", "w") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        status = int(pytest.main([*options, f"--test-seconds={job['test_seconds']}", job["spec"]]))
    return status


def collect(folder: Path, status: int | None) -> dict:
    """What a finished variant left behind."""
    record, output = folder / "record.jsonl", folder / "output.txt"
    lines = record.read_text().splitlines() if record.exists() else []
    ended = [event for line in lines if (event := json.loads(line))["event"] == "ended"]
    return {
        "status": status,
        "finished": '{"event": "closed"}' in lines,
        "failures": [event for event in ended if not event["passed"]],
        "output": output.read_text(errors="replace")[-6000:] if output.exists() else "",
    }


def main(path: Path) -> None:
    """Fork one child per variant, as many at a time as there are cores."""
    import pytest

    job = json.loads(path.read_text())
    variants, results, running = list(job["variants"]), {}, {}
    with tempfile.TemporaryDirectory() as base:
        if not FORKS:
            status = run_one(job, variants[0], Path(base))
            results[variants[0]["name"]] = collect(Path(base), status)
        else:
            # Import all that the spec imports, once. No room is examined here.
            assert pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", job["spec"]]) == 0
        while FORKS and (variants or running):
            while variants and len(running) < (os.cpu_count() or 1):
                variant = variants.pop(0)
                folder = Path(base, str(len(results) + len(running)))
                folder.mkdir()
                child = os.fork()
                if child == 0:
                    status = 70  # a crash of this harness
                    try:
                        status = run_one(job, variant, folder)
                    finally:
                        os._exit(status)
                running[child] = (variant["name"], folder, time.monotonic() + job["seconds"])
            for child, (name, folder, deadline) in list(running.items()):
                done, code = os.waitpid(child, os.WNOHANG)
                status = os.waitstatus_to_exitcode(code) if done else None
                if not done and time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                if done or time.monotonic() > deadline:
                    results[name] = collect(folder, status)
                    del running[child]
            time.sleep(0.02)
    path.with_suffix(".out.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
