"""Room 16 · dflash: a block drafter in the loop, its cache in step with the target's."""

import math
from types import SimpleNamespace

import pytest
import torch
from chance import assert_same_law, law_of, target_law
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import decoder, drafter, successor
from worlds import texts

from minidflash.greedy import greedy
from minidflash.speculate import speculate

# Real models run here: fewer examples than elsewhere. They grow with the profile.
SOME = settings(max_examples=max(15, settings().max_examples // 2))
FEW = settings(max_examples=max(8, settings().max_examples // 6))


def pair(seed, block_size=4, mask=0, vocab=6, dtype=torch.float64):
    target = decoder(seed, vocab, dtype, layers=4)
    return target, drafter(seed, target, block_size, mask)


def from_scratch(target, model, text, block_size):
    """Draft logits computed anew: the whole text through the target, the whole context at once.

    `text` ends with the anchor, whose own features are never context.
    """
    taps = tuple(model.config.target_layer_ids)
    _, features = target.forward(torch.tensor([text[:-1]]), taps=taps)
    context = model.context(features, torch.arange(len(text) - 1))
    ids = torch.tensor([[text[-1]] + [model.config.mask_token_id] * (block_size - 1)])
    positions = torch.arange(len(text) - 1, len(text) - 1 + block_size)
    return target.head(model(target.embed(ids), positions, context)[0])[1:]


def told(room, target, model, text, block_size=None):
    """A drafter that has been told this text up to its last token, the anchor."""
    mine = room.DFlashDrafter(target, model, block_size)
    mine.begin(len(text) + 20)
    _, features = target.forward(torch.tensor([text[:-1]]), taps=mine.taps)
    mine.commit(text[:-1], features[0])
    return mine


def say(run):
    rounds = [(r.proposed, r.accepted, r.emitted) for r in run.rounds]
    return f"tokens {run.tokens}, rounds {rounds}"


# --- by hand


@pytest.mark.exercise("16.1", "16.2", "16.3")
def test_two_models_with_empty_minds(room):
    """Tokens run 1 2 3 1 2 3 and all guesses are 2: the records can be worked out by hand."""
    #          after: 0  1  2  3     the mask is 0, so every slot guesses 2
    target, model = successor([2, 2, 3, 1])
    run = room.generate(target, model, [3], 8)
    assert run.tokens == [1, 2, 3, 1, 2, 3, 1, 2], say(run)
    assert [(r.proposed, r.accepted, r.emitted) for r in run.rounds] == [
        ([2, 2, 2], 1, [2, 3]),  # anchor 1: the first guess is right, then 3 is due
        ([2, 2, 2], 0, [1]),  # anchor 3: 1 is due
        ([2, 2, 2], 1, [2, 3]),
        ([2], 0, [1]),  # two tokens due: one guess, one bonus
        ([], 0, [2]),  # one token due: no guess
    ], say(run)


@pytest.mark.exercise("16.1", "16.2", "16.3")
@pytest.mark.parametrize("n", [1, 2, 5, 9, 10, 20])
@pytest.mark.parametrize("B", [2, 4, 9])
def test_perfect_and_hopeless_models_set_the_amount_of_work(room, n, B):
    """A drafter that is always right needs 1 + ceil((n-1)/B) target forwards, one never right n."""
    target, model = successor([3, 3, 3, 3], B)
    assert room.generate(target, model, [1], n).tokens == [3] * n
    assert target.forwards == 1 + math.ceil((n - 1) / B)
    target, model = successor([3, 2, 1, 0], B)  # 1 2 1 2 ..., and every guess is 3
    assert room.generate(target, model, [1], n).tokens == [2, 1] * (n // 2) + [2] * (n % 2)
    assert target.forwards == n


# --- the output is the target's own


@pytest.mark.exercise("16.1", "16.2", "16.3")
@SOME
@given(data=st.data())
def test_any_weights_any_request_the_output_is_greedy(room, data):
    """Random targets, drafters, prompts, blocks, budgets and stops give plain greedy's tokens."""
    vocab = data.draw(st.integers(2, 6), "vocabulary")
    mask = data.draw(st.integers(0, vocab - 1), "mask")
    trained, B = data.draw(st.integers(2, 6), "B"), data.draw(st.integers(2, 6), "B when decoding")
    prompt = data.draw(texts(vocab, 1, 5), "prompt")
    stop = data.draw(texts(vocab, 0, 2), "stops")  # the mask's id may be among them
    n = data.draw(st.integers(0, 14), "budget")
    target, model = pair(data.draw(st.integers(0, 999), "weights"), trained, mask, vocab)
    run = room.generate(target, model, prompt, n, B, stop_ids=stop)
    forwards = target.forwards
    plain = greedy(target, prompt, n, stop)
    assert run.tokens == plain, f"greedy writes {plain}; {say(run)}"
    assert run.stop == ("stop" if plain and plain[-1] in stop else "length")
    assert run.target_forwards == forwards <= max(1, len(plain)) or n == 0
    assert all(len(r.proposed) <= B - 1 for r in run.rounds)


@pytest.mark.exercise("16.1", "16.2", "16.3")
def test_the_mask_id_is_a_token_like_any_other(room):
    """A prompt that holds the mask's id and an answer that holds it keep it in place."""
    # case A4, case A6
    target, model = successor([1, 2, 0, 0], mask=0)  # 1 2 0 1 2 0: the mask's id is written
    run = room.generate(target, model, [0, 3, 0], 7)
    assert run.tokens == [1, 2, 0, 1, 2, 0, 1] == greedy(target, [0, 3, 0], 7), say(run)
    run = room.generate(target, model, [3], 7, stop_ids=[0])
    assert run.tokens == [0] and run.stop == "stop", "the mask's id may even be the stop token"


@pytest.mark.exercise("16.1", "16.2", "16.3")
def test_in_float32_the_output_is_greedy_too(room):
    """In float32 random pairs write exactly the tokens of plain decoding."""
    # case A16, case A18 (float32)
    for seed in range(4):
        target, model = pair(seed, dtype=torch.float32)
        assert room.generate(target, model, [1, 2], 12).tokens == greedy(target, [1, 2], 12)


# --- both caches in step


@pytest.mark.exercise("16.1", "16.2", "16.3")
@FEW
@given(seed=st.integers(0, 999), prompt=texts(6, 1, 4), B=st.integers(2, 5))
def test_every_round_drafts_as_if_from_scratch(room, seed, prompt, B):
    """In every round the draft logits equal those of a fresh pass over the settled text."""
    # case C4, case C2
    target, model = pair(seed, B)
    mine, text = room.DFlashDrafter(target, model), list(prompt)

    class Checked:
        block_size, taps, begin, commit = B, mine.taps, mine.begin, mine.commit

        def propose(self, anchor, count):
            text.append(anchor) if len(text) == len(prompt) else None
            fresh = from_scratch(target, model, text, B)
            found = mine.logits(anchor)
            assert found.shape == fresh.shape, f"{len(found)} rows; a block of {B} guesses {B - 1}"
            gap = float((found - fresh).abs().max())
            assert gap < 1e-5, (
                f"the draft after {text} differs by {gap:.2g} from one computed anew: the context "
                "holds something else than the target's features of the settled positions"
            )
            assert mine.cache.length == target.cache.length == len(text) - 1, (
                f"the drafter holds {mine.cache.length} positions, the target "
                f"{target.cache.length}; {len(text) - 1} are settled, the anchor is not yet fed"
            )
            return mine.propose(anchor, count)

    run = speculate(target, Checked(), prompt, 9, on_round=lambda r: text.extend(r.emitted))
    assert run.tokens == text[len(prompt) :]


@pytest.mark.exercise("16.1")
@given(seed=st.integers(0, 99), cuts=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_it_does_not_matter_in_how_many_calls_a_text_is_committed(room, seed, cuts):
    """Committed in any pieces, the cache equals the keys and values of the whole context."""
    target, model = pair(0)
    noise = torch.Generator().manual_seed(seed)
    width, total = 2 * target.config.hidden_size, sum(cuts)
    features = torch.randn(total, width, dtype=torch.float64, generator=noise)
    mine = room.DFlashDrafter(target, model)
    mine.begin(total)
    for n in cuts:
        start = mine.cache.length
        mine.commit([1] * n, features[start : start + n])
        assert mine.cache.length == start + n, f"{n} positions were committed"
    for i, (k, v) in enumerate(model.context(features[None], torch.arange(total))):
        for found, due, what in ((mine.cache.keys, k, "keys"), (mine.cache.values, v, "values")):
            gap = float((found[i, :, :, :total] - due).abs().max().detach())
            assert gap < 1e-5, f"{what} of layer {i}, committed {cuts}, are off by {gap:.2g}"


@pytest.mark.exercise("16.2", "16.3")
def test_a_draft_leaves_nothing_behind(room):
    """Proposing twice gives the same guesses, and the cache is as long and as full as before."""
    target, model = pair(1)
    mine = told(room, target, model, [1, 2, 3, 4])
    keys = mine.cache.keys.clone()
    first, second = mine.propose(4, 3).tokens, mine.propose(4, 3).tokens
    assert first == second and mine.cache.length == 3
    assert torch.equal(mine.cache.keys[:, :, :, :3], keys[:, :, :, :3])


@pytest.mark.exercise("16.1", "16.2", "16.3")
def test_a_new_prompt_starts_from_nothing(room):
    """The same drafter used for another prompt drafts as a new one would."""
    target, model = pair(2)
    used = room.DFlashDrafter(target, model)
    speculate(target, used, [1, 2, 3], 6)
    again = speculate(target, used, [4, 5], 9)
    fresh = speculate(target, room.DFlashDrafter(target, model), [4, 5], 9)
    assert [r.proposed for r in again.rounds] == [r.proposed for r in fresh.rounds]


# --- one pass per draft


@pytest.mark.exercise("16.2", "16.3")
@pytest.mark.parametrize("B", [2, 7, 16])
def test_a_draft_is_one_pass_however_long_the_block(room, B):
    """A block of any size takes one forward of the draft model, and none when no guess is due."""
    target, model = pair(3)
    mine, calls = told(room, target, model, [1, 2, 3], B), []
    model.register_forward_hook(lambda _, args, out: calls.append(args[0].shape[1]))
    assert len(mine.propose(3, B - 1).tokens) == B - 1
    assert calls == [B], f"the draft model was called with {calls} slots; one pass of {B} is due"
    assert mine.propose(3, 0).tokens == [] and calls == [B], "nothing to guess, nothing to compute"
    assert mine.propose(3, 1).tokens == mine.propose(3, B - 1).tokens[:1]
    assert set(calls) == {B}, "the block keeps the size it was made for, whatever is asked"


@pytest.mark.exercise("16.2")
def test_slot_j_guesses_the_token_at_its_own_place(room):
    """The rows are those of slots 1 to B-1, at their own positions; the anchor's is dropped."""
    # case C7: of the preallocated cache only the rows that are real may be looked at
    target, model = pair(4, 5)
    text = [1, 2, 3, 4, 5, 0]
    mine = told(room, target, model, text)
    assert torch.allclose(mine.logits(0), from_scratch(target, model, text, 5), atol=1e-5)


@pytest.mark.exercise("16.3")
@given(seed=st.integers(0, 50), text=texts(6, 2, 5), count=st.integers(0, 3))
def test_the_guesses_are_the_best_of_each_slot(room, seed, text, count):
    """The draft is the argmax of the first slots, and carries no law: chance has no part."""
    target, model = pair(seed)
    mine = told(room, target, model, text)
    draft = mine.propose(text[-1], count)
    rows = mine.logits(text[-1]).tolist()
    assert draft.tokens == [row.index(max(row)) for row in rows][:count]
    assert draft.probs is None, "an argmax was not drawn, so there is no law to tell"


@pytest.mark.exercise("16.2", "16.3")
def test_the_target_itself_embeds_and_reads(room):
    """A target that scales its embedding and caps its logits does so for the draft as well."""
    target, model = pair(5)
    embed, head = target.embed, target.head
    target.embed = lambda ids: 3.0 * embed(ids)
    target.head = lambda hidden: 2.0 * torch.tanh(head(hidden) / 2.0)
    mine = told(room, target, model, [1, 2, 3])
    found = mine.logits(3)
    assert float(found.abs().max().detach()) <= 2.0, "the head's cap was passed by"
    positions = torch.arange(2, 6)
    _, features = target.forward(torch.tensor([[1, 2]]), taps=mine.taps)
    hidden = model(3.0 * embed(torch.tensor([[3, 0, 0, 0]])), positions,
                   model.context(features, torch.arange(2)))  # fmt: skip
    assert torch.allclose(found, target.head(hidden[0, 1:]), atol=1e-6)


# --- temperature


@pytest.mark.exercise("16.1", "16.2", "16.3")
@pytest.mark.parametrize("seed, temperature", [(0, 1.0), (1, 0.6)])
def test_above_temperature_zero_the_law_is_the_targets(room, seed, temperature):
    """Of a random pair every text of three tokens comes with the target's own probability."""
    target, model = pair(seed, block_size=3, vocab=2)

    def law(text):
        logits = (target.forward(torch.tensor([text]))[0][0, -1] / temperature).tolist()
        weights = [math.exp(x) for x in logits]
        return [w / sum(weights) for w in weights]

    found = law_of(lambda g: tuple(room.generate(
        target, model, [1], 3, temperature=temperature, generator=g).tokens))  # fmt: skip
    truth = target_law(law, [1], 3)
    # float64 models, but their norms are float32: laws agree to about 1e-7.
    gap = max(abs(found.get(text, 0) - p) for text, p in truth.items())
    assert gap < 1e-5 and sum(found.values()) == pytest.approx(1), f"off by {gap:.2g}"
    assert_same_law({k: truth[k] for k in found}, truth, "the set of possible texts")


@pytest.mark.exercise("16.1", "16.2", "16.3")
@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.7}])
def test_top_k_and_top_p_reach_the_target(room, cut):
    """With top-k or top-p the output's law is that of the target with its tail cut."""
    target, model = pair(2, block_size=3, vocab=3)

    def law(text):
        p = target.forward(torch.tensor([text]))[0][0, -1].softmax(-1).tolist()
        ranks = sorted(range(3), key=lambda x: -p[x])
        stay = ranks[: cut.get("top_k", 3)]
        while len(stay) > 1 and sum(p[x] for x in stay[:-1]) >= cut.get("top_p", 1.0):
            stay.pop()
        return [p[x] / sum(p[y] for y in stay) if x in stay else 0.0 for x in range(3)]

    found = law_of(lambda g: tuple(room.generate(
        target, model, [1], 3, temperature=1.0, generator=g, **cut).tokens))  # fmt: skip
    truth = target_law(law, [1], 3)
    gap = max(abs(found.get(text, 0) - truth.get(text, 0)) for text in {*found, *truth})
    assert gap < 1e-5, f"off by {gap:.2g}"


@pytest.mark.exercise("16.1", "16.2", "16.3")
def test_a_seed_decides_everything(room):
    """Equal seeds give equal texts, and at temperature 0 the seed does not matter."""
    # case B12
    target, model = pair(6)

    def text(seed, temperature):
        generator = torch.Generator().manual_seed(seed)
        options = {"temperature": temperature, "generator": generator}
        return tuple(room.generate(target, model, [1, 2], 8, **options).tokens)

    assert text(1, 1.0) == text(1, 1.0)
    assert len({text(seed, 1.0) for seed in range(5)}) > 1
    assert len({text(seed, 0.0) for seed in range(5)}) == 1


# --- bad input


@pytest.mark.parametrize("change, message", [
    ({"vocab_size": 7}, "vocab_size=6, but the target has 7"),
    ({"num_hidden_layers": 9}, "num_target_layers=4, but the target has 9"),
    ({"hidden_size": 16}, "hidden_size=8, but the target has 16"),
])  # fmt: skip
def test_a_drafter_of_another_target_is_refused(room, change, message):
    """A draft model made for another vocabulary, depth or width is refused by name and number."""
    target, model = pair(0)
    sizes = {n: getattr(target.config, n) for n in ("vocab_size", "num_hidden_layers",
                                                     "hidden_size")}  # fmt: skip
    stranger = SimpleNamespace(config=SimpleNamespace(**sizes | change), embed=target.embed)
    with pytest.raises(ValueError, match=message):
        room.DFlashDrafter(stranger, model)


@pytest.mark.parametrize("B", [1, 0, -3])
def test_a_block_without_a_guess_is_refused(room, B):
    """A block size below 2 is refused: it would hold the anchor only."""
    target, model = pair(0)
    with pytest.raises(ValueError, match=f"block_size={B} must be at least 2"):
        room.DFlashDrafter(target, model, B)


def test_without_a_word_the_block_is_the_trained_one(room):
    """The block size is the model's own unless another is asked for, and both decode the same."""
    target, model = pair(7, 5)
    assert room.DFlashDrafter(target, model).block_size == 5
    assert room.DFlashDrafter(target, model, 3).block_size == 3
    assert room.DFlashDrafter(target, model).taps == (1, 3)


@pytest.mark.parametrize("request_, message", [
    ({"prompt": []}, "prompt"),  # case A9
    ({"prompt": [[1], [2]]}, r"one flat list of token ids \(batch 1\)"),  # case J2
    ({"prompt": [9]}, "prompt holds 9"),
    ({"top_k": -1}, "top_k=-1"),
    ({"block_size": 40000}, "block_size=40000 is more than the target's 32768 positions"),
    ({"stop_ids": [6]}, "stop_ids holds 6"),
])  # fmt: skip
def test_a_bad_request_is_refused_before_any_work(room, request_, message):
    """An empty prompt or an unknown token is refused before either model runs."""
    target, model = pair(0)
    target.forwards = 0
    with pytest.raises(ValueError, match=message):
        room.generate(target, model, **{"prompt": [1], "max_new_tokens": 3} | request_)
    assert target.forwards == 0


# torch's `meta` device computes shapes only, and a tensor made on the CPU does not fit there.


@pytest.mark.exercise("16.1")
def test_commit_stays_on_the_device_of_the_features(room):
    """Tried on `meta`, so without a GPU."""
    target, model = pair(0)
    mine = room.DFlashDrafter(target.to("meta"), model.to("meta"))
    mine.begin(8)
    mine.commit([1, 2], torch.zeros(2, model.fc.in_features, dtype=torch.float64, device="meta"))
    assert mine.cache.length == 2


@pytest.mark.exercise("16.2")
def test_guesses_are_made_on_the_device_of_the_models(room):
    """Tried on `meta`, so without a GPU."""
    target, model = pair(0)
    mine = room.DFlashDrafter(target.to("meta"), model.to("meta"))
    mine.begin(8)
    assert mine.logits(3).device.type == "meta"


def test_a_block_may_fill_all_of_the_targets_positions(room):
    """As many slots as the target has positions are allowed, one more is not."""
    target = decoder(0, layers=4, max_position_embeddings=6)
    model = drafter(0, target)
    assert room.DFlashDrafter(target, model, 6).block_size == 6
    with pytest.raises(ValueError, match="6 positions"):
        room.DFlashDrafter(target, model, 7)
