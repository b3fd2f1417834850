"""Wrong calls: each gives one clear error, before any work, and leaves nothing half-written.

What rooms and kit refuse of their own stands in their own specs. Here is what nobody sane would do,
and what happens to everybody: values of the wrong kind in a configuration, broken files, a full
disk, Ctrl-C.
"""

import contextlib
import json
import resource
from pathlib import Path

import children
import pairs
import pytest
import tiny
import torch
from safetensors.torch import save_file

from minidflash import __main__ as cli
from minidflash.dflash import DFlashDrafter
from minidflash.greedy import greedy
from minidflash.kit import bench, checkpoint, models, recipes, start
from minidflash.kit.store import Store, write_atomically
from minidflash.speculate import NoDrafter, speculate
from minidflash.train import TrainSettings, fit

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A random target and its drafter, 1024 words."""
    return pairs.write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random target of 6 words and its drafter, without a tokenizer."""
    base, target = tmp_path_factory.mktemp("small"), tiny.decoder(0, dtype=torch.float32)
    checkpoint.save_target(target, base / "target", (), "float32")
    checkpoint.save_drafter(tiny.drafter(0, target), base / "dflash", "float32")
    return base


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs a command in an empty folder; returns (status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def command(*argv):
        threads = torch.get_num_threads()
        try:
            status = cli.main([str(word) for word in argv])
        except SystemExit as error:
            status = error.code
        finally:
            torch.set_num_threads(threads)
        return status, *capsys.readouterr()

    return command


# --- the command line

PAIR = ("--model", "TARGET", "--draft", "DFLASH", "--max-new-tokens", "2")
BENCH = ("bench", *PAIR, "--each", "1", "--kinds", "maths", "--repeats", "1")
COMMANDS = [
    (["generate", "a", *PAIR, "--seed", "9" * 20], "argument --seed: invalid seed value"),
    (["generate", "a", *PAIR, "--seed", "-1"], "argument --seed: invalid seed value: '-1'"),
    (["generate", "a", *PAIR, "--block-size", "0"], "block_size=0 must be at least 2"),
    (["generate", "a", *PAIR, "--block-size", "9" * 9], "more than the target's 32768 positions"),
    (["generate", "a", *PAIR, "--temperature", "nan"], "temperature=nan must be"),
    (["generate", "a", *PAIR, "--temperature", "inf"], "temperature=inf must be"),
    (["generate", "a", *PAIR, "--temperature", "hot"], "invalid float value: 'hot'"),
    (["generate", "a", *PAIR, "--top-k", "-1"], "top_k=-1 must be"),
    (["generate", "a", *PAIR, "--top-p", "0"], "top_p=0.0 in (0, 1]"),
    (["generate", "a", *PAIR, "--dtype", "int8"], "dtype='int8' is not supported"),
    (["generate", "a", *PAIR, "--device", "nowhere"], "device='nowhere' cannot be used here"),
    (["generate", "a", *PAIR, "--chat"], "no chat template"),
    (["generate", "a", "b", *PAIR], "unrecognized arguments: b"),
    (["generate", "a", "--model", "TARGET/config.json"], "config.json' is no folder here"),
    (["generate", "a", "--model", "TARGET", "--draft", "TARGET"], "is no DFlash drafter"),
    (["generate", "a", "--model", "DFLASH"], "lacks lm_head.weight"),
    (["generate", "a", "--model", "TARGET", "--draft", "n-gram", "--block-size", "1"],
     "block_size=1, longest=3"),
    (["bench", "--data", "EMPTY"], "holds no prompt"),
    (["bench", "--data", "NUMBER"], "line 1: must be"),
    (["bench", "--data", "."], "Is a directory"),
    ([*BENCH, "--block-size", "1"], "block_size=1 must be at least 2"),
    ([*BENCH, "--decoders", "dance"], "--decoders dance: one of"),
    ([*BENCH, "--kinds", "opera"], "invalid choice: 'opera'"),
    ([*BENCH, "--max-new-tokens", "-1"], "--max-new-tokens -1 must be 1 or more"),
    ([*BENCH, "--repeats", "0"], "--repeats 0 must be 1 or more"),
    (["demo", "--max-new-tokens", "0"], "--max-new-tokens 0 must be 1 or more"),
    (["demo", "--seed", "x"], "invalid int value: 'x'"),
    (["train"], "the following arguments are required"),
    (["train", "dance"], "invalid choice: 'dance'"),
    (["train", "target", "T", "--steps", "-1", "1"], "argument --steps: -1 must be 1 or more"),
    (["train", "target", "T", "--steps", "1", "--depths", "2", "4"], "--steps has 1 numbers"),
    (["train", "dflash", "T", "--minutes", "0"], "argument --minutes: 0.0 must be 1e-09 or more"),
    (["train", "target", "T", "--batch", "0"], "argument --batch: 0 must be 1 or more"),
    (["train", "target", "T", "--lr", "nan"], "argument --lr: nan must be"),
    (["train", "dflash", "T", "--target", "nowhere"], "'nowhere' is no folder here"),
    (["train", "dflash", "T", "--block-size", "0"], "argument --block-size: 0 must be 1 or more"),
    (["start", "dance"], "there is no room 'dance'"),
    (["start"], "name a room"),
    (["grade", "nowhere"], "nowhere is no folder"),
    (["grade", ".", "--output", "nowhere/ada.json"], "nowhere is no folder: --output has nowhere"),
    (["info", "more"], "unrecognized arguments: more"),
]  # fmt: skip


@pytest.mark.parametrize("argv, message", COMMANDS, ids=[" ".join(c)[:60] for c, _ in COMMANDS])
def test_a_wrong_command_says_why_and_leaves_nothing(run, folders, tmp_path, argv, message):
    """A wrong command has status 2, its reason on standard error, no output and no new file."""
    names = {"TARGET": str(folders[0]), "DFLASH": str(folders[1])}
    for name, text in (("EMPTY", ""), ("NUMBER", '{"prompt": 5}\n')):
        if name in argv:
            (tmp_path / name).write_text(text)
    there = set(tmp_path.iterdir())
    for name, path in names.items():
        argv = [word.replace(name, path) for word in argv]
    status, out, error = run(*argv)
    assert (status, out) == (2, ""), error
    assert message in error and "Traceback" not in error
    assert set(tmp_path.iterdir()) == there, "a refused command left something behind"


def test_a_tokenizer_of_another_model_is_found_out(run, folders, small, tmp_path):
    """Ids that the target has no row for are named, not looked up."""
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for file in (small / "target").iterdir():
        (mixed / file.name).symlink_to(file)
    for file in folders[0].glob("tokenizer*"):
        (mixed / file.name).symlink_to(file)
    status, out, error = run("generate", "Question: what?", "--model", mixed)
    assert (status, out) == (2, "") and "a token id is 0 .. 5" in error


# --- requests


@pytest.mark.parametrize("change, message", [
    ({"prompt": [True]}, "prompt holds True"),
    ({"prompt": [1.0]}, "prompt holds 1.0"),
    ({"prompt": "abc"}, "one flat list"),
    ({"prompt": None}, "prompt=None must be one flat list"),
    ({"prompt": torch.tensor([1, 2])}, "one flat list"),
    ({"prompt": [[1], [2]]}, "batch 1"),  # case J2: a room decodes one prompt
    ({"stop_ids": 3}, "stop_ids=3 must be a collection"),
    ({"stop_ids": ["x"]}, "stop_ids holds 'x'"),
    ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
    ({"max_new_tokens": "3"}, "max_new_tokens=3"),
    ({"max_new_tokens": None}, "max_new_tokens=None"),
])  # fmt: skip
def test_a_request_of_the_wrong_kind_is_refused(change, message):
    """Numbers that are no whole numbers and prompts that are no lists get one ValueError."""
    target = tiny.decoder(0)
    request = {"prompt": [1], "max_new_tokens": 3} | change
    for decode in (greedy, lambda t, *a, **k: speculate(t, NoDrafter(), *a, **k)):
        target.forwards = 0
        with pytest.raises(ValueError, match=message):
            decode(target, **request)
        assert target.forwards == 0


def test_a_block_longer_than_the_target_is_refused():
    """A block with more slots than the target has positions is refused before it is filled."""
    target = tiny.decoder(0)
    with pytest.raises(ValueError, match="block_size=40000 is more than the target's 32768"):
        DFlashDrafter(target, tiny.drafter(0, target), 40000)


# --- configurations

TARGET = [
    ({"hidden_size": 10**30}, "hidden_size=1000"), ({"hidden_size": "8"}, "hidden_size='8'"),
    ({"hidden_size": [8]}, "hidden_size="), ({"hidden_size": True}, "hidden_size=True"),
    ({"hidden_size": 8.0}, "hidden_size=8.0"), ({"hidden_size": NAN}, "hidden_size=nan"),
    ({"hidden_size": -8}, "hidden_size=-8"), ({"vocab_size": -1}, "vocab_size=-1"),
    ({"vocab_size": 2**70}, "vocab_size="), ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
    ({"num_hidden_layers": 10**7, "layer_types": None}, "num_hidden_layers=10000000 is more than"),
    ({"intermediate_size": 2**31 - 1, "head_dim": 2**31 - 2, "hidden_size": 2**31 - 1,
      "num_attention_heads": 2**31 - 1}, "no model has these sizes|must be|is no multiple"),
    ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
    ({"max_position_embeddings": "long"}, "max_position_embeddings='long'"),
    ({"rope_theta": INF, "rope_parameters": None}, "rope_theta=inf"),
    ({"rope_theta": NAN, "rope_parameters": None}, "rope_theta=nan"),
    ({"rope_theta": "big", "rope_parameters": None}, "rope_theta='big'"),
    ({"rms_norm_eps": NAN}, "rms_norm_eps=nan"), ({"rms_norm_eps": "a"}, "rms_norm_eps='a'"),
    ({"rope_parameters": 5}, "rope_parameters=5"), ({"rope_parameters": []}, "rope_parameters="),
    ({"layer_types": 5}, "layer_types=5"), ({"tie_word_embeddings": "no"}, "tie_word_embeddings="),
    ({"attention_bias": "yes"}, "attention_bias='yes'"),
    ({"num_attention_heads": 3}, "must be"),
]  # fmt: skip
OWN = {"mask_token_id": 0, "target_layer_ids": [1, 3]}
DRAFTER = [
    ({"block_size": 2.5}, "block_size=2.5"), ({"block_size": 10**12}, "block_size=10000"),
    ({"dflash_config": 5}, "dflash_config=5"), ({"dflash_config": []}, "dflash_config="),
    ({"dflash_config": OWN | {"mask_token_id": 1.5}}, "mask_token_id=1.5"),
    ({"dflash_config": OWN | {"mask_token_id": "0"}}, "mask_token_id='0'"),
    ({"dflash_config": OWN | {"target_layer_ids": "13"}}, "target_layer_ids='13'"),
    ({"dflash_config": OWN | {"target_layer_ids": [1.5]}}, "target_layer_ids="),
    ({"dflash_config": OWN | {"target_layer_ids": [True, 3]}}, "target_layer_ids="),
    ({"dflash_config": OWN | {"target_layer_ids": []}}, "taps="),
    ({"num_target_layers": "x"}, "num_target_layers='x'"),
    ({"architectures": 5}, "architectures=5"),
]  # fmt: skip
KINDS = [("target", *row) for row in TARGET] + [("dflash", *row) for row in DRAFTER]


@pytest.mark.parametrize("kind, changes, message", KINDS, ids=[f"{k} {m}" for k, _, m in KINDS])
def test_a_hostile_configuration_is_refused_by_its_key(small, tmp_path, kind, changes, message):
    """A value of the wrong type or of a senseless size is named before anything is built."""
    raw = json.loads((small / kind / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(small / kind / "model.safetensors")
    read = checkpoint.load_target if kind == "target" else checkpoint.load_drafter
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stop", [[0, "x"], -1, True, 1.5, {}, "end"])
def test_a_stop_token_that_is_no_id_is_refused(tmp_path, stop):
    """eos_token_id holds whole numbers, or the file that says otherwise is named."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": stop}))
    with pytest.raises(ValueError, match="config.json: eos_token_id holds"):
        checkpoint.read_stop_ids(tmp_path)


# --- files

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FILES = [
    (CONFIG, b"[" * 200_000, "is not valid JSON"),
    (CONFIG, b"", "is not valid JSON"),
    (CONFIG, b"\xff\xfe{\x00}\x00", "is not valid JSON"),
    (CONFIG, b"[1]", "must hold a JSON object"),
    (CONFIG, None, "config.json is missing"),
    (WEIGHTS, b"", "is not a whole safetensors file"),
    (WEIGHTS, b"no tensors here, just words", "is not a whole safetensors file"),
    (WEIGHTS, b"\xff" * 8 + b"{}", "is not a whole safetensors file"),
    (WEIGHTS, None, "is not a whole safetensors file"),
    (INDEX, b'{"weight_map": [1]}', "has no weight_map"),
    (INDEX, b'{"weight_map": {"a": 5}}', "names '5', which is no file of this folder"),
    (INDEX, b'{"weight_map": {"a": "../other/model.safetensors"}}', "is no file of this folder"),
    (INDEX, b'{"weight_map": {"a": "/etc/model.safetensors"}}', "is no file of this folder"),
    (INDEX, b'{"weight_map": {"a": "gone.safetensors"}}', "lacks the shard gone.safetensors"),
]


@pytest.mark.parametrize("name, content, message", FILES)
def test_a_broken_file_is_named(small, tmp_path, name, content, message):
    """A file that is empty, cut, something else, a folder, or points elsewhere is refused."""
    for file in (small / "target").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        checkpoint.load_target(tmp_path)


@pytest.mark.parametrize("name, content", [
    ("tokenizer.json", "{"), ("tokenizer.json", '{"version": "1.0"}'),
    ("tokenizer_config.json", "{"),
])  # fmt: skip
def test_a_broken_tokenizer_is_named(folders, tmp_path, name, content):
    """A tokenizer that cannot be read is an error of its folder."""
    for file in folders[0].glob("tokenizer*"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path.name} has no tokenizer that"):
        models.load_tokenizer(tmp_path)


def test_files_are_data(small, tmp_path):
    """A file of weights with code in its header, and code beside it, runs nothing."""
    for file in (small / "target").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    raw = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).unlink()
    (tmp_path / CONFIG).write_text(json.dumps(raw | {"auto_map": {"AutoModel": "modeling_evil.M"}}))
    tensors = {k: v.contiguous() for k, v in checkpoint.load_target(tmp_path).state_dict().items()}
    (tmp_path / WEIGHTS).unlink()
    save_file(tensors, tmp_path / WEIGHTS, {"__reduce__": "open('ran', 'w')"})
    checkpoint.load_target(tmp_path)
    assert not (tmp_path / "ran").exists()


# --- a full disk


@contextlib.contextmanager
def full_disk(left: int = 200):
    """No file may grow beyond so many bytes: what the system answers when a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def train_a_little(folder, model=None, steps=4, interrupt=0):
    """A few steps of a small run; with `interrupt` Ctrl-C comes in that loss."""
    model = model or children.small_model()
    loss, calls = children.noisy_loss(model), []

    def loss_of(*args):
        calls.append(1)
        if len(calls) == interrupt:
            raise KeyboardInterrupt
        return loss(*args)

    settings = TrainSettings(steps=steps, lr=0.01, save_every=2, log_every=1)
    fit(model, loss_of, children.batch_at, settings, Store(folder), quiet=True)
    return model


@pytest.mark.parametrize("shard_bytes", [None, 1500])
@pytest.mark.parametrize("old", [False, True])
def test_a_full_disk_leaves_the_model_that_was_there(tmp_path, old, shard_bytes):
    """Saving onto a full disk raises, keeps an older model whole, and leaves no other file."""
    if old:
        checkpoint.save_target(tiny.decoder(1), tmp_path, (), "float64", shard_bytes)
    before = snapshot(tmp_path)
    with full_disk(2000), pytest.raises(OSError, match="File too large"):
        checkpoint.save_target(tiny.decoder(2), tmp_path, (), "float64", shard_bytes)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("what", ["drafter", "figures", "stub", "state", "any file"])
def test_nothing_is_half_written(tmp_path, what):
    """Drafters, figures, stubs, states of training and any file of ours: whole, or not at all."""
    if what == "state":
        train_a_little(tmp_path)
    before, target = snapshot(tmp_path), tiny.decoder(0)
    settings = TrainSettings(steps=4, lr=0.01, save_every=2, log_every=1)

    def state():
        model = children.small_model()
        optimiser = torch.optim.AdamW(model.parameters())
        Store(tmp_path).save(model, optimiser, torch.Generator(), settings.steps, [])

    write = {
        "drafter": lambda: checkpoint.save_drafter(tiny.drafter(0, target), tmp_path),
        "figures": lambda: bench.write(tmp_path / "f.json", {"seconds": [0.5] * 500}),
        "stub": lambda: start.start("verify", tmp_path),
        "state": state,
        "any file": lambda: write_atomically(tmp_path / "x", lambda p: p.write_bytes(b"1" * 900)),
    }[what]
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write()
    assert snapshot(tmp_path) == before


def test_a_command_on_a_full_disk_has_one_line(run, tmp_path):
    """A command that meets a full disk says so in one line, with status 2."""
    with full_disk():
        status, out, error = run("start", "verify", "--into", tmp_path / "mine")
    assert (status, out) == (2, "") and "File too large" in error and error.count("\n") == 1
    assert run("start", "verify", "--into", tmp_path / "mine")[0] == 0, "the next try is free"


# --- Ctrl-C


def test_ctrl_c_in_training_loses_at_most_the_steps_since_the_last_save(
    run, folders, tmp_path, monkeypatch
):
    """Stopped by Ctrl-C the command has status 130, and the same command ends in the same bits."""
    whole = train_a_little(tmp_path / "whole", steps=6)
    moments = iter([1, 4, 0])
    made = []

    def training(directory, target, tokenizer, **options):
        made.append(train_a_little(directory, steps=6, interrupt=next(moments)))
        raise ValueError("trained")  # nothing of the real command is left to do

    monkeypatch.setattr(recipes, "train_dflash", training)
    ask = ["train", "dflash", tmp_path / "run", "--target", folders[0]]
    for status in (130, 130, 2):
        assert run(*ask)[0] == status
        files = {p.name for p in (tmp_path / "run").iterdir()}
        assert files == {"state.safetensors", "log.jsonl"}, "no half-written file is left"
    for name, weight in whole.state_dict().items():
        assert torch.equal(made[0].state_dict()[name], weight), name


def test_ctrl_c_while_generating_keeps_what_was_shown(run, folders, monkeypatch):
    """Ctrl-C ends a text where it is: status 130, what was written stays, no traceback."""
    ask = ["generate", "def f(x):", "--model", folders[0], "--draft", folders[1],
           "--max-new-tokens", "12"]  # fmt: skip
    _, text, _ = run(*ask)
    propose, calls = DFlashDrafter.propose, []

    def stopped(self, anchor, count):
        calls.append(count)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return propose(self, anchor, count)

    monkeypatch.setattr(DFlashDrafter, "propose", stopped)
    status, out, error = run(*ask)
    assert status == 130 and "Traceback" not in error
    assert out.startswith("def f(x):") and text.startswith(out.rstrip("\n")) and out != text


def test_ctrl_c_while_saving_leaves_the_old_model(tmp_path, monkeypatch):
    """Interrupted while bytes are written, the folder holds the old model and nothing else."""
    checkpoint.save_target(tiny.decoder(1), tmp_path, (), "float64")
    before, save = snapshot(tmp_path), checkpoint.save_file

    def slow(tensors, path, metadata=None):
        save(tensors, path, metadata)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", slow)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save_target(tiny.decoder(2), tmp_path, (), "float64")
    assert snapshot(tmp_path) == before


def test_there_are_enough_wrong_calls():
    """The tables of this file hold at least sixty wrong calls."""
    assert len(COMMANDS) + len(KINDS) + len(FILES) >= 60
