"""generate(...): room 08's tokens, asked for and answered in the manner of transformers."""

import io

import pytest
import tiny
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import CountingTarget, hopeless, perfect

from minidflash.kit.generate import DFlashOutput, TextStream, generate
from minidflash.kit.tokenizer import load_tokenizer
from minidflash.speculate import NoDrafter, speculate


class Recorder:
    """A streamer that remembers what it was given."""

    def __init__(self):
        self.chunks, self.ended = [], 0

    def put(self, value):
        self.chunks.append(value.tolist())

    def end(self):
        self.ended += 1


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 9), st.booleans())
def test_the_answer_follows_the_prompt(prompt, count, good):
    """The result is prompt and answer as one row; the answer is that of room 08's loop."""
    target = CountingTarget(5)
    drafter = (perfect if good else hopeless)(target)
    wanted = speculate(CountingTarget(5), NoDrafter(), prompt, count).tokens
    out = generate(target, drafter, torch.tensor([prompt]), max_new_tokens=count)
    assert out.tolist() == [[*prompt, *wanted]]


def test_a_streamer_gets_each_round_as_it_ends():
    """The prompt comes first, as a row, then the prefill's token, then each round's chunk, and end
    comes once: B tokens a round from a perfect drafter."""
    target, heard = CountingTarget(5), Recorder()
    out = generate(target, perfect(target), [1, 2], max_new_tokens=9, streamer=heard)
    assert heard.chunks[0] == [[1, 2]]
    assert [len(chunk) for chunk in heard.chunks[1:]] == [1, 4, 4] and heard.ended == 1
    assert sum(heard.chunks[1:], [1, 2]) == out[0].tolist()


@pytest.mark.parametrize("count", [0, 1])
def test_a_streamer_of_a_short_answer(count):
    """A budget of 0 or 1 has no round, and the streamer still hears all of it."""
    target, heard = CountingTarget(5), Recorder()
    out = generate(target, perfect(target), [1, 2], max_new_tokens=count, streamer=heard)
    assert sum(heard.chunks[1:], [1, 2]) == out[0].tolist() and heard.ended == 1


@given(st.integers(0, 9), st.booleans())
def test_a_criterion_stops_after_the_very_token(place, good):
    """A stopping criterion is asked after every token, also within a chunk, so the answer ends
    after the token that it stopped at, whoever drafts."""
    target = CountingTarget(5)
    wanted = speculate(CountingTarget(5), NoDrafter(), [1, 2], 10).tokens
    asked = []

    def enough(ids, scores):
        asked.append(ids[0, 2:].tolist())
        return ids.shape[1] - 2 == place + 1

    heard = Recorder()
    out = generate(target, (perfect if good else hopeless)(target), [1, 2], max_new_tokens=10,
                   stopping_criteria=[enough], streamer=heard, return_dict_in_generate=True)
    assert out.sequences[0, 2:].tolist() == wanted[: place + 1]
    assert out.stop == ("criterion" if place < 9 else out.stop)
    assert asked == [wanted[: n + 1] for n in range(place + 1)]
    assert sum(heard.chunks[1:], []) == wanted[: place + 1] and heard.ended == 1
    assert sum(out.acceptance_lengths) == place and all(r.emitted for r in out.trace)


def test_transformers_criteria_and_streamers_fit():
    """transformers' own MaxLengthCriteria and TextStreamer work as they are."""
    target, tokenizer = tiny.decoder(3, 1024, torch.float32), load_tokenizer()
    prompt = torch.tensor([tokenizer.encode("Question: 1 + 1?")])
    criteria = hf.StoppingCriteriaList([hf.MaxLengthCriteria(prompt.shape[1] + 5)])
    streamer = hf.TextStreamer(tokenizer, skip_prompt=True)
    out = generate(target, "n-gram", prompt, max_new_tokens=30, stopping_criteria=criteria,
                   streamer=streamer)
    assert out.shape[1] == prompt.shape[1] + 5


def test_a_result_with_everything():
    """return_dict_in_generate gives counts, lengths and records that agree with each other."""
    target = CountingTarget(5)
    out = generate(target, perfect(target), [1, 2], max_new_tokens=9, return_dict_in_generate=True)
    assert isinstance(out, DFlashOutput) and out.stop == "length"
    assert (out.num_input_tokens, out.num_output_tokens) == (2, 9)
    assert out.acceptance_lengths == [4, 4] and [r.accepted for r in out.trace] == [3, 3]
    assert out.sequences.shape == (1, 11)
    assert out.time_to_first_token > 0 and out.time_per_output_token > 0


