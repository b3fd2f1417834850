"""kit.latency: what is counted and asked for. How long it takes is nobody's specification."""

import json
from types import SimpleNamespace

import pytest
import torch

from minidflash import __main__ as cli
from minidflash.drafter import DrafterConfig
from minidflash.kit import bench, checkpoint, latency, models
from minidflash.kit.latency import Plan, Rig, Shape
from minidflash.measure import speedup, wall_seconds
from minidflash.qwen3 import Qwen3Config

SIZES = dict(hidden_size=8, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1,
             head_dim=4, vocab_size=11)  # fmt: skip
SMALL = Shape(
    "small",
    Qwen3Config(num_hidden_layers=3, tie_word_embeddings=True, **SIZES),
    DrafterConfig(num_hidden_layers=2, block_size=4, mask_token_id=1, target_layer_ids=(0, 2),
                  num_target_layers=3, target_hidden_size=8, **SIZES),
)  # fmt: skip
FEW = Plan(verify=(1, 2, 4), blocks=(2, 4), layers=(1, 2, 3), contexts=(5, 9), batches=(1, 3),
           base=9, repeats=1)  # fmt: skip


@pytest.fixture(scope="module")
def report():
    return latency.measure(SMALL, FEW)


# ---------------------------------------------------------------------- what is counted


@pytest.mark.parametrize("name, count", [
    ("Qwen3-0.6B", 596_049_920), ("Qwen3-1.7B", 1_720_574_976), ("Qwen3-4B", 4_022_468_096),
    ("Qwen3-8B", 8_190_735_360),
])  # fmt: skip
def test_shapes_have_the_published_number_of_parameters(name, count):
    """Each shape has exactly as many parameters as the published model of its name."""
    s = latency.shape(name)
    assert latency.parameters(lambda: latency.CachedQwen3(s.target)) == count


def test_a_round_of_qwen3_4b_in_bytes():
    """In bfloat16 a Qwen3-4B forward reads 8.04 GB and its drafter 1.85 GB, the head included."""
    s = latency.shape("Qwen3-4B")
    assert 2 * latency.target_read(s.target, 1, 0) == pytest.approx(8.04e9, rel=1e-3)
    # five layers 1.009 GB, fc 66 MB, the target's head 778 MB
    parts = 1.009e9 + 66e6 + 778e6
    assert 2 * latency.draft_read(s, 5, 1, 0) == pytest.approx(parts, rel=2e-3)
    # 36 layers and 5, 8 kv heads of 128, keys and values: 4096 bytes per position and layer
    grown = latency.target_read(s.target, 2, 1000) - latency.target_read(s.target, 1, 1000)
    assert 2 * grown == 36 * 4096 * 1000
    grown = latency.draft_read(s, 5, 1, 1001) - latency.draft_read(s, 5, 1, 1)
    assert 2 * grown == 5 * 4096 * 1000


def test_an_embedding_of_its_own_is_not_read_whole():
    """A forward reads a few rows of an untied embedding, so its bytes are those of the rest."""
    s = latency.shape("Qwen3-8B")
    table = s.target.vocab_size * s.target.hidden_size
    assert latency.target_read(s.target, 1, 0) == 8_190_735_360 - table


def test_operations_are_two_per_weight_and_row():
    """16 rows of Qwen3-4B at 1000 positions: 2 x 4.02e9 per row, and both products of attention."""
    c = latency.shape("Qwen3-4B").target
    rows = 16 * 2 * (4_022_468_096 + 36 * 2 * 32 * 128 * 1000)
    assert latency.target_flops(c, 16, 1000) == rows


def test_the_tiny_shape_is_the_shipped_pairs():
    """The shape "tiny" is read from the shipped configs, so it follows a retrained pair."""
    s = latency.shape("tiny")
    assert s.target == checkpoint.load_target(models.shipped("target")).config
    assert s.draft == checkpoint.load_drafter(models.shipped("dflash")).config


def test_an_unknown_shape_is_refused():
    """A name that is no shape is refused with those that are."""
    with pytest.raises(ValueError, match="'Qwen3-5B': there are tiny, Qwen3-0.6B, Qwen3-1.7B,"):
        latency.shape("Qwen3-5B")


# ---------------------------------------------------------------------- what is timed


