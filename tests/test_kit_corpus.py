"""Wild text and the tokenizer: real files, split by file, and tokens that lose nothing."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidflash.kit import corpus, tokenizer
from minidflash.kit.corpus import wild_files, wild_prompts, wild_text
from minidflash.kit.world import KINDS, document

LINE = "value = compute(value)  # one more line of code\n"


@pytest.fixture(scope="module")
def shipped():
    return tokenizer.load_tokenizer()


@pytest.fixture
def library(tmp_path):
    """A small folder of 120 wanted files and a few that must be left out."""
    for i in range(120):
        (tmp_path / f"module{i}.py").write_bytes((f"# {i}\r\n" + LINE * 10).encode())
    for name in ("test/test_a.py", "idlelib/b.py", "encodings/c.py", "json/tests/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(LINE * 10)
    (tmp_path / "table.py").write_text("TABLE = [" + "17, 23, 99, " * 200 + "]\n")
    (tmp_path / "tiny.py").write_text("x = 1\n")
    return tmp_path


def test_a_small_library_by_hand(library):
    """Tests, idlelib, encodings, tables and tiny files are left out; the rest is split by file."""
    train, held_out = (dict(wild_files(split, library)) for split in ("train", "held_out"))
    assert set(train) | set(held_out) == {f"module{i}.py" for i in range(120)}
    assert not set(train) & set(held_out)
    assert 1 <= len(held_out) <= 20, "about one file in twenty is held out"
    for text in train.values():
        assert "\r" not in text


def test_the_running_pythons_library():
    """Every Python has wild text: well-known modules are there, in path order, tests are not."""
    files = {split: wild_files(split) for split in ("train", "held_out")}
    names = [name for split in files for name, _ in files[split]]
    assert len(names) == len(set(names)) > 200
    for known in ("argparse.py", "json/decoder.py", "dataclasses.py"):
        assert known in names
    assert not [name for name in names if re.search(r"(^|/)tests?/|idlelib|encodings/", name)]
    for split in files:
        listed = [name for name, _ in files[split]]
        assert listed == sorted(listed)
        assert all(corpus.is_held_out(name) == (split == "held_out") for name in listed)
    assert 0.02 < len(files["held_out"]) / len(names) < 0.10
    assert sum(len(text) for _, text in files["train"]) > 5_000_000
    assert wild_text("held_out") == "\n".join(text for _, text in files["held_out"])


def test_wild_prompts():
    """A wild prompt is 150 to 400 characters of a held-out file up to inside a function."""
    prompts = wild_prompts(12, seed=1)
    assert len(set(prompts)) == 12
    assert prompts == wild_prompts(12, seed=1) != wild_prompts(12, seed=2)
    whole = wild_text("held_out")
    for prompt in prompts:
        assert 150 <= len(prompt) <= 400
        assert prompt in whole
        *_, definition, docstring = prompt.split("\n")
        assert definition.strip().startswith("def ") and definition.endswith(":")
        assert docstring.strip().lstrip("r").startswith('"""')


def test_digits_stand_alone(shipped):
    """47 is the tokens 4 and 7, so that sums can be learnt digit by digit."""
    for text in ("47", "12 + 35 = 47", "[1, 13, 140]", "x2y34"):
        pieces = [shipped.decode([i]) for i in shipped(text).input_ids]
        assert "".join(pieces) == text
        assert all(len(piece) == 1 for piece in pieces if re.search(r"\d", piece)), pieces


@given(st.text(max_size=200))
def test_nothing_is_lost(text):
    """Encoding and decoding gives back any text, in any script, exactly."""
    loaded = tokenizer.load_tokenizer()
    assert loaded.decode(loaded(text).input_ids) == text


def test_documents_and_sources_survive(shipped):
    """Documents of the world and whole files come back exactly; a document fits a training row."""
    for kind in KINDS:
        for index in range(50):
            text = document(kind, "held_out", index).text
            ids = shipped(text).input_ids
            assert shipped.decode(ids) == text
            assert 60 <= len(ids) <= 256, f"{kind} document of {len(ids)} tokens"
    for _, text in wild_files("held_out")[:5]:
        assert shipped.decode(shipped(text).input_ids) == text


