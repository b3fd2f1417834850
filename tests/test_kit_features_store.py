"""kit/features_store.py: target features computed once, kept in shards, read row by row."""

import copy
import os
import random
import signal
import time

import children
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from minidflash.anchors import sample_anchors
from minidflash.cache import CachedQwen3
from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.kit import features_store
from minidflash.kit.features_store import FeatureStore, Row, pad, read_features, write_features
from minidflash.qwen3 import Qwen3Config
from minidflash.train import TrainSettings, drafter_loss, fit

TEN = children.documents(10)


def written(directory, documents=TEN, taps=(1, 3), scale=1.0, **options):
    target = children.PositionTarget(scale)
    options = {"precision": "f32", "rows_per_shard": 4, "quiet": True} | options
    return write_features(directory, target, documents, taps, **options), target


def names(directory) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


# ------------------------------------------------------------------ what lies there


def test_ten_documents_in_shards_of_four(tmp_path):
    """Ten rows in shards of four lie in three files, each with ids, masks, features and starts."""
    store, target = written(tmp_path)
    assert names(tmp_path) == ["features.json", *(f"shard-0000{n}.safetensors" for n in range(3))]
    assert target.forwards == 10 and len(store) == 10 and store.taps == (1, 3)
    with safe_open(store.path(0), "pt") as file:
        assert file.get_tensor("starts").tolist() == [0, 2, 5, 9, 14], "lengths 2, 3, 4, 5"
        assert file.get_tensor("features").shape == (14, 7)
        assert file.get_tensor("ids")[:5].tolist() == [0, 1, 10, 11, 12]


def test_a_row_is_one_document(tmp_path):
    """A row has one document's ids, its loss mask, and the features of its positions."""
    store, _ = written(tmp_path)
    row = store[6]  # document 6 has 3 tokens and lies in the middle of the second shard
    assert row.ids.tolist() == [60, 61, 62] and row.loss_mask.tolist() == [False, True, True]
    # position, token, tap 1; position, token, tap 3; scale
    assert row.features.tolist() == [[p, 60 + p, 1, p, 60 + p, 3, 1] for p in range(3)]
    assert (row.ids.dtype, row.loss_mask.dtype) == (torch.int64, torch.bool)
    assert row.features.dtype == torch.float32


@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(1, 5))
def test_every_row_comes_back(tmp_path_factory, lengths, rows_per_shard):
    """Whatever the lengths and the shards, row i is document i, from the end too."""
    documents = [(list(range(7 * i, 7 * i + n)), [True] * n) for i, n in enumerate(lengths)]
    directory = tmp_path_factory.mktemp("rows")
    store, _ = written(directory, documents, rows_per_shard=rows_per_shard)
    assert [row.ids.tolist() for row in store] == [ids for ids, _ in documents]
    assert store[-1].ids.tolist() == documents[-1][0]
    assert [len(row.features) for row in store[:2]] == lengths[:2]
    with pytest.raises(IndexError):
        store[len(lengths)]


@pytest.mark.parametrize("precision, bytes_each", [("bf16", 2), ("f32", 4)])
def test_precision_is_chosen(tmp_path, precision, bytes_each):
    """Features take two bytes a number in bf16 and four in f32, and are read as float32."""
    documents = [([t for t in range(200)], [True] * 200)]
    store, _ = written(tmp_path, documents, precision=precision)
    size = store.path(0).stat().st_size
    assert size - 200 * (8 + 1) - 200 * 7 * bytes_each < 600, "ids, masks, features and a header"
    assert store[0].features.dtype == torch.float32
    assert torch.allclose(store[0].features[:, 1], torch.arange(200.0), rtol=2**-8)


def test_a_batch_is_filled_up_on_the_right(tmp_path):
    """Rows of 3, 2 and 6 tokens make a batch of 3 x 6, whose padding carries no loss."""
    store, _ = written(tmp_path)
    batch = store.batch([6, 0, 9])
    assert batch.ids.tolist() == [[60, 61, 62, 0, 0, 0], [0, 1, 0, 0, 0, 0], list(range(90, 96))]
    assert batch.loss_mask.sum(1).tolist() == [2, 1, 5]
    assert batch.features.shape == (3, 6, 7) and not batch.features[0, 3:].any()


