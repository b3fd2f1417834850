"""kit/ablations: runs that differ in one thing, and drafters that read features another way."""

import argparse
import json

import pytest
import small
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import write_pair

from minidflash.anchors import PADDING, block_inputs, block_positions, training_mask
from minidflash.attention import Attention
from minidflash.greedy import greedy
from minidflash.kit import ablations, checkpoint
from minidflash.kit.ablations import BASE, RUNS, RowsDrafter, RowsModel, Setup
from minidflash.kit.block_attention import block_attention
from minidflash.speculate import speculate


def rows_model(target, features=True, seed=0) -> RowsModel:
    """A random drafter whose context rows pass all its layers."""
    plain = tiny.drafter(seed, target, taps=(1, 3) if features else (1,))
    model = RowsModel(plain.config).to(torch.float64)
    model.load_state_dict(plain.state_dict())
    return model.eval()


def test_the_runs_differ_from_the_base_in_one_thing():
    """Each run changes one thing, or it explains nothing (without features taps have no use)."""
    for name, setup in RUNS.items():
        changed = {k for k, v in vars(setup).items() if v != getattr(BASE, k)}
        assert len(changed - {"taps"} if setup.inject == "none" else changed) == (name != "base")


@given(st.integers(1, 9), st.integers(1, 8), st.integers(0, 99))
def test_context_in_pieces_is_the_context_at_once(length, cut, seed):
    """Rows that come later see the rows that are kept: K and V do not depend on the pieces."""
    model, cut = rows_model(tiny.decoder(seed), seed=seed), min(cut, length)
    features = torch.randn(1, length, 16, generator=torch.Generator().manual_seed(seed)).double()
    at = torch.arange(length)
    whole = model.context(features, at)
    first = model.context(features[:, :cut], at[:cut])
    if cut == length:
        return
    then = model.context(features[:, cut:], at[cut:], first)
    for layer, (a, b, c) in enumerate(zip(whole, first, then, strict=True)):
        for side in (0, 1):
            joined = torch.cat([b[side], c[side]], 2)
            assert torch.allclose(a[side], joined, atol=1e-12), f"layer {layer}, cut at {cut}"


def test_a_row_does_not_see_later_rows():
    """The context is causal: what comes after a position must not change its keys."""
    model = rows_model(tiny.decoder(1))
    features = torch.randn(1, 6, 16).double()
    other = features.clone()
    other[:, 4:] += 1.0
    for (a, _), (b, _) in zip(model.context(features, torch.arange(6)),
                              model.context(other, torch.arange(6)), strict=True):  # fmt: skip
        assert torch.equal(a[:, :, :4], b[:, :, :4]) and not torch.equal(a[:, :, 4:], b[:, :, 4:])


def test_at_the_input_only_means_that_deeper_layers_see_processed_rows():
    """Layer 0 reads the fused rows, deeper ones what became of them: else nothing was ablated."""
    model = rows_model(tiny.decoder(2))
    features, at = torch.randn(1, 5, 16).double(), torch.arange(5)
    before = model.context(features, at)
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.zero_()
    after = model.context(features, at)
    assert torch.equal(before[0][0], after[0][0]) and not torch.equal(before[1][0], after[1][0])


@given(st.booleans(), st.integers(0, 99))
def test_output_equals_greedy(features, seed):
    """However a drafter reads the target, the text is the target's own."""
    target = tiny.decoder(seed)
    drafter = RowsDrafter(target, rows_model(target, features, seed), features)
    prompt = [1 + seed % 5, 2, 3]
    out = speculate(target, drafter, prompt, 12)
    assert out.tokens == greedy(target, prompt, 12)


@pytest.mark.parametrize("features", [True, False])
def test_training_shows_what_decoding_shows(features):
    """A packed block and the same block in the loop give equal rows, with features or without."""
    target = tiny.decoder(5)
    model = rows_model(target, features)
    ids = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3]])
    rows = target.forward(ids, taps=(1, 3))[1] if features else target.embed(ids)
    anchors, B = torch.tensor([[3, 5]]), model.config.block_size
    noisy = target.embed(block_inputs(ids, anchors, B, model.config.mask_token_id))
    mask = training_mask(anchors, B, 8)[:, None]
    with torch.no_grad(), block_attention(model):
        context = model.context(rows, torch.arange(8))
        packed = model(noisy, block_positions(anchors, B), context, mask).unflatten(1, (2, B))
    assert all(x.self_attn.mix.__func__ is Attention.mix for x in model.layers)
    for n, anchor in enumerate(anchors[0].tolist()):
        drafter = RowsDrafter(target, model, features)
        drafter.begin(8)
        for piece in ([0, 1], list(range(2, anchor))):
            drafter.commit(ids[0, piece].tolist(), rows[0, piece])
        due = drafter.logits(int(ids[0, anchor]))
        assert torch.allclose(target.head(packed[0, n, 1:]), due, atol=1e-5), f"anchor {anchor}"


