"""Other people's code as the oracle: z-lab's package `dflash` 0.1.0, and transformers' `generate`.

Both are told the same weights, drawn or trained, and must say the same. Numbers are float64, so no
near tie can excuse a difference.
"""

import time
from importlib.metadata import version

import dflash.model as official
import pytest
import tiny
import torch
import transformers as hf
import twins
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minidflash.cache import CachedQwen3
from minidflash.dflash import DFlashDrafter
from minidflash.drafter import DraftModel
from minidflash.kit import checkpoint, models
from minidflash.kit.published import PublishedConfig, PublishedModel, drafter_for
from minidflash.qwen3 import Qwen3Config
from minidflash.speculate import NGramDrafter, NoDrafter, speculate

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")  # theirs

# Their clock wants a CUDA device; acceptance lengths come only with times.
official._cuda_time = time.perf_counter


def test_the_oracle_is_the_version_that_was_read():
    """The package that everything here is compared with is dflash 0.1.0."""
    assert version("dflash") == "0.1.0"


# ---------------------------------------------------------------------- the same weights twice


@st.composite
def pairs(draw):
    """(target config.json, drafter config.json, seed): any sizes, any fields that are supported."""
    shared, vocab = draw(st.integers(1, 2)), draw(st.sampled_from([3, 3, 4, 9]))
    sizes = {
        "model_type": "qwen3", "hidden_size": draw(st.sampled_from([4, 6])),
        "intermediate_size": draw(st.integers(2, 5)), "num_key_value_heads": shared,
        "num_attention_heads": shared * draw(st.integers(1, 2)),
        "head_dim": draw(st.sampled_from([2, 4])), "vocab_size": vocab,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-3])), "max_position_embeddings": 64,
        "hidden_act": "silu", "attention_dropout": 0.0,
    }  # fmt: skip
    theta, layers = draw(st.sampled_from([10.0, 1e4])), draw(st.integers(2, 3))
    target = sizes | {
        "num_hidden_layers": layers, "rope_theta": theta,
        "tie_word_embeddings": draw(st.booleans()), "attention_bias": draw(st.booleans()),
    }  # fmt: skip
    depth, inside = draw(st.integers(1, 2)), draw(st.booleans())
    own = {
        "mask_token_id": draw(st.integers(0, vocab - 1)),
        "target_layer_ids": sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1))),
    }
    own |= draw(st.sampled_from([{}, {}, {"input_embedding_scale": 2.5},
                                 {"final_logit_softcapping": 0.5, "output_multiplier": 0.25}]))
    draft = sizes | {
        "architectures": ["DFlashDraftModel"], "num_hidden_layers": depth,
        "num_target_layers": layers, "attention_bias": draw(st.booleans()), "dflash_config": own,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (own if inside else draft)["block_size"] = draw(st.integers(2, 6))
    draft |= draw(st.sampled_from([
        {"rope_theta": theta}, {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}]))
    draft |= draw(st.sampled_from([
        {}, {}, {"is_causal": True},
        {"layer_types": ["sliding_attention", "full_attention"][:depth],
         "use_sliding_window": True, "sliding_window": draw(st.integers(1, 7))},
        {"layer_types": ["full_attention", "sliding_attention"][-depth:], "is_causal": False,
         "use_sliding_window": True, "sliding_window": draw(st.integers(1, 7))},
    ]))
    return target, draft, draw(st.integers(0, 999))


def build(target_raw, draft_raw, seed):
    """Ours and theirs: (target, draft model, their target, their draft model), float64."""
    their_target = twins.twin(target_raw, seed)
    their_draft = official.DFlashDraftModel(hf.Qwen3Config(**draft_raw)).eval()
    tiny.stir(their_draft, seed + 1)
    their_draft.double()
    target = CachedQwen3(Qwen3Config.from_hf(target_raw)).double()
    target.load_state_dict(their_target.state_dict())
    config = checkpoint.drafter_config(draft_raw)
    kind = PublishedModel if isinstance(config, PublishedConfig) else DraftModel
    model = kind(config).double()
    model.load_state_dict(their_draft.state_dict())
    for m in (target, model):
        m.eval().requires_grad_(False)
    return target, model, their_target, their_draft


@given(pairs(), st.integers(1, 7), st.integers(0, 5))
@settings(max_examples=40)
def test_the_drafters_rows_are_the_official_ones(found, context, fresh):
    """With the same weights the rows of a block, all slots, are the official package's within 1e-5,
    whatever the config.json asks for: context in one piece or in two, the second after a cache."""
    target, model, _, theirs = build(*found)
    c, g = model.config, torch.Generator().manual_seed(found[2])
    wide = len(c.target_layer_ids) * c.hidden_size
    features = torch.randn(1, context + fresh, wide, generator=g, dtype=torch.float64)
    block = torch.randn(1, c.block_size, c.hidden_size, generator=g, dtype=torch.float64)
    end = context + fresh
    at = torch.arange(end, end + c.block_size)
    whole = model(block, at, model.context(features, torch.arange(end)))
    with torch.no_grad():
        wanted = theirs(torch.arange(end + c.block_size)[None], noise_embedding=block,
                        target_hidden=features)
        assert (whole - wanted).abs().max() < 1e-5, "whole context at once"
        assert theirs.block_size == c.block_size
        cache = official._make_cache(theirs.config)
        theirs(torch.arange(context + c.block_size)[None], noise_embedding=block,
               target_hidden=features[:, :context], past_key_values=cache, use_cache=True)
        official._crop_to(cache, context)
        again = theirs(torch.arange(context, end + c.block_size)[None], noise_embedding=block,
                       target_hidden=features[:, context:], past_key_values=cache, use_cache=True)
    parts = [model.context(features[:, a:b], torch.arange(a, b))
             for a, b in ((0, context), (context, end))]
    joined = [tuple(torch.cat(x, 2) for x in zip(*layer, strict=True))
              for layer in zip(*parts, strict=True)]
    assert (model(block, at, joined) - again).abs().max() < 1e-5, "in two pieces"


class ShortLast(DFlashDrafter):
    """Room 16's drafter with the official rule for the end: the last blocks show fewer masks.

    Ours always shows the B slots it was trained with; what does not fit is dropped.
    """

    def __init__(self, target, model):
        plain = drafter_for(target, model)
        super().__init__(target, model)
        self.target, self.whole = plain.target, plain.block_size

    def propose(self, anchor, count):
        # `count` is min(B, room) - 1; the official block has min(B, room + 1) slots.
        self.block_size = self.whole if count == self.whole - 1 else count + 2
        try:
            return super().propose(anchor, count)
        finally:
            self.block_size = self.whole


def official_run(their_target, their_draft, prompt, budget, stops=()):
    """(new tokens, acceptance lengths) of the official loop."""
    out = official.dflash_generate(
        their_draft, their_target, torch.tensor([prompt]), budget, list(stops) or None,
        return_stats=True)
    return out.output_ids[0, len(prompt) :].tolist(), out.acceptance_lengths


@given(pairs(), st.data())
@settings(max_examples=40)
def test_the_loop_is_the_official_one(found, data):
    """On drawn pairs our tokens and acceptance lengths are the official package's: the lengths in
    every round whose block fits whole, and in all of them under its rule for the end."""
    target, model, their_target, their_draft = build(*found)
    vocab = found[0]["vocab_size"]
    token = st.integers(0, vocab - 1)
    prompt = data.draw(st.lists(token, min_size=1, max_size=4))
    budget = data.draw(st.sampled_from([14, 9, 12, 2, 1]))
    stops = data.draw(st.sampled_from([(), (), (0,), (1, 2)]))
    tokens, lengths = official_run(their_target, their_draft, prompt, budget, stops)
    ours = speculate(target, drafter_for(target, model), prompt, budget, stops)
    twin = speculate(target, ShortLast(target, model), prompt, budget, stops)
    assert ours.tokens == twin.tokens == tokens
    assert [len(r.emitted) for r in twin.rounds] == lengths
    written = 1
    for mine, theirs in zip([len(r.emitted) for r in ours.rounds], lengths, strict=False):
        if budget - written < model.config.block_size:
            break
        assert mine == theirs
        written += mine


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The shipped trained pair, ours and theirs, each read from the shipped files, in float64."""
    pair = models.load("tiny", dtype="float64")
    their_target = hf.AutoModelForCausalLM.from_pretrained(
        models.shipped("target"), dtype=torch.float64).eval()
    their_draft = official.DFlashDraftModel.from_pretrained(
        models.shipped("dflash"), dtype=torch.float64).eval()
    return pair, their_target, their_draft


@pytest.mark.parametrize("text", [
    "Question: Nora has 7 pens and buys 5 more. How many pens has she now?\nAnswer:",
    "Task: Write a function keep_even that returns only the even values."
    " Then show keep_even([3, 8, 12, 5]).\nPython:",
])  # fmt: skip
def test_the_shipped_pair_decodes_as_in_the_official_package(shipped, text):
    """The shipped folders load in the official package, and both loops write the same tokens with
    the same acceptance lengths, many of them long."""
    pair, their_target, their_draft = shipped
    prompt = pair.encode(text)
    tokens, lengths = official_run(their_target, their_draft, prompt, 48, pair.stop_ids)
    ours = speculate(pair.target, pair.drafter(), prompt, 48, pair.stop_ids)
    twin = speculate(pair.target, ShortLast(pair.target, pair.model), prompt, 48, pair.stop_ids)
    assert ours.tokens == twin.tokens == tokens
    assert [len(r.emitted) for r in twin.rounds] == lengths
    assert max(lengths) >= 6, f"a trained drafter is accepted at length: {lengths}"


# ---------------------------------------------------------------------- transformers' generate


def their_greedy(model, prompt, budget, **more):
    """transformers' own greedy decoding; the mask says that no token of the prompt is padding."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=budget,
                         do_sample=False, pad_token_id=0, **more)
    return out[0, len(prompt) :].tolist()