def test_only_the_row_asked_for_is_read(tmp_path, monkeypatch):
    """Reading a row touches its own shard only, and of the long tensors its own slice only."""
    store, _ = written(tmp_path)
    store.path(0).unlink()
    store.path(2).unlink()
    asked = []

    class Watched:
        def __init__(self, file):
            self.file = file

        def __getitem__(self, at):
            asked.append((at.start, at.stop))
            return self.file[at]

    class Opened:
        def __init__(self, path, framework):
            self.file = safe_open(path, framework)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def get_slice(self, name):
            return Watched(self.file.get_slice(name))

    monkeypatch.setattr(features_store, "safe_open", Opened)
    assert store[6].ids.tolist() == [60, 61, 62]
    # The second shard holds documents 4 .. 7 of lengths 6, 2, 3, 4.
    assert asked == [(2, 4), (8, 11), (8, 11), (8, 11)]


# ------------------------------------------------------------------ stopped and gone on


def test_a_finished_store_is_not_computed_again(tmp_path):
    """Written again, a finished store asks the target for one row only, to know it again."""
    written(tmp_path)
    _, target = written(tmp_path)
    assert target.forwards == 1


def test_writing_goes_on_at_the_first_missing_shard(tmp_path, monkeypatch):
    """Stopped in the second shard, the first is kept, the store is refused, and writing goes on."""
    calls, original = [], features_store.save_file

    def stop_in_the_second(tensors, path):
        calls.append(path)
        path.write_bytes(b"half a shard")
        if len(calls) == 2:
            raise KeyboardInterrupt
        original(tensors, path)

    monkeypatch.setattr(features_store, "save_file", stop_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path)
    monkeypatch.undo()
    assert names(tmp_path) == ["features.json", "shard-00000.safetensors"]
    with pytest.raises(ValueError, match="2 of 3 shards are missing .*write_features again"):
        FeatureStore(tmp_path)
    store, target = written(tmp_path)
    assert target.forwards == 1 + 6, "one row to know the target again, six that were missing"
    assert [row.ids.tolist() for row in store] == [ids for ids, _ in TEN]


def test_writing_killed_again_and_again_ends_in_the_same_bytes(tmp_path):
    """A real process, killed outright at random moments, leaves the bytes of an undisturbed one."""
    children.write(tmp_path / "whole")
    killed, dice, context, hits = tmp_path / "killed", random.Random(2), children.processes(), 0
    for _ in range(4):
        shards = len(list(killed.glob("shard-*s")))
        child = context.Process(target=children.write, args=(killed,))
        child.start()
        while child.is_alive() and len(list(killed.glob("shard-*s"))) == shards:
            time.sleep(0.001)
        time.sleep(dice.random() * 0.01)
        hits += child.is_alive()
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        left = {p.suffix for p in killed.iterdir()} - {".json", ".safetensors", ".part"}
        assert not left, f"a kill left files that no later run would write over: {left}"
    assert hits >= 2, "the writing was over too soon to be killed: give it more documents"
    children.write(killed)
    assert names(killed) == names(tmp_path / "whole")
    for name in names(killed):
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "change, words",
    [
        ({"taps": (1, 2)}, r"taps=\[1, 3\], not \[1, 2\]"),
        ({"precision": "bf16"}, "precision='f32', not 'bf16'"),
        ({"documents": TEN[:9]}, "rows=10, not 9"),
        ({"documents": [*TEN[:9], ([7], [True])]}, "documents="),
        ({"documents": [([0, 1], [True, True]), *TEN[1:]]}, "documents="),
        ({"scale": 2.0}, "another target's features"),
    ],
)
def test_other_features_are_refused(tmp_path, change, words):
    """A directory with other taps, precision, documents, masks or another target is refused."""
    written(tmp_path)
    with pytest.raises(ValueError, match=words):
        written(tmp_path, **change)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"documents": []}, "documents=0"),
        ({"documents": [([], [])]}, "document 0 has 0 ids"),
        ({"documents": [([1, 2], [True])]}, "document 0 has 2 ids and a loss mask of 1"),
        ({"precision": "f16"}, "precision='f16' must be one of"),
        ({"rows_per_shard": 0}, "rows_per_shard=0"),
    ],
)
def test_bad_input_is_refused_before_any_work(tmp_path, change, words):
    """Bad documents or options are a ValueError that names them, and nothing is written."""
    with pytest.raises(ValueError, match=words):
        written(tmp_path, **change)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_is_refused(tmp_path):
    """A directory without features is a ValueError that says so."""
    with pytest.raises(ValueError, match="nothing was written here"):
        FeatureStore(tmp_path)


