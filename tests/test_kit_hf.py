"""Other targets than Qwen3: what transformers computes, behind the house's own contract."""

import pairs
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from minidflash.dflash import DFlashDrafter
from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.kit import models
from minidflash.kit.hf import HFTarget
from minidflash.speculate import NGramDrafter, NoDrafter, speculate

SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 11,
    "num_key_value_heads": 1, "num_hidden_layers": 5, "max_position_embeddings": 64,
}  # fmt: skip


def make(name, seed=0, **changes):
    """A random model of transformers; nothing stands for padding unless it is said."""
    torch.manual_seed(seed)
    config = getattr(hf, f"{name}Config")(**(SIZES | {"pad_token_id": None} | changes))
    model = getattr(hf, f"{name}ForCausalLM")(config).double().eval()
    if "num_experts" in changes:
        model.set_experts_implementation("eager")  # the fused one knows no float64
    return model


KINDS = {
    "llama": lambda: make("Llama", tie_word_embeddings=True),
    "qwen2": lambda: make("Qwen2"),
    "qwen3": lambda: make("Qwen3", head_dim=8),
    "qwen3_moe": lambda: make("Qwen3Moe", head_dim=8, num_experts=3, num_experts_per_tok=2,
                              moe_intermediate_size=8),
    "olmo2": lambda: make("Olmo2"),
    "gemma2": lambda: make("Gemma2", head_dim=8, layer_types=["full_attention"] * 5,
                           final_logit_softcapping=0.05),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(KINDS))
def target(request):
    return HFTarget(KINDS[request.param]())


def alone(target, prompt, count):
    """The oracle: transformers' model itself, no cache, one token at a time."""
    tokens = list(prompt)
    for _ in range(count):
        ids = torch.tensor([tokens])
        with torch.no_grad():
            out = target.model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        tokens.append(int(out.logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def dflash(target, seed=0):
    """A random DFlash drafter for it."""
    torch.manual_seed(seed)
    c = target.config
    return DFlashDrafter(target, DraftModel(DrafterConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, num_hidden_layers=2, block_size=4, mask_token_id=1, target_layer_ids=(1, 3),
        num_target_layers=c.num_hidden_layers, target_hidden_size=c.hidden_size,
        vocab_size=c.vocab_size)).double().eval())  # fmt: skip


@settings(max_examples=8)
@given(st.lists(st.integers(0, 10), min_size=1, max_size=6), st.integers(0, 12),
       st.sampled_from(["plain", "n-gram", "dflash"]))  # fmt: skip
def test_every_drafter_writes_what_transformers_writes(target, prompt, count, kind):
    """Llama, Qwen2, Qwen3, Qwen3-MoE, OLMo 2, Gemma 2: the loop's tokens are the model's own greedy
    tokens, whoever drafts."""
    drafter = {"plain": NoDrafter, "n-gram": lambda: NGramDrafter(4),
               "dflash": lambda: dflash(target)}[kind]()  # fmt: skip
    found = speculate(target, drafter, prompt, count)
    assert found.tokens == alone(target, prompt, count)


def test_embedding_and_head_are_the_models_own(target):
    """embed gives the first hidden state, scaled as the model scales it, and head makes the logits
    out of the last, capped as the model caps them."""
    ids = torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        out = target.model(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        assert torch.allclose(target.embed(ids), out.hidden_states[0])
        assert torch.allclose(target.head(out.hidden_states[-1]), out.logits)


def test_features_are_the_outputs_of_the_tapped_layers(target):
    """Tap L is hidden_states[L + 1], side by side for several taps, cached or not."""
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        states = target.model(ids, attention_mask=torch.ones_like(ids),
                              output_hidden_states=True).hidden_states  # fmt: skip
    wanted = torch.cat([states[1 + 1], states[3 + 1]], dim=-1)
    assert torch.allclose(target.forward(ids, taps=(1, 3))[1], wanted)
    cache = target.new_cache(8)
    first = target.forward(ids[:, :2], cache, (1, 3))[1]
    second = target.forward(ids[:, 2:], cache, (1, 3))[1]
    assert torch.allclose(torch.cat([first, second], 1), wanted)


@given(st.integers(0, 5))
@settings(max_examples=6)
def test_truncating_is_forgetting(target, length):
    """After truncate(n), n = 0 included, the model goes on as if the rest had never been fed."""
    ids, cache = torch.tensor([[3, 1, 4, 1, 5]]), target.new_cache(9)
    target.forward(ids, cache)
    cache.truncate(length)  # case C1
    assert cache.length == length
    again = torch.tensor([[7, 2]])
    whole = torch.cat([ids[:, :length], again], 1)
    assert torch.allclose(target.forward(again, cache)[0], target.forward(whole)[0][:, length:])


@pytest.mark.parametrize("length", [-1, 6])
def test_a_length_that_is_not_there(target, length):
    """A cache cannot be truncated to less than nothing or more than it holds."""
    cache = target.new_cache(9)
    target.forward(torch.tensor([[3, 1, 4, 1, 5]]), cache)
    with pytest.raises(ValueError, match=f"truncate.{length}.: this cache holds 5"):
        cache.truncate(length)


def test_a_token_is_not_padding():
    """A prompt that contains the padding id is read like any other."""
    target = HFTarget(make("Llama", pad_token_id=3, seed=1))
    prompt = [3, 3, 5, 3]
    assert speculate(target, NoDrafter(), prompt, 6).tokens == alone(target, prompt, 6)


@pytest.mark.parametrize("name, changes, message", [
    ("Mistral", {"sliding_window": 4}, "mistral has .*sliding"),
    ("Gemma2", {"head_dim": 8}, "gemma2 has sliding_attention"),
    ("Cohere", {"logit_scale": 0.25}, "cohere does more to its head"),
    ("Granite", {"embedding_multiplier": 3.0}, "granite does more to its embedding"),
])  # fmt: skip
def test_what_would_be_wrong_is_refused(name, changes, message):
    """Sliding windows (case C8), scaled embeddings and scaled or capped logits are refused when
    the target is made."""
    with pytest.raises(ValueError, match=message):
        HFTarget(make(name, **changes))


def test_load_takes_any_folder(tmp_path):
    """load() gives a Llama folder the same contract as a Qwen3 folder."""
    model = make("Llama", vocab_size=1024).float()
    model.save_pretrained(tmp_path / "llama")
    folder, _ = pairs.write_pair(tmp_path)
    for file in folder.glob("tokenizer*"):
        (tmp_path / "llama" / file.name).write_bytes(file.read_bytes())
    pair = models.load(tmp_path / "llama")
    prompt = pair.encode("Question: 1?")
    found = speculate(pair.target, NGramDrafter(4), prompt, 9)
    assert found.tokens == alone(HFTarget(model), prompt, 9)


def test_a_folder_with_code_of_its_own(tmp_path):
    """A model that would need its folder's own code is refused, and none of it is run."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "strange", "auto_map": {"AutoModelForCausalLM": "evil.Model",'
        ' "AutoConfig": "evil.Config"}}'
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('was run')")
    with pytest.raises(ValueError, match="is no target that transformers reads"):
        models.load(tmp_path)