def test_random_weights_keep_a_tied_head_tied():
    """Random weights are finite, norms are 1, and a tied head is the embedding, not a copy."""
    rig = Rig.build(SMALL, 2, torch.bfloat16, "cpu")
    assert rig.target.lm_head.weight.data_ptr() == rig.target.model.embed_tokens.weight.data_ptr()
    for p in (*rig.target.parameters(), *rig.draft.parameters()):
        assert p.dtype == torch.bfloat16 and p.isfinite().all() and not p.requires_grad
        assert (p == 1).all() if p.ndim == 1 else p.float().std() > 0.01


def test_a_shallower_drafter_is_the_same_drafter():
    """The drafter of fewer layers shares its weights with the deepest one: nothing is copied."""
    rig = Rig.build(SMALL, 3, torch.float32, "cpu")
    two = rig.shallow(2)
    assert two.config.num_hidden_layers == len(two.layers) == 2
    assert all(a is b for a, b in zip(two.layers, rig.draft.layers, strict=False))
    assert two.fc is rig.draft.fc and two.norm is rig.draft.norm


def test_each_call_feeds_what_it_says(monkeypatch):
    """plain feeds a token, verify n with taps, a draft of B slots and n layers just these: counted.
    """
    rig = Rig.build(SMALL, 3, torch.float32, "cpu")
    fed = []

    def hook(what):
        return lambda module, inputs, output: fed.append((what, tuple(inputs[0].shape)))

    for layer in rig.target.model.layers:
        layer.register_forward_hook(hook("target"))
    for layer in rig.draft.layers:
        layer.register_forward_hook(hook("draft"))
    rig.target.lm_head.register_forward_hook(hook("head"))
    calls = rig.calls(3, 9, [1, 4], [(4, 1), (2, 3)])
    assert list(calls) == [("plain", 1, 0), ("verify", 1, 0), ("verify", 4, 0), ("draft", 4, 1),
                           ("draft", 2, 3)]  # fmt: skip
    wanted = {
        ("plain", 1, 0): [("target", (3, 1, 8))] * 3 + [("head", (3, 1, 8))],
        ("verify", 4, 0): [("target", (3, 4, 8))] * 3 + [("head", (3, 4, 8))],
        ("draft", 4, 1): [("draft", (3, 4, 8)), ("head", (3, 3, 8))],
        ("draft", 2, 3): [("draft", (3, 2, 8))] * 3 + [("head", (3, 1, 8))],
    }
    for key, seen in wanted.items():
        for _ in range(2):  # the second time finds the caches as the first did
            fed.clear()
            answer = calls[key]()
            assert fed == seen, key
            assert len(answer) == 3 and len(answer[0]) == seen[-1][1][1]


def test_a_call_can_be_repeated():
    """A call leaves its caches as it found them: repeated, it gives the same answer."""
    rig = Rig.build(SMALL, 2, torch.float32, "cpu")
    for key, call in rig.calls(2, 9, [1, 4], [(4, 2), (2, 1)]).items():
        assert call() == call() == call(), key


def test_a_report_has_every_point_of_the_plan(report):
    """Tokens, blocks and layers vary at one context, then the context, then the batch."""
    rows = [(r["what"], r["tokens"], r["layers"], r["batch"], r["context"]) for r in report["rows"]]
    base = [("plain", 1, 0), ("verify", 1, 0), ("verify", 2, 0), ("verify", 4, 0), ("draft", 2, 2),
            ("draft", 4, 2), ("draft", 4, 1), ("draft", 4, 3)]  # fmt: skip
    other = [("plain", 1, 0), ("verify", 4, 0), ("draft", 4, 2)]
    batch = [("plain", 1, 0), ("verify", 2, 0), ("verify", 4, 0), ("draft", 2, 2), ("draft", 4, 2)]
    assert rows == [(*x, 1, 9) for x in base] + [(*x, 1, 5) for x in other] + [
        (*x, 3, 9) for x in batch]  # fmt: skip
    assert all(r["ms"] > 0 and r["floor_ms"] >= 0 for r in report["rows"])
    assert report["copy_GB_per_s"] > 0 and report["matmul_TFLOP_per_s"] > 0
    for name in ("device", "dtype", "threads", "torch", "date", "capability", "load_average"):
        assert name in report["setting"]
    json.dumps(report)
    assert max(map(len, latency.text(report).splitlines())) <= 80


