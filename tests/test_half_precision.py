"""bfloat16 and float16: drafted and plain text part only where the target itself wavers."""

import pytest
import tiny
import torch

from minidflash.dflash import generate
from minidflash.kit.bench import prompts
from minidflash.kit.exactness import TIE, parting, two_best
from minidflash.kit.models import load
from minidflash.speculate import NoDrafter, speculate


@pytest.fixture(scope="module")
def referee():
    return load("tiny")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_shipped_pair_parts_only_at_a_near_tie(referee, dtype):
    """On unseen prompts each text is plain decoding's, up to a first place of two logits so near
    that eight roundings of the largest logit reach from one to the other."""
    # case A18
    pair, asked = load("tiny", dtype=dtype), prompts(1, kinds=["code", "wild"])
    for prompt in asked:
        ids = referee.encode(prompt.text)
        plain = speculate(pair.target, NoDrafter(), ids, 32, pair.stop_ids).tokens
        mine = generate(pair.target, pair.model, ids, 32, stop_ids=pair.stop_ids).tokens
        found = parting(referee.target, ids, plain, mine, getattr(torch, dtype))
        assert found is None or found.gap <= found.bound, f"{prompt.kind}: {found}"


def test_in_float32_the_shipped_pair_never_parts(referee):
    """In float32 the drafted text is plain decoding's, token by token."""
    # case A18, case A16
    for prompt in prompts(1, kinds=["code", "wild"]):
        ids = referee.encode(prompt.text)
        plain = speculate(referee.target, NoDrafter(), ids, 32, referee.stop_ids).tokens
        mine = generate(referee.target, referee.model, ids, 32, stop_ids=referee.stop_ids).tokens
        assert mine == plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_most_places_are_far_from_a_tie(referee, dtype):
    """The bound says something: at most places of a text the two best logits are farther apart."""
    (prompt,) = prompts(1, kinds=["code"])
    ids = referee.encode(prompt.text)
    text = speculate(referee.target, NoDrafter(), ids, 32, referee.stop_ids).tokens
    gap, largest = two_best(referee.target, ids, text)
    far = gap > TIE * torch.finfo(dtype).eps / 2 * largest
    assert far.float().mean() > 0.5, f"{far.float().mean():.2f} of the places"


def test_a_parting_is_measured_where_it_is():
    """The first difference is found, with the gap of the two best logits and its bound there."""
    target, _ = tiny.successor([2, 2, 3, 1])  # after 1 comes 2: logit sqrt(8) against 0
    assert parting(target, [1], [2, 3, 1], [2, 3, 1], torch.bfloat16) is None
    found = parting(target, [1], [2, 3, 1], [2, 0, 1], torch.bfloat16)
    assert found.place == 1 and found.gap == pytest.approx(8**0.5, rel=1e-4)
    assert found.bound == pytest.approx(8 * 2**-8 * 8**0.5, rel=1e-4)
    assert found.gap > found.bound, "no rounding explains this difference"
    assert parting(target, [1], [2, 3], [2, 3, 1], torch.bfloat16).place == 2, "one is longer"
