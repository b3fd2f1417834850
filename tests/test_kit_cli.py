"""The command line: texts go in and come out whole, and a mistake is one line."""

import shutil
import subprocess
import sys

import pairs
import pytest
import torch

from minidflash import __main__ as cli
from minidflash.greedy import greedy
from minidflash.kit import models
from minidflash.kit.tokenizer import load_tokenizer
from minidflash.kit.world import KINDS, document


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return pairs.write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def run(folders, capsys):
    """Runs a command with the random pair; returns (status, standard output, standard error)."""

    def command(*argv, pair=True):
        chosen = ["--model", str(folders[0]), "--draft", str(folders[1])] if pair else []
        threads = torch.get_num_threads()
        try:
            status = cli.main([*argv, *chosen])
        except SystemExit as error:
            status = error.code
        finally:
            torch.set_num_threads(threads)
        return status, *capsys.readouterr()

    return command


@pytest.mark.parametrize("kind", KINDS)
def test_a_question_gets_its_cue(kind):
    """A question, task or record without its cue becomes the prompt that the world would ask."""
    prompt = document(kind, "held_out", 0).prompt
    without = prompt[: prompt.rindex("\n")]
    assert cli.with_cue(without) == cli.with_cue(without + "\n") == prompt
    assert cli.with_cue(prompt) == prompt


@pytest.mark.parametrize("text", ["def f(x):", "A Question: what?", "import os\n", ""])
def test_any_other_text_is_continued_as_it_is(text):
    """Text that starts otherwise is not touched."""
    assert cli.with_cue(text) == text


def test_generate_writes_the_targets_own_words(run, folders):
    """generate prints prompt and greedy continuation, whatever drafts: DFlash with any block size,
    lookup, or nobody."""
    pair = models.load(*folders)
    prompt = "Question: 1 + 2?\nAnswer:"
    tokens = greedy(pair.target, pair.encode(prompt), 9, pair.stop_ids)
    wanted = prompt + pair.decode(tokens) + "\n"
    for extra in ([], ["--block-size", "3"]):
        found = run("generate", "Question: 1 + 2?", "--max-new-tokens", "9", *extra)
        assert found == (0, wanted, "")
    for draft in ("none", "n-gram"):
        found = run("generate", "Question: 1 + 2?", "--max-new-tokens", "9", "--model",
                    str(folders[0]), "--draft", draft, pair=False)  # fmt: skip
        assert found == (0, wanted, "")


def test_generate_with_a_temperature(run):
    """At a temperature the seed decides: the same seed gives the same text, another another."""
    ask = ["generate", "def f(x):", "--max-new-tokens", "20", "--temperature", "1"]
    first, second = run(*ask), run(*ask)
    assert first == second
    assert run(*ask, "--seed", "5")[1] != first[1]


def test_stats_go_to_standard_error(run):
    """--stats reports tokens, rounds, tau and times, apart from the text."""
    status, out, error = run("generate", "def f(x):", "--max-new-tokens", "5", "--stats")
    assert status == 0 and "tau" not in out
    assert "5 tokens (length), 4 rounds, tau 1.00, 5 target passes" in error
    assert "draft" in error and "verify" in error


def test_generate_in_chat(run, folders, tmp_path):
    """--chat asks through the model's template, thinking on or off as said, and prints question and
    answer."""
    words = load_tokenizer()
    words.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{{ 'assistant:' + (' (quick)' if not enable_thinking else '') }}")
    talker = tmp_path / "target"
    shutil.copytree(folders[0], talker)
    words.save_pretrained(talker)
    pair = models.load(talker, folders[1])
    asked = "system: Be short.\nuser: Hi?\nassistant: (quick)"
    tokens = greedy(pair.target, words.encode(asked), 7, pair.stop_ids)
    argv = ["generate", "Hi?", "--chat", "--system", "Be short.", "--max-new-tokens", "7",
            "--model", str(talker), "--draft", str(folders[1])]
    status, out, error = run(*argv, "--thinking", "off", pair=False)
    assert (status, out, error) == (0, "Hi?\n\n" + pair.decode(tokens) + "\n", "")
    status, out, error = run(*argv, pair=False)
    assert (status, out) == (2, "") and "say enable_thinking=True or False" in error