def test_costs_of_a_report():
    """costs picks the plain time and, per block, draft and verify at one batch and context."""
    def row(what, tokens, layers, batch, context, ms):
        return dict(what=what, tokens=tokens, layers=layers, batch=batch, context=context, ms=ms)

    rows = [row("plain", 1, 0, 1, 9, 10.0), row("verify", 4, 0, 1, 9, 12.0),
            row("verify", 8, 0, 1, 9, 14.0), row("draft", 4, 5, 1, 9, 3.0),
            row("draft", 4, 1, 1, 9, 1.0), row("draft", 32, 5, 1, 9, 4.0),
            row("plain", 1, 0, 2, 9, 11.0), row("verify", 4, 0, 2, 9, 20.0),
            row("draft", 4, 5, 2, 9, 5.0)]  # fmt: skip
    made = {"rows": rows}
    assert latency.costs(made) == (10.0, {4: (3.0, 12.0)}), "verify 8 has no draft, draft 32 no"
    assert latency.costs(made, batch=2, context=9) == (11.0, {4: (5.0, 20.0)})
    with pytest.raises(ValueError, match="batch=3, context=9 was not measured"):
        latency.costs(made, batch=3)


# ---------------------------------------------------------------------- where it may run


def test_what_does_not_fit_is_refused_before_anything_is_made(monkeypatch):
    """A shape that needs more memory than there is is refused, with both numbers, before any work.
    """
    monkeypatch.setattr(latency, "free_memory", lambda device: 15_600_000_000)  # a T4
    monkeypatch.setattr(latency, "randomise", lambda *a: pytest.fail("weights were made"))
    monkeypatch.setattr(latency, "rates", lambda *a: pytest.fail("time was spent"))
    with pytest.raises(ValueError, match=r"Qwen3-8B in float16 needs \d\d\.\d GB \(weights 1\d\.\d,"
                       r" cache .*\), and cpu has 15\.6 GB free"):  # fmt: skip
        latency.measure(latency.shape("Qwen3-8B"), latency.plan("Qwen3-8B", True), "cpu", "float16")
    few = latency.plan("Qwen3-4B", quick=True)
    latency.check_memory(latency.shape("Qwen3-4B"), few, torch.float16, "cpu")


def test_memory_is_counted_by_what_it_is_for():
    """The small plan needs its weights, its largest cache and some room to work."""
    parts = latency.needed(SMALL, FEW, torch.float16)
    rig = Rig.build(SMALL, 3, torch.float16, "cpu")
    held = sum(p.nbytes for m in (rig.target, rig.draft) for p in m.parameters())
    assert parts["weights"] == held
    # 3 sequences of 9 positions, and the block: 3 + 3 layers, keys and values of 1 head of 4.
    assert parts["cache"] == 2 * (3 * 9 + 3 * 4) * (3 + 3) * 2 * 4
    assert parts["work"] > 0
    longer = latency.needed(SMALL, FEW._replace(contexts=(5, 900)), torch.float16)
    assert longer["cache"] > parts["cache"] and longer["work"] > parts["work"]
    assert latency.free_memory("cpu") > 2**20