# ------------------------------------------------------------------ online or from disk


@pytest.fixture(scope="module")
def world():
    """A frozen target, a drafter, and six documents of different lengths."""
    layers = dict(hidden_size=8, intermediate_size=12, num_attention_heads=2,
                  num_key_value_heads=1, head_dim=4)  # fmt: skip
    torch.manual_seed(0)
    target = CachedQwen3(Qwen3Config(**layers, vocab_size=11, num_hidden_layers=6))
    target.eval().requires_grad_(False)
    model = DraftModel(DrafterConfig(**layers, num_hidden_layers=1, block_size=4, mask_token_id=10,
                                     vocab_size=11, target_layer_ids=(1, 3), num_target_layers=6,
                                     target_hidden_size=8))  # fmt: skip
    g = torch.Generator().manual_seed(1)
    docs = [(torch.randint(10, (n,), generator=g).tolist(), [t >= 2 for t in range(n)])
            for n in (9, 7, 12, 8, 10, 6)]  # fmt: skip
    return target, model, docs


def trained(world, row_of) -> tuple[DraftModel, list[dict]]:
    """A drafter trained on the rows that `row_of(i)` gives, two a batch."""
    target, fresh, docs = world
    model = copy.deepcopy(fresh)

    def loss_of(batch: Row, generator):
        anchors = sample_anchors(batch.loss_mask, 3, generator)
        return drafter_loss(model, target.embed, target.head, batch.ids, batch.features, anchors,
                            batch.loss_mask, 4.0)  # fmt: skip

    def batch_at(i: int) -> Row:
        return pad([row_of((2 * i + j) % len(docs)) for j in range(2)])

    s = TrainSettings(steps=12, lr=0.01, log_every=1)
    return model, fit(model, loss_of, batch_at, s, quiet=True)


def test_online_and_stored_features_train_the_same_drafter(world, tmp_path):
    """Features read online and in f32 from disk train the same bits; bf16 nearly the same."""
    target, _, docs = world

    def online(i: int) -> Row:
        ids = torch.tensor(docs[i][0])
        return Row(ids, torch.tensor(docs[i][1]), read_features(target, ids[None], (1, 3))[0])

    a, log = trained(world, online)
    exact = write_features(tmp_path / "f32", target, docs, (1, 3), "f32", 4, quiet=True)
    b, same = trained(world, exact.__getitem__)
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y), f"{name} depends on where the features came from"
    assert [x["loss"] for x in log] == [x["loss"] for x in same]
    rounded = write_features(tmp_path / "bf16", target, docs, (1, 3), "bf16", 4, quiet=True)
    near = trained(world, rounded.__getitem__)[1]
    assert [x["loss"] for x in near] == pytest.approx([x["loss"] for x in log], rel=0.01)
    assert [x["loss"] for x in near] != [x["loss"] for x in log], "bf16 must round something"
    assert log[-1]["loss"] < log[0]["loss"]


def test_writing_features_leaves_the_target_alone(world, tmp_path):
    """The target that was read has no gradient, and not one bit of it has changed."""
    target, _, docs = world
    before = copy.deepcopy(target.state_dict())
    loose = copy.deepcopy(target).requires_grad_(True)
    write_features(tmp_path, loose, docs, (1, 3), quiet=True)
    assert all(torch.equal(v, before[k]) for k, v in loose.state_dict().items())
    assert all(p.grad is None for p in loose.parameters())
    assert not read_features(loose, torch.tensor([docs[0][0]]), (1, 3)).requires_grad