@given(pairs(), st.data())
@settings(max_examples=12)
def test_plain_greedy_is_transformers_generate(found, data):
    """Plain, assisted and prompt-lookup decoding of transformers write what our loop writes with
    any drafter."""
    target, model, their_target, _ = build(*found)
    token = st.integers(0, found[0]["vocab_size"] - 1)
    prompt = data.draw(st.lists(token, min_size=2, max_size=5))
    budget = data.draw(st.integers(1, 10))
    wanted = their_greedy(their_target, prompt, budget)
    small = twins.twin(found[0] | {"num_hidden_layers": 1}, found[2] + 7)
    assert their_greedy(their_target, prompt, budget, assistant_model=small) == wanted
    assert their_greedy(their_target, prompt, budget, prompt_lookup_num_tokens=3) == wanted
    for drafter in (NoDrafter(), NGramDrafter(4), drafter_for(target, model)):
        assert speculate(target, drafter, prompt, budget).tokens == wanted


@example([0], 6, None)
@example([0, 1, 0, 1], 12, 3)
@given(st.lists(st.integers(0, 1023), min_size=1, max_size=8), st.integers(1, 12), st.none())
@settings(max_examples=1)
def test_the_shipped_target_is_transformers_generate(shipped, prompt, budget, lookup):
    """On the shipped target, greedy and by prompt lookup, transformers writes our tokens."""
    pair, their_target, _ = shipped
    more = {"prompt_lookup_num_tokens": lookup} if lookup else {}
    wanted = their_greedy(their_target, prompt, budget, eos_token_id=list(pair.stop_ids), **more)
    found = speculate(pair.target, pair.drafter(), prompt, budget, pair.stop_ids)
    assert found.tokens == wanted