@pytest.mark.parametrize("capability, dtype", [
    ((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16),
])  # fmt: skip
def test_the_number_format_follows_the_device(monkeypatch, capability, dtype):
    """A T4 (7.5) computes in float16, later cards in bfloat16, a CPU in float32, unless told."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert latency.choose("cuda", None) == dtype
    assert latency.choose("cuda", "float32") == latency.choose("cpu", None) == torch.float32


@pytest.mark.parametrize("device, dtype, message", [
    ("cuda", None, "device='cuda': no CUDA device here"), ("mps", None, "it is cpu or cuda"),
    ("cpu", "int8", "dtype='int8' is not supported"),
])  # fmt: skip
def test_a_device_that_is_not_there_is_refused(monkeypatch, device, dtype, message):
    """A device or number format that cannot be had is refused in a line."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        latency.choose(device, dtype)


def test_a_gpu_is_timed_by_its_own_clock(monkeypatch):
    """On a GPU events around the call are read after the device has finished, and give seconds."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def elapsed_time(self, end):
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    assert latency.stopwatch("cuda")(lambda: log.append("call")) == 0.25
    assert log == ["wait", "record", "call", "record", "wait"]
    assert latency.stopwatch("cpu") is wall_seconds


# ---------------------------------------------------------------------- prediction and commands


def test_a_prediction_is_the_cost_model_beside_the_measurement(monkeypatch):
    """Only tau comes from decoding; the times are medians over turns taken after every prompt."""
    clock = iter([9, 1, 11, 11, 99] * 2)
    figures = {"dflash": {"tau": 4.25, "speedup_decode": 2.5}}

    def turn(calls, repeats, warm_up):
        t = next(clock) / 1e3
        return {"plain": t, "draft": t - 0.007, "verify": t + 0.002}

    def measure(pair, asked, drafters, max_new_tokens, repeats, on_prompt):
        assert set(drafters) == {"plain", "dflash"}
        on_prompt(0, asked[0], {}), on_prompt(1, asked[1], {})
        return {"setting": {}, "by_kind": {"code": figures}, "overall": figures}

    monkeypatch.setattr(latency, "take_turns", turn)
    monkeypatch.setattr(bench, "measure", measure)
    found = latency.predict(each=1)
    assert found["plain_ms"] == pytest.approx(11) and found["draft_ms"] == pytest.approx(4)
    assert found["break_even"] == pytest.approx(17 / 11)
    for kind in ("code", "overall"):
        assert found[kind]["predicted"] == pytest.approx(speedup(4.25, 11, 4, 13)) == 2.75
        assert found[kind]["measured"] == 2.5 and found[kind]["ratio"] == pytest.approx(1.1)
    said = latency.prediction_text(found)
    assert "2.75" in said and "+10.0 %" in said and "break-even at tau = 1.55" in said


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `latency` on the small shape; returns (status, standard output, standard error)."""
    monkeypatch.setattr(latency, "shape", lambda name: SMALL)
    monkeypatch.setattr(latency, "plan", lambda name, quick: FEW)
    monkeypatch.setattr(latency, "rates", lambda device, dtype: (8e9, 5e10))

    def command(*argv):
        threads = torch.get_num_threads()
        status = cli.main(["latency", *argv])
        torch.set_num_threads(threads)
        return status, *capsys.readouterr()

    return command


def test_the_command_prints_tables_and_writes_json(run, tmp_path):
    """latency prints its tables and writes a file, or a file of its own name into a folder."""
    status, out, error = run("--json", str(tmp_path / "x.json"))
    assert (status, error) == (0, "") and "break-even tau" in out
    assert len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 16
    run("--json", str(tmp_path), "--random-weights", "Qwen3-4B")
    assert (tmp_path / "latency-qwen3-4b-cpu.json").exists()


def test_the_command_predicts(run, tmp_path, monkeypatch):
    """latency --predict prints the prediction beside the measurement and writes it."""
    made = dict(plain_ms=11.0, draft_ms=4.0, verify_ms=13.0, break_even=1.55,
                overall=dict(tau=4.25, predicted=2.75123456, measured=2.5, ratio=1.1))  # fmt: skip
    monkeypatch.setattr(latency, "predict", lambda each: made)
    status, out, _ = run("--predict", "--json", str(tmp_path))
    assert status == 0 and "overall  4.25" in out
    found = json.loads((tmp_path / "prediction-tiny.json").read_text())
    assert found["overall"]["predicted"] == 2.7512


@pytest.mark.parametrize("argv, message", [
    (["--random-weights", "Qwen3-5B"], "invalid choice: 'Qwen3-5B'"),
    (["--dtype", "int8"], "dtype='int8' is not supported"),
    (["--device", "tpu"], "device='tpu': it is cpu or cuda"),
])  # fmt: skip
def test_a_mistake_is_one_line(argv, message, capsys):
    """A wrong shape, format or device is one line on standard error and status 2."""
    try:
        status = cli.main(["latency", *argv])
    except SystemExit as error:
        status = error.code
    said = capsys.readouterr().err
    assert status == 2 and message in said and said.count("\n") == 1


def test_rounded_figures():
    """Written figures have five digits; what is no fraction stays as it is."""
    assert latency.rounded({"a": 1.23456789, "b": 7, "c": None, "d": {"e": 0.00001234567}}) == {
        "a": 1.2346, "b": 7, "c": None, "d": {"e": 1.2346e-05}}  # fmt: skip
    assert SimpleNamespace(**latency.rounded({"x": "text"})).x == "text"