def test_which_tap_a_run_reads_first():
    """`base` begins with the last of its taps, `middle-tap` with the middle one."""
    target = small.target(9)
    features = torch.randn(1, 3, 3 * 32)
    for reads, kept in (("last tap", slice(64, 96)), ("middle tap", slice(32, 64))):
        setup = Setup(layers=2, taps=3, warm="last layers", reads=reads)
        model = ablations.begin(target, setup, 0, block_size=8)
        assert torch.equal(model.fc(features), features[..., kept]), reads


def test_fixed_blocks_by_hand():
    """An answer at 2 .. 8 in blocks of 3 starts at 2 and 5; 8 has nothing after it."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 1]]).bool()
    assert ablations.fixed_blocks(mask, 4, block_size=3).tolist() == [
        [2, 5, PADDING, PADDING], [PADDING] * 4]  # fmt: skip
    assert ablations.fixed_blocks(mask, 1, block_size=3).tolist() == [[2], [PADDING]]


def test_every_second_text_is_greedy(tmp_path):
    """The recipe's temperatures take turns, 0, 0.8, 0, 0.5, in each process's file."""
    for rank in (0, 1):
        lines = [json.dumps({"ids": [10 * rank + i, 7], "prompt": 1}) for i in range(4)]
        (tmp_path / f"text.{rank}-of-2.jsonl").write_text("\n".join(lines) + "\n")
    assert [ids[0] for ids, _ in ablations.read_text(tmp_path)] == [0, 1, 2, 3, 10, 11, 12, 13]
    assert [ids[0] for ids, _ in ablations.read_text(tmp_path, every=2)] == [0, 2, 10, 12]
    with pytest.raises(ValueError, match="holds no text"):
        ablations.read_text(tmp_path / "nowhere")


def test_saved_and_read_again(tmp_path):
    """Each injection comes back as itself, and nobody takes another one for DFlash."""
    target = tiny.decoder(3, 6, torch.float32)
    for how in ("every layer", "input only", "none"):
        setup = Setup(inject=how, taps=1 if how == "none" else 2)
        model = (tiny.drafter(0, target) if how == BASE.inject
                 else rows_model(target, how == "input only")).float()  # fmt: skip
        ablations.save(model, setup, tmp_path / how)
        found = ablations.load(target, tmp_path / how)
        assert type(found) is type(ablations.drafter_of(target, model, setup))
        assert getattr(found, "features", None) == {"input only": True, "none": False}.get(how)
        assert torch.allclose(found.model.fc.weight, model.fc.weight, atol=1e-2)
        if how != BASE.inject:
            with pytest.raises(ValueError, match=ablations.INJECTION):
                checkpoint.load_drafter(tmp_path / how)
    path = tmp_path / "none" / checkpoint.CONFIG
    checkpoint.write_json(path, checkpoint.read_json(path) | {ablations.INJECTION: "twice"})
    with pytest.raises(ValueError, match="'twice' is none of"):
        ablations.load(target, tmp_path / "none")


def test_the_whole_command(tmp_path, capsys, monkeypatch):
    """Two runs of two steps are trained and decode side by side; a second call only decodes."""
    folder, _ = write_pair(tmp_path)
    texts = [json.dumps({"ids": [5 + i, *range(9, 22)], "prompt": 3}) for i in range(8)]
    (tmp_path / "text.0-of-1.jsonl").write_text("\n".join(texts) + "\n")
    small = {"base": Setup(layers=1, taps=2, warm="last layers"),
             "no-features": Setup(layers=1, taps=1, inject="none", warm="random")}
    monkeypatch.setattr(ablations, "RUNS", small)
    monkeypatch.setattr(ablations, "BASE", small["base"])
    parser = argparse.ArgumentParser()
    ablations.arguments(parser)
    out = tmp_path / "ablations.json"
    args = parser.parse_args(
        [str(tmp_path / "runs"), "--text", str(tmp_path), "--target", str(folder), "--steps", "2",
         "--batch", "4", "--anchors", "2", "--only", *small, "--each", "1", "--temperatures", "0",
         "--repeats", "1", "--json", str(out)])  # fmt: skip
    assert ablations.main(args) == 0
    assert "no-features" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["runs"]["no-features"]["differs"] == {"inject": "none", "taps": 1,
                                                        "warm": "random"}  # fmt: skip
    assert all(run["steps"] == 2 and "2" in run["tau_by_step"] for run in report["runs"].values())
    assert {"plain", *small} == set(report["temperatures"]["0"]["overall"])
    assert all(f["identical"] for f in report["temperatures"]["0"]["overall"].values())
    monkeypatch.setattr(ablations, "train", None)  # would raise if it were called
    assert ablations.main(args) == 0


def test_without_features_the_target_makes_no_pass():
    """A drafter that reads nothing of the target must not be charged for the target's forwards."""
    target = tiny.decoder(0)
    data = ablations.EmbeddedText(target, [([1, 2, 3, 4, 5, 1], 1)], (1,), 1, 0)
    ids, features, _ = data.group(0)
    assert target.forwards == 0 and torch.equal(features, target.embed(ids).bfloat16())