def test_generate_with_a_cut_tail(run):
    """With --top-k 1 a drawn text is the greedy one."""
    argv = ["generate", "Question: 1 + 2?", "--max-new-tokens", "9"]
    greedy_text = run(*argv)[1]
    assert run(*argv, "--temperature", "3", "--top-k", "1")[1] == greedy_text
    assert run(*argv, "--temperature", "3", "--top-p", "1e-9")[1] == greedy_text


def test_info_without_shipped_models(run, tmp_path, monkeypatch):
    """info prints versions and the device, and says of a missing model how to train it."""
    monkeypatch.setattr(models, "SHIPPED", tmp_path)
    status, out, _ = run("info", pair=False)
    assert status == 0
    assert f"torch        {torch.__version__}" in out and "CUDA device" in out
    assert "python -m minidflash train dflash" in out


def test_info_with_shipped_models(run, folders, monkeypatch):
    """info describes each shipped model: sizes, taps, recipe and scores."""
    monkeypatch.setattr(models, "SHIPPED", folders[0].parent)
    recipe = '{"recipe": {"command": "train it"}, "scores": {"maths": {"tau": 9.1234}, "all": 2}}'
    (folders[1] / "recipe.json").write_text(recipe)
    _, out, _ = run("info", pair=False)
    for part in ("target       5 layers x 8, 2/1 heads of 4", "dflash       2 layers x 8",
                 "block size 4, taps [1, 3] of 5 layers", "made by: train it", "maths: tau 9.12",
                 "all: 2"):  # fmt: skip
        assert part in out


def test_bench(run, tmp_path):
    """bench compares block sizes on prompts of one's own, and writes JSON."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "def f(x):"}\n')
    status, out, error = run("bench", "--data", str(tmp_path / "p.jsonl"), "--block-size", "2", "4",
                             "--max-new-tokens", "6", "--repeats", "1", "--json",
                             str(tmp_path / "out.json"))  # fmt: skip
    assert (status, error) == (0, "")
    assert "dflash-2" in out and "dflash-4" in out and (tmp_path / "out.json").exists()


@pytest.mark.parametrize("argv, message", [
    ([], "arguments are required: COMMAND"),
    (["dance"], "invalid choice: 'dance'"),
    (["generate"], "arguments are required: text"),
    (["generate", "a", "--block-size", "x"], "invalid int value: 'x'"),
    (["generate", "a", "--model", "nowhere"], "'nowhere' is no folder here"),
    (["bench", "--data", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
])  # fmt: skip
def test_a_mistake_is_one_line(run, argv, message):
    """A mistake is one line on standard error, status 2, and no traceback."""
    status, out, error = run(*argv, pair=False)
    assert (status, out) == (2, "")
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("argv, message", [
    (["generate", ""], "prompt=[] is empty"),
    (["generate", "a", "--block-size", "1"], "block_size=1 must be at least 2"),
    (["generate", "a", "--thinking", "on"], "--thinking and --system need --chat"),
    (["generate", "a", "--chat"], "has no chat template"),
    (["generate", "a", "--top-p", "0"], "top_p=0.0"),
    (["bench", "--decoders", "eagles"], "--decoders eagles: one of plain"),
    (["generate", "a", "--temperature", "-1"], "temperature=-1.0 must be"),
    (["generate", "a", "--max-new-tokens", "-1"], "max_new_tokens=-1 must be"),
    (["generate", "a", "--max-new-tokens", "40000"], "exceeds the target's 32768 positions"),
])  # fmt: skip
def test_a_mistake_found_by_a_room_is_one_line(run, argv, message):
    """What the rooms refuse comes out as one line too, before any text."""
    status, out, error = run(*argv)
    assert (status, out) == (2, ""), out
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["start", "grade", "recipes"])
def test_other_commands_are_passed_on(monkeypatch, name):
    """start, grade and train get everything behind their name, and their status is returned."""
    from importlib import import_module

    seen = []
    module = import_module(f"minidflash.kit.{name}")
    monkeypatch.setattr(module, "main", lambda argv: seen.append(argv) or 7)
    assert cli.main(["train" if name == "recipes" else name, "--help", "x"]) == 7
    assert seen == [["--help", "x"]]


def test_help_names_every_command():
    """python -m minidflash --help lists every command, within 80 columns."""
    found = subprocess.run([sys.executable, "-m", "minidflash", "--help"], capture_output=True,
                           text=True, check=True, env={"COLUMNS": "80", "PATH": ""})  # fmt: skip
    for name in ("demo", "generate", "info", "bench", "export", "train", "start", "grade"):
        assert f"    {name} " in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 80