def test_special_tokens(shipped, tmp_path):
    """The end token has id 0, the mask id 1, and both stay so beside a Qwen3 config."""
    assert len(shipped) == 1024
    assert (shipped.eos_token, shipped.eos_token_id) == ("<|endoftext|>", 0)
    assert (shipped.mask_token, shipped.mask_token_id) == ("<|mask|>", 1)
    assert shipped("a<|endoftext|>b<|mask|>").input_ids[1::2] == [0, 1]
    tokenizer.save_tokenizer(shipped, tmp_path)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = tokenizer.load_tokenizer(tmp_path)
    for text in (document("code", "train", 0).text, "def fibonacci(n):\n    ", "größer 12"):
        assert again(text).input_ids == shipped(text).input_ids


def test_training_again_gives_the_same_kind_of_tokenizer():
    """A tokenizer trained from scratch keeps the special ids, the size and the single digits."""
    made = tokenizer.train_tokenizer(size=300, world_documents=60)
    assert len(made) == 300
    assert (made.eos_token_id, made.mask_token_id) == (0, 1)
    text = document("chat", "train", 3).text + "\n\té漢"
    assert made.decode(made(text).input_ids) == text


def test_the_stream_of_tokens(shipped):
    """Documents stay whole between end tokens, and each kind has its share of the tokens."""
    count = 60_000
    stream = tokenizer.token_stream(shipped, "train", 5, count)
    assert stream.dtype == np.uint16 and count <= len(stream) < count + 3000
    assert stream[-1] == 0 and stream.max() < 1024
    sizes = dict.fromkeys(("maths", "code", "chat", "wild"), 0)
    cues = {"Question: ": "maths", "Task: ": "code", "Record: ": "chat"}
    known = {document(kind, "train", i, 5).text for kind in KINDS for i in range(300)}
    for ids in np.split(stream, np.flatnonzero(stream == 0) + 1)[:-1]:
        text = shipped.decode(ids[:-1].tolist())
        kind = next((cues[cue] for cue in cues if text.startswith(cue)), "wild")
        assert kind == "wild" or text in known, f"cut or foreign document: {text}"
        sizes[kind] += len(ids)
    for kind, share in tokenizer.SHARES.items():
        assert abs(sizes[kind] / len(stream) - share) < 0.02, f"{kind}: {sizes}"


def test_the_stream_repeats_with_its_seed(shipped):
    """The same seed gives the same stream, another seed another one, and rows are its pieces."""
    first = tokenizer.token_stream(shipped, "train", 1, 5000)
    assert np.array_equal(first, tokenizer.token_stream(shipped, "train", 1, 5000))
    other = tokenizer.token_stream(shipped, "train", 2, 5000)
    assert not np.array_equal(first[:5000], other[:5000])
    rows = tokenizer.packed_rows(shipped, "train", 1, rows=50, length=100)
    assert rows.shape == (50, 100)
    assert np.array_equal(rows.reshape(-1), first[:5000])
    maths = tokenizer.token_stream(shipped, "train", 1, 500, {"maths": 1})
    assert shipped.decode(maths.tolist()).count("Question: ") == np.count_nonzero(maths == 0)


def test_the_world_costs_few_tokens(shipped):
    """A token stands for more than two characters, in the world's text and in wild text."""
    for text in (*(document(kind, "held_out", 7).text for kind in KINDS), wild_text("held_out")):
        assert len(text) / len(shipped(text).input_ids) > 2


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda t: wild_files("test"), "split is 'test'; allowed are 'train', 'held_out'"),
        (lambda t: wild_prompts(10**6), "count is 1000000; the held_out files have"),
        (lambda t: tokenizer.train_tokenizer(size=200), "size is 200; allowed is 258"),
        (lambda t: tokenizer.token_stream(t, "dev"), "split is 'dev'"),
        (lambda t: tokenizer.token_stream(t, "train", 0, 0), "count is 0; allowed is 1 or more"),
        (lambda t: tokenizer.token_stream(t, "train", shares={"poems": 1}), "shares has 'poems'"),
        (lambda t: tokenizer.token_stream(t, "train", shares={"maths": 0}), "must be above 0"),
    ],
)
def test_what_is_refused(shipped, call, message):
    """An unknown split or kind, or an impossible count, is refused by name before any work."""
    with pytest.raises(ValueError) as caught:
        call(shipped)
    assert message in str(caught.value)


def test_an_empty_folder_is_refused(tmp_path):
    """A folder without source files is refused rather than giving no text for ever."""
    with pytest.raises(ValueError, match="it holds no train source files"):
        wild_files("train", tmp_path)