WORDS = load_tokenizer()
LAW = [0.5, 0.3, 0.1, 0.06, 0.04]


def draws(**options):
    target = CountingTarget(5, law=lambda prefix: LAW)
    return generate(target, None, [1], max_new_tokens=40, **options)[0, 1:].tolist()


def test_a_seed_decides():
    """The same seed gives the same tokens and another seed others; at temperature 0 no seed
    matters (case B12)."""
    assert draws(temperature=1.0, seed=1) == draws(temperature=1.0, seed=1)
    assert draws(temperature=1.0, seed=1) != draws(temperature=1.0, seed=2)
    by_hand = draws(temperature=1.0, generator=torch.Generator().manual_seed(1))
    assert by_hand == draws(do_sample=True, seed=1)
    assert draws(seed=1) == draws() == [0] * 40


def test_top_k_and_top_p_reach_the_loop():
    """Tokens outside the best k, or outside the nucleus, are never written."""
    assert set(draws(temperature=1.0, seed=1)) == {0, 1, 2, 3, 4}
    assert set(draws(temperature=1.0, seed=1, top_k=2)) == {0, 1}
    assert set(draws(temperature=1.0, seed=1, top_p=0.7)) == {0, 1}


def test_a_config_sets_and_arguments_override():
    """A GenerationConfig sets budget, sampling and end tokens; an argument overrides its field."""
    config = hf.GenerationConfig(do_sample=True, top_k=1, max_new_tokens=3, eos_token_id=7)
    target = CountingTarget(9, law=lambda prefix: [0.2, 0.3, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05])
    out = generate(target, None, [1], generation_config=config, seed=0)
    assert out.tolist() == [[1, 1, 1, 1]]
    out = generate(target, None, [1], generation_config=config, max_new_tokens=9, eos_token_id=1,
                   do_sample=False)
    assert out.tolist() == [[1, 1]]


@pytest.mark.parametrize("ids, options, message", [
    (torch.zeros(2, 3, dtype=torch.long), {}, "holds 2 prompts"),
    (torch.zeros(1, 0, dtype=torch.long), {}, "is empty"),
    ([1], {"max_new_tokens": None}, "max_new_tokens is missing"),
    ([1], {"temperature": 0.5}, "give seed=... or generator="),
    ([1], {"do_sample": True, "temperature": 0.0, "seed": 1}, "contradicts temperature=0"),
    ([1], {"do_sample": False, "temperature": 0.5}, "do_sample=False contradicts temperature=0.5"),
    ([1], {"seed": 1, "generator": torch.Generator()}, "not both"),
    ([1], {"eos_token_id": 99}, "stop_ids holds 99"),
    ([1], {"block_size": 3}, "block_size=3"),
    ([1], {"top_p": 2.0, "temperature": 1.0, "seed": 1}, "top_p=2.0"),
    ([1], {"generation_config": {"num_beams": 2}}, "num_beams=2"),
])  # fmt: skip
def test_a_request_that_cannot_be_served_is_refused(ids, options, message):
    """A bad request is one clear error, before the target has done anything."""
    target = CountingTarget(5)
    with pytest.raises(ValueError, match=message):
        generate(target, None, ids, **({"max_new_tokens": 4} | options))
    assert target.forwards == 0


@given(st.text(st.characters(codec="utf-8"), max_size=30),
       st.lists(st.integers(1, 4), max_size=40))  # fmt: skip
@settings(max_examples=25)
def test_half_a_character_is_never_shown(text, sizes):
    """However the tokens of a text are cut into chunks, nothing that is shown on the way ends in a
    broken character, and all of it together is the text."""
    ids, shown = WORDS.encode(text + " 你好😀", add_special_tokens=False), io.StringIO()
    whole = WORDS.decode(ids, skip_special_tokens=True)
    stream = TextStream(WORDS, shown)
    stream.put(torch.tensor([[5]]))
    while ids:
        n = sizes.pop() if sizes else 3
        chunk, ids = ids[:n], ids[n:]
        stream.put(torch.tensor(chunk))
        assert not shown.getvalue().endswith("\ufffd")
    stream.end()
    assert shown.getvalue() == whole
