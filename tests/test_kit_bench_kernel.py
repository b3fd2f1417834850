"""kit.bench_kernel: what can be held to account without a GPU."""

import json
import platform

import pytest
import torch

from minidflash.attention import attend
from minidflash.kit import bench_kernel
from minidflash.kit.tiles import DrafterShape

linux = platform.system() == "Linux" and platform.machine() == "x86_64"
TINY = DrafterShape(layers=1, heads=4, kv_heads=2, head_dim=16, block=4)


@pytest.mark.skipif(not linux, reason="Triton exists for Linux only")
def test_the_contestants_compute_the_same():
    """Kernel, SDPA and the readable way are timed on one question: their answers agree."""
    tensors, anchors = bench_kernel.inputs(40, "cpu", TINY)
    contestants = bench_kernel.ways(tensors, anchors, flex=attend)
    truth = contestants["readable"]().double()
    assert list(contestants) == ["triton", "sdpa", "flex", "readable"]
    for name, call in contestants.items():
        assert (call().double() - truth).abs().max() < 3e-2, name


def test_without_a_gpu_nothing_is_written(tmp_path, monkeypatch, capsys):
    """Where nothing can be measured it prints the floor in bytes, and writes no result."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_kernel.main(["--into", str(tmp_path)]) == 0
    assert "not measured" in (said := capsys.readouterr().out) and "671.1 MB" in said
    assert list(tmp_path.iterdir()) == []


def test_a_result_is_written_with_device_versions_and_date(tmp_path, monkeypatch, capsys):
    """A measurement lies under the device's name and says which goals it misses."""
    row = dict(context=32768, microseconds=50, share_of_copy_bandwidth=0.9)
    result = dict(device="NVIDIA H200", copy_bandwidth_GB_per_s=4000)
    result["rows"] = [row | {"backend": name} for name in ("triton", "sdpa")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: None)
    monkeypatch.setattr(bench_kernel.kernel, "usable", lambda x: True)
    monkeypatch.setattr(bench_kernel, "measure", lambda: result)
    bench_kernel.main(["--into", str(tmp_path)])
    assert json.loads((tmp_path / "kernel-nvidia-h200.json").read_text()) == result
    assert "missed" not in capsys.readouterr().out
