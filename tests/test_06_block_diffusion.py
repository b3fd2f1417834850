"""The spec of room 06 · block_diffusion: exercises 6.1 (m_obc), 6.2 (m_bc), 6.3 (spread_times), 6.4
(noisy_logits), 6.5 (block_bound), 6.6 (uncover) and 6.7 (block_sample).

Truth is drawn by hand, collected from the sentence that defines a mask, or computed by passes over
one block at a time. Laws are exact: every way that chance can fall is listed.
"""

import itertools
import math

import pytest
import tiny
import torch
from chance import law_of
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from minidflash.kit import show
from minidflash.masked_diffusion import MaskPredictor
from minidflash.qwen3 import Qwen3Config

V, MASK = 6, 5  # tokens 0 .. 4, and the mask


def drawn(text: str) -> str:
    """A hand-drawn mask without the spaces that set its halves apart."""
    return "\n".join(line.replace(" ", "") for line in text.split("\n") if line.strip())


def assert_drawn(mask: torch.Tensor, text: str, why: str = "") -> None:
    mine = "\n".join("".join(str(int(x)) for x in row) for row in mask.tolist())
    assert mine == drawn(text), f"{why}; yours:\n{mine}\nwanted:\n{drawn(text)}\n"


def dense(rule, n: int, size: int) -> torch.Tensor:
    """A predicate asked for every pair of the 2n places."""
    i = torch.arange(2 * n)
    return rule(i[:, None], i[None, :], n, size)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blocks(n: int, size: int) -> list[range]:
    """Positions 0 .. n-1 cut into blocks; the last may be shorter."""
    return [range(start, min(start + size, n)) for start in range(0, n, size)]


def block_causal(n: int, size: int) -> torch.Tensor:
    """By the sentence: position i sees everything up to the end of its own block."""
    mask = torch.zeros(n, n, dtype=torch.bool)
    for block in blocks(n, size):
        mask[block.start : block.stop, : block.stop] = True
    return mask


class Checked(MaskPredictor):
    """A predictor that counts its passes and, when a cache is used, repeats each without it."""

    size = 0  # of the blocks; 0: repeat nothing

    def begin(self, size: int) -> "Checked":
        self.size, self.fed, self.seen, self.cached = size, [], [], []
        return self

    def forward(self, ids, positions=None, mask=None, cache=None):
        self.fed = [*getattr(self, "fed", []), list(ids.shape)]
        past = cache.length if cache is not None else 0
        out = super().forward(ids, positions, mask, cache)
        if self.size and cache is not None:
            self.cached.append(self.seen[:past])
            self.seen = self.seen[:past] + ids[0].tolist()
            whole = torch.tensor([self.seen])
            full = super().forward(whole, mask=block_causal(len(self.seen), self.size))
            assert torch.allclose(out, full[:, past:], atol=1e-6), (
                f"places {past} .. {len(self.seen) - 1}: a pass with the cache gives other logits "
                "than one without; what lies in the cache, and what does it see?"
            )
        return out


def predictor(seed: int = 0, vocab: int = V, layers: int = 2) -> Checked:
    """A tiny random bidirectional transformer in float64; the last id is the mask."""
    model = Checked(Qwen3Config(vocab_size=vocab, num_hidden_layers=layers, **tiny.SIZES)).eval()
    tiny.stir(model, seed)
    return model.double().requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> Checked:
    return predictor()


@pytest.fixture
def listed(room, monkeypatch):
    """Room 05's `choose`, drawing by torch.multinomial, so that `law_of` can list its outcomes."""

    def choose(logits, temperature, generator):
        if not len(logits):
            return torch.empty(0, dtype=torch.long), torch.empty(0)
        if temperature == 0:
            return logits.argmax(-1), None
        law = (logits.double() / temperature).softmax(-1)
        return torch.multinomial(law, 1, generator=generator)[:, 0], None

    monkeypatch.setattr(room, "choose", choose, raising=False)


# --- the masks: 6.1 and 6.2 ----------------------------------------------------------------------


def test_a_place_sees_its_own_block_of_its_own_copy(room):
    """M_BD: with n = 4 and L = 2 the matrix of the own block is block-diagonal, in both copies."""
    wanted = """
        1100 0000
        1100 0000
        0011 0000
        0011 0000
        0000 1100
        0000 1100
        0000 0011
        0000 0011
    """
    assert_drawn(dense(room.m_bd, 4, 2), wanted, "own block, own copy")


@pytest.mark.exercise("6.1")
def test_noise_sees_the_clean_copy_of_earlier_blocks(room):
    """M_OBC: with n = 4 and L = 2 only noisy block 1 sees clean text, and only clean block 0."""
    wanted = """
        0000 0000
        0000 0000
        0000 1100
        0000 1100
        0000 0000
        0000 0000
        0000 0000
        0000 0000
    """
    assert_drawn(dense(room.m_obc, 4, 2), wanted, "its own clean block would be the answer")


@pytest.mark.exercise("6.2")
def test_clean_text_sees_clean_text_up_to_its_own_block(room):
    """M_BC: with n = 4 and L = 2 clean block 0 sees itself, clean block 1 sees both."""
    wanted = """
        0000 0000
        0000 0000
        0000 0000
        0000 0000
        0000 1100
        0000 1100
        0000 1111
        0000 1111
    """
    assert_drawn(dense(room.m_bc, 4, 2), wanted, "block-causal, and never any noise")


UNIONS = {  # (n, L): the whole mask, drawn by hand
    (4, 2): "11000000 11000000 00111100 00111100 00001100 00001100 00001111 00001111",  # case H10
    (3, 1): "100000 010100 001110 000100 000110 000111",  # case H13: causal
    (3, 3): "111000 111000 111000 000111 000111 000111",  # case H13: both directions
    # case H12: the last block has one place only
    (5, 2): "1100000000 1100000000 0011011000 0011011000 0000111110"
            " 0000011000 0000011000 0000011110 0000011110 0000011111",
    (2, 5): "1100 1100 0011 0011",  # a block longer than the text
}  # fmt: skip


@pytest.mark.exercise("6.1", "6.2")
@pytest.mark.parametrize("n, size", UNIONS)
def test_the_union_by_hand(room, n, size):
    """The union of the three parts is the mask drawn by hand, also where the last block is cut."""
    why = f"n = {n}, L = {size}, order [noisy, clean]"
    assert_drawn(dense(room.may_see, n, size), UNIONS[n, size].replace(" ", "\n"), why)


@pytest.mark.exercise("6.1", "6.2")
def test_nine_places_in_blocks_of_three(room):
    """With n = 9 and L = 3 there are 108 pairs, and four rows are known by hand."""
    mask = dense(room.may_see, 9, 3)
    assert mask.shape == (18, 18), "the mask is 2n x 2n: both copies ask, and both are asked"
    for row, text in {0: "111000000 000000000", 3: "000111000 111000000",
                      9: "000000000 111000000", 12: "000000000 111111000"}.items():  # fmt: skip
        assert_drawn(mask[row : row + 1], text, f"row {row}")
    assert mask.sum() == 108, "L^2 K (K + 1) pairs: 9 * 3 * 4"


@pytest.mark.exercise("6.1", "6.2")
@given(n=st.integers(1, 9), size=st.integers(1, 10))
def test_the_mask_equals_its_sentence(room, n, size):
    """Noise sees its own block's noise and earlier clean blocks; clean sees clean up to itself."""
    cut, sees = blocks(n, size), {}
    for b, block in enumerate(cut):
        earlier = {n + j for other in cut[:b] for j in other}
        for i in block:
            sees[i] = set(block) | earlier
            sees[n + i] = {n + j for j in block} | earlier
    mask = dense(room.may_see, n, size)
    for place in range(2 * n):
        seen = set(mask[place].nonzero().flatten().tolist())
        copy = "noisy" if place < n else "clean"
        assert seen == sees[place], (
            f"n = {n}, L = {size}: {copy} place {place % n} sees {sorted(seen)}, "
            f"should see {sorted(sees[place])} (from {n} on the places are clean)"
        )
    if n % size == 0:
        assert mask.sum() == size**2 * len(cut) * (len(cut) + 1), "L^2 K (K + 1) pairs"


@pytest.mark.exercise("6.1", "6.2")
@pytest.mark.parametrize("n, size", [(4, 2), (5, 2), (6, 1)])
def test_one_rule_serves_matrix_picture_and_flex_attention(room, n, size):
    """The rule as a matrix, as a picture and as flex_attention's mask_mod is one and the same."""
    # case I4: element by element, not tile by tile
    def mask_mod(batch, head, q, k):
        return room.may_see(q, k, n, size)

    matrix, many = dense(room.may_see, n, size), 2 * n
    assert torch.equal(create_mask(mask_mod, 1, 1, many, many, device="cpu")[0, 0], matrix)
    rows = [line.split()[1:] for line in show.mask_text(matrix).splitlines()[1:]]
    assert [[cell == "■" for cell in row] for row in rows] == matrix.tolist()


@pytest.mark.parametrize("n, size", [(0, 2), (4, 0), (4, -1)])
def test_a_mask_without_places_is_refused(room, n, size):
    """No tokens, or blocks without a slot, are refused with both numbers."""
    with pytest.raises(ValueError, match=f"n={n} and size={size} must both be at least 1"):
        room.may_see(torch.arange(3), torch.arange(3), n, size)


# --- noise: 6.3 ----------------------------------------------------------------------------------


@pytest.mark.exercise("6.3")
@pytest.mark.parametrize("low, high, levels", [
    (0.0, 1.0, [0.125, 0.375, 0.625, 0.875]),
    (0.3, 0.8, [0.3625, 0.4875, 0.6125, 0.7375]),
    (1.0, 1.0, [1.0, 1.0, 1.0, 1.0]),
])  # fmt: skip
def test_levels_of_two_rows_of_two_blocks_by_hand(room, low, high, levels):
    """With all u = 0.5, four blocks get the middles of the four quarters of [low, high]."""
    t = room.spread_times(torch.full((2, 2), 0.5), low, high, generator())
    assert t.shape == (2, 2)
    assert sorted(t.flatten().tolist()) == pytest.approx(levels), "one level in each strip"


@pytest.mark.exercise("6.3")
@given(rows=st.integers(1, 4), columns=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_strip_has_one_level(room, rows, columns, seed):
    """Of N blocks of a batch one lies in each of N equal strips of [low, high], none at zero."""
    u = 1 - torch.rand(rows, columns, generator=generator(seed), dtype=torch.float64)
    for low, high in ((0.0, 1.0), (0.3, 0.8)):
        t = room.spread_times(u, low, high, generator(seed + 1))
        inside = (t - low) / (high - low) * u.numel()
        assert sorted((inside.ceil() - 1).flatten().tolist()) == list(range(u.numel()))
        assert (t > 0).all(), "a level of 0 has no weight 1/t"
        places = inside - (inside.ceil() - 1)
        assert torch.allclose(places.flatten().sort()[0], u.flatten().sort()[0]), "u places it"


@pytest.mark.exercise("6.3")
def test_every_block_meets_every_level(room):
    """The strips are dealt out by chance: any block is as often in any strip, so U stays U."""
    dice = generator(3)
    draws = [room.spread_times(torch.full((1, 4), 0.5), 0.0, 1.0, dice) for _ in range(800)]
    strips = (torch.cat(draws) * 4).long()  # 800 draws, 4 blocks
    for block in range(4):
        counts = strips[:, block].bincount(minlength=4)
        # 200 are due, standard deviation 12.2; a false alarm has odds below 1 in 10^5
        assert ((counts - 200).abs() < 61).all(), (
            f"block {block} meets the four strips {counts.tolist()} times in 800 batches of one row"
        )


@pytest.mark.exercise("6.3")
@pytest.mark.parametrize("low, high", [(-0.1, 0.5), (0.5, 0.4), (0.2, 1.1), (0.0, 0.0)])
def test_a_senseless_schedule_is_refused(room, low, high):
    """A range of levels that is empty, upside down, all zero or outside [0, 1] is refused."""
    with pytest.raises(ValueError, match=f"low={low}, high={high}"):
        room.spread_times(torch.full((1, 2), 0.5), low, high, generator())


@pytest.mark.exercise("6.3", "6.7")
def test_chance_comes_from_the_generator_alone(room, model):
    """The same seed gives the same levels and text, and torch's own state is left alone."""
    # case B12
    state = torch.random.get_rng_state()
    times = [room.spread_times(torch.full((2, 3), 0.5), 0, 1, generator(s)).tolist()
             for s in (1, 1, 2)]  # fmt: skip
    assert times[0] == times[1] != times[2]
    for steps in (None, 2):
        out = [room.block_sample(model, [1, 2], 6, 3, MASK, steps, generator=generator(s))
               for s in (1, 1, 2, 3)]  # fmt: skip
        assert out[0] == out[1] and len({tuple(x) for x in out}) > 1
    assert torch.equal(torch.random.get_rng_state(), state), "the generator was not used"


# --- one pass over both copies: 6.4 --------------------------------------------------------------


def text(rows: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, MASK, (rows, n), generator=generator(seed))


def hidden_in(ids: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.rand(ids.shape, generator=generator(seed + 50)) < 0.5


def one_by_one(model, noisy, clean, size):
    """Logits [R n V] by a pass for every block: the clean text before it, then its own noise."""
    parts = []
    for block in blocks(clean.shape[1], size):
        ids = torch.cat([clean[:, : block.start], noisy[:, block.start : block.stop]], 1)
        mask = block_causal(block.stop, size)
        parts.append(model(ids, mask=mask)[:, block.start :])
    return torch.cat(parts, 1)


@pytest.mark.exercise("6.4", "6.1", "6.2")
@given(n=st.integers(1, 7), size=st.integers(1, 8), seed=st.integers(0, 20))
def test_one_pass_equals_block_by_block_passes(room, model, n, size, seed):
    """One pass over the 2n places gives the logits of one pass per block behind its clean text."""
    clean = text(2, n, seed)
    noisy = clean.masked_fill(hidden_in(clean, seed), MASK)
    truth = one_by_one(model, noisy, clean, size)
    model.begin(0)
    mine = room.noisy_logits(model, noisy, clean, size)
    assert mine.shape == (2, n, V), "only the noisy copy answers"
    assert (mine - truth).abs().max() < 1e-5, f"n = {n}, L = {size}: other logits"
    assert model.fed == [[2, 2 * n]], f"one pass over 2n = {2 * n} places; yours: {model.fed}"


@pytest.mark.exercise("6.4")
def test_positions_and_mask_lie_where_the_text_does(room):
    """Tried on torch's `meta` device, so without a GPU."""
    clean, seen = torch.zeros(1, 4, dtype=torch.long, device="meta"), []

    def stub(ids, positions, mask):
        seen.extend(x.device.type for x in (ids, positions, mask))
        return torch.zeros(*ids.shape, V, device="meta")

    assert room.noisy_logits(stub, clean, clean, 2).shape == (1, 4, V)
    assert seen == ["meta"] * 3, f"ids, positions, mask: {seen}"


@pytest.mark.exercise("6.1", "6.2")
def test_reading_makes_its_mask_where_the_weights_are(room):
    """Tried on torch's `meta` device, so without a GPU."""
    seen = []

    class Stub:
        lm_head = torch.nn.Linear(2, V, device="meta")

        def __call__(self, ids, positions, mask, cache):
            seen.append(mask.device.type)
            return torch.zeros(1, ids.shape[1], V)

    assert room.read(Stub(), [1, 2, 3], 2, None).shape == (3, V) and seen == ["meta"]


@pytest.mark.exercise("6.4", "6.2")
def test_blocks_as_long_as_the_text_are_chapter_05(room, model):
    """With L = n the noisy copy answers like room 05's model, which never saw a clean one."""
    # case H13
    clean = text(2, 5)
    noisy = clean.masked_fill(hidden_in(clean), MASK)
    for size in (5, 8):
        mine = room.noisy_logits(model, noisy, clean, size)
        assert torch.allclose(mine, model(noisy), atol=1e-6)


@pytest.mark.exercise("6.4", "6.5", "6.1")
def test_blocks_of_one_are_autoregressive(room, model):
    """With L = 1 and t = 1, e to the minus bound is a law of texts: it sums to one."""
    # case H13
    words, n = range(MASK), 2
    clean = torch.tensor(list(itertools.product(words, repeat=n)))
    hidden = torch.ones_like(clean).bool()
    logits = room.noisy_logits(model, clean.masked_fill(hidden, MASK), clean, 1)
    logits[..., MASK] = -math.inf
    nats = room.block_bound(logits, clean, hidden, torch.ones(len(clean), n).double(), 1)
    assert torch.allclose((-nats.sum(1)).exp().sum(), torch.tensor(1.0).double())
    # Token by token: a pass over what stands before, and one mask behind it.
    for row in (3, 17):
        for i in range(n):
            ids = torch.tensor([[*clean[row, :i].tolist(), MASK]])
            mask = torch.ones(i + 1, i + 1).tril().bool()
            law = model(ids, mask=mask)[0, -1, :MASK].log_softmax(-1)
            assert nats[row, i].item() == pytest.approx(-law[clean[row, i]].item(), abs=1e-6)


@pytest.mark.exercise("6.4", "6.1", "6.2")
def test_nothing_leaks_when_a_token_is_changed(room, model):
    """Noisy block b depends on its own noise and on clean blocks before b, and on nothing else."""
    clean, size = text(1, 6), 2
    noisy = clean.masked_fill(torch.tensor([[0, 1, 1, 1, 1, 0]]).bool(), MASK)
    before = room.noisy_logits(model, noisy, clean, size)
    for copy, i in itertools.product(("noisy", "clean"), range(6)):
        ids = {"noisy": noisy.clone(), "clean": clean.clone()}
        ids[copy][0, i] = (ids[copy][0, i] + 1) % MASK
        after = room.noisy_logits(model, ids["noisy"], ids["clean"], size)
        moved = (after - before).abs().amax((0, 2)).view(3, 2).amax(1) > 1e-5
        due = [b == i // 2 if copy == "noisy" else b > i // 2 for b in range(3)]
        assert moved.tolist() == due, (
            f"{copy} token {i} (block {i // 2}) was changed: the noisy blocks that react are "
            f"{[b for b in range(3) if moved[b]]}, should be {[b for b in range(3) if due[b]]}"
        )


@pytest.mark.exercise("6.1", "6.2")
def test_nothing_leaks_by_gradient(room):
    """The gradient of any place reaches just what it may see; a clean place's never any noise."""
    n, size, wired = 5, 2, predictor(4)
    rows = wired.embed(text(1, 2 * n)).clone().requires_grad_()
    wired.embed = lambda ids: rows
    mask = dense(room.may_see, n, size)
    positions = torch.arange(n).repeat(2)
    out = wired(torch.zeros(1, 2 * n, dtype=torch.long), positions, mask)[0]
    cut = blocks(n, size)
    for place in range(2 * n):
        gradient = torch.autograd.grad(out[place].square().sum(), rows, retain_graph=True)[0]
        reached = {i for i in range(2 * n) if gradient[0, i].abs().max() > 1e-9}
        b = next(b for b, block in enumerate(cut) if place % n in block)
        own, earlier = set(cut[b]), {n + j for block in cut[:b] for j in block}
        due = (own if place < n else {n + j for j in own}) | earlier
        assert reached == due, f"place {place} of [noisy, clean] reaches {reached}, should {due}"


# --- the bound: 6.5 ------------------------------------------------------------------------------


def halves(*shape: int) -> torch.Tensor:
    """Logits of two words that are equally likely; minus log of either is ln 2."""
    return torch.zeros(*shape, 2, dtype=torch.float64)


@pytest.mark.exercise("6.5")
def test_one_token_by_hand(room):
    """A hidden token of probability 1/2 at t = 1/4 costs 4 ln 2 = 2.772589."""
    one = torch.zeros(1, 1, dtype=torch.long)
    mine = room.block_bound(halves(1, 1), one, one == 0, torch.tensor([[0.25]]).double(), 1)
    assert mine.tolist() == [[pytest.approx(2.772589)]]


@pytest.mark.exercise("6.5")
def test_every_block_has_its_own_weight(room):
    """A token is weighed by 1/t of its own block, a cut last block included; a seen one by 0."""
    # case H3
    ids = torch.zeros(1, 5, dtype=torch.long)
    hidden = torch.tensor([[1, 0, 0, 1, 1]]).bool()
    t = torch.tensor([[0.5, 0.25, 0.1]]).double()
    mine = room.block_bound(halves(1, 5), ids, hidden, t, 2)[0] / math.log(2)
    assert mine.tolist() == pytest.approx([2, 0, 0, 4, 10]), "1/t of blocks {0, 1}, {2, 3}, {4}"


@pytest.mark.exercise("6.5")
def test_the_weight_makes_every_level_count_the_same(room):
    """At any t the mean over all ways to hide is the plain cost of the block: 2 tokens, 2 ln 2."""
    # case H1
    ids = torch.zeros(1, 2, dtype=torch.long)
    for t in (0.2, 0.5, 1.0):
        mean = 0.0
        for pattern in itertools.product((False, True), repeat=2):
            chance = math.prod(t if x else 1 - t for x in pattern)
            level = torch.tensor([[t]]).double()
            nats = room.block_bound(halves(1, 2), ids, torch.tensor([pattern]), level, 2)
            mean += chance * nats.sum().item()
        assert mean == pytest.approx(2 * math.log(2)), f"t = {t}"


@pytest.mark.exercise("6.5")
def test_nothing_hidden_costs_nothing(room):
    """With nothing hidden, even at t = 1e-9 or where a label is impossible: 0, gradient 0."""
    # case H2
    logits = halves(1, 4).index_fill(2, torch.tensor([1]), -math.inf).requires_grad_()
    ids = torch.tensor([[0, 1, 1, 0]])
    nats = room.block_bound(logits, ids, ids > 5, torch.full((1, 2), 1e-9).double(), 2)
    nats.sum().backward()
    assert nats.tolist() == [[0.0] * 4]
    assert logits.grad is not None and not logits.grad.any(), "no NaN from infinity times zero"


@pytest.mark.exercise("6.4", "6.5")
@given(size=st.integers(1, 4), seed=st.integers(0, 20))
def test_the_loss_of_one_pass_is_the_sum_over_blocks(room, model, size, seed):
    """The bound of one pass equals the sum, block after block, of 1/t times its own cost."""
    clean = text(2, 6, seed)
    hidden, cut = hidden_in(clean, seed), blocks(6, size)
    noisy = clean.masked_fill(hidden, MASK)
    t = 0.2 + 0.8 * torch.rand(2, len(cut), generator=generator(seed), dtype=torch.float64)
    truth, logits = 0.0, one_by_one(model, noisy, clean, size)
    for r, (b, block) in itertools.product(range(2), enumerate(cut)):
        for i in block:
            if hidden[r, i]:
                nll = logits[r, i].logsumexp(-1) - logits[r, i, clean[r, i]]
                truth += nll.item() / t[r, b].item()
    mine = room.block_bound(room.noisy_logits(model, noisy, clean, size), clean, hidden, t, size)
    assert mine.sum().item() == pytest.approx(truth, abs=1e-5)


# --- which slots are uncovered: 6.6 --------------------------------------------------------------


def test_when_the_next_slot_is_hit(room):
    """From t = 1 with u = 0.5 the hit times of 4, 3, 2 and 1 slots are 0.84 0.67 0.47 0.24."""
    t, times = 1.0, []
    for hidden in (4, 3, 2, 1):
        t = room.hit_time(t, hidden, 0.5)
        times.append(t)
    assert times == pytest.approx([0.840896, 0.667420, 0.471937, 0.235969], abs=1e-6)
    mean = sum(room.hit_time(1.0, 4, (i + 0.5) / 1000) for i in range(1000)) / 1000
    assert mean == pytest.approx(4 / 5, abs=1e-3), "the largest of four uniform times"


@pytest.mark.exercise("6.6")
def test_a_hidden_slot_stays_hidden_with_chance_s_over_t(room):
    """From t = .8 to s = .6 each hidden slot stays so with chance .75, each by its own coin."""
    hidden = torch.tensor([True, False, True])
    law = law_of(lambda g: tuple(room.uncover(hidden, 0.75, g).tolist()))
    assert law == {
        (False, False, False): pytest.approx(0.75**2),
        (True, False, False): pytest.approx(0.25 * 0.75),
        (False, False, True): pytest.approx(0.25 * 0.75),
        (True, False, True): pytest.approx(0.25**2),
    }, "a slot that is shown already is never uncovered again"


@pytest.mark.exercise("6.6")
def test_the_last_step_uncovers_everything(room):
    """With s = 0 every hidden slot is uncovered, and with s = t none."""
    hidden = torch.tensor([True, False, True])
    assert room.uncover(hidden, 0.0, generator()).tolist() == [True, False, True]
    assert room.uncover(hidden, 1.0, generator()).tolist() == [False] * 3


@pytest.mark.exercise("6.6")
@pytest.mark.parametrize("pattern", [(1, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 0)])
def test_first_hitting_uncovers_one_slot_any_of_them(room, pattern):
    """First hitting uncovers exactly one hidden slot, and each is equally likely to be it."""
    hidden = torch.tensor(pattern).bool()
    law = law_of(lambda g: tuple(room.uncover(hidden, None, g).int().tolist()))
    due = {tuple(int(i == j) for j in range(4)): pytest.approx(1 / sum(pattern))
           for i in range(4) if pattern[i]}  # fmt: skip
    assert law == due


# --- the sampler: 6.7 ----------------------------------------------------------------------------


@pytest.mark.exercise("6.7")
@given(prompt=st.lists(st.integers(0, MASK - 1), min_size=1, max_size=7), size=st.integers(1, 5),
       budget=st.integers(0, 7), steps=st.sampled_from([None, 1, 2, 9]),
       seed=st.integers(0, 99))  # fmt: skip
def test_a_cached_pass_equals_a_full_one(room, model, prompt, size, budget, steps, seed):
    """Any prompt, length and step count: cached passes equal full ones, and no mask comes out."""
    # cases H5, H11; the model repeats each of its passes without the cache
    model.begin(size)
    out = room.block_sample(model, prompt, budget, size, MASK, steps, generator=generator(seed))
    assert len(out) == budget, f"asked for {budget} tokens, got {len(out)}"
    assert all(0 <= x < MASK for x in out), f"{out}: {MASK} is the mask, and no answer"
    for held in model.cached:
        assert held == [*prompt, *out][: len(held)], f"the cache held {held}: is there noise in it?"


@pytest.mark.exercise("6.7")
def test_no_budget_means_no_pass(room, model):
    """Nothing is asked for, so nothing is computed."""
    model.begin(0)
    assert room.block_sample(model, [1, 2], 0, 4, MASK, generator=generator()) == []
    assert not model.fed, f"passes of {model.fed} rows and places for an empty answer"


@pytest.mark.exercise("6.1", "6.2")
def test_reading_with_a_cache_and_without(room, model):
    """`read` gives the logits of what the cache lacks; without a cache that is the whole text."""
    words, cache = [1, 2, 3, 4, 2, 1], model.begin(0).new_cache(8)
    first = room.read(model, words[:4], 2, cache)
    rest, whole = room.read(model, words, 2, cache), room.read(model, words, 2, None)
    assert len(whole) == 6 and torch.allclose(torch.cat([first, rest]), whole)


@pytest.mark.exercise("6.7")
def test_any_row_of_the_table_may_be_the_mask(room, model):
    """Also row 0: it is never written, and it stands for what is hidden."""
    out = room.block_sample(model, [1, 2], 6, 4, 0, generator=generator())
    assert len(out) == 6 and 0 not in out


@pytest.mark.exercise("6.7")
def test_passes_are_counted(room, model):
    """Each block costs its steps and one clean pass, the prompt one; what is last is not kept."""
    # two whole blocks of prompt, two blocks of text
    for steps, inner in ((None, 4), (1, 1)):
        model.begin(0)
        room.block_sample(model, [1, 2, 3, 4] * 2, 8, 4, MASK, steps, generator=generator())
        due = [8] + [4] * inner + [4] + [4] * inner
        assert [places for _, places in model.fed] == due, (
            f"steps={steps}: places per pass should be {due} (prompt, block, its clean pass, block)"
        )
    model.begin(0)
    room.block_sample(model, [1, 2, 3, 4], 4, 4, MASK, 1000, generator=generator())
    assert len(model.fed) <= 5, "a step that uncovers nothing changes nothing and costs no pass"


@pytest.mark.exercise("6.7")
def test_blocks_of_one_write_as_an_autoregressive_model(room, model):
    """With L = 1 at temperature 0 the text is what asking place after place gives."""
    words = [2, 4]
    for _ in range(5):
        mask = block_causal(len(words) + 1, 1)
        row = model(torch.tensor([[*words, MASK]]), mask=mask)[0, -1, :MASK]
        words.append(int(row.argmax()))
    assert room.block_sample(model, [2, 4], 5, 1, MASK, temperature=0.0) == words[2:]


@pytest.mark.exercise("6.7")
def test_one_step_is_one_look(room, model):
    """With steps = 1 a single pass fills a block, all slots at once: the one-shot draft."""
    prompt, size = [3, 1, 4, 0], 4
    ids = torch.tensor([[*prompt, *[MASK] * size]])
    once = model(ids, mask=block_causal(8, size))[0, 4:, :MASK].argmax(-1).tolist()
    assert room.block_sample(model, prompt, 4, size, MASK, 1, temperature=0.0) == once


@pytest.mark.exercise("6.7")
def test_blocks_lie_on_a_grid_that_begins_with_the_prompt(room, model):
    """A prompt that ends inside a block fills its beginning: those slots are shown and stay."""
    # case A6: one of them is the mask's own id, and is text all the same
    frames, prompt = [], [1, 2, 3, 4, 0, MASK]
    out = room.block_sample(model, prompt, 5, 4, MASK, generator=generator(1),
                            watch=lambda *step: frames.append(step))  # fmt: skip
    assert [start for start, _, _ in frames] == [4] * 2 + [8] * 4
    for _, block, now in frames[:2]:
        assert block[:2].tolist() == [0, MASK] and not now[:2].any(), "the prompt was redrawn"
    assert out == [*frames[1][1][2:].tolist(), *frames[-1][1][:3].tolist()]


@pytest.mark.exercise("6.7")
@pytest.mark.parametrize("steps", [None, 2, 3, 12])
def test_a_slot_once_shown_never_changes(room, model, steps):
    """Carry-over: every slot is uncovered in one step and keeps its token in all later ones."""
    # case H14
    frames = []
    room.block_sample(model, [1], 9, 5, MASK, steps, generator=generator(2),
                      watch=lambda *step: frames.append(step))  # fmt: skip
    for start in (0, 5):
        mine = [(block, now) for at, block, now in frames if at == start]
        known = torch.full((5,), -1)
        known[0] = 1 if start == 0 else -1
        for block, now in mine:
            assert not (now & (known >= 0)).any(), "a shown slot was uncovered once more"
            known[now] = block[now]
            assert block.tolist() == [MASK if x < 0 else x for x in known.tolist()]
        assert len(mine) == (5 - (start == 0)) if steps is None else len(mine) <= steps
        assert (known >= 0).all(), "the block was left before it was full"


@pytest.mark.exercise("6.7")
def test_a_shorter_text_is_the_beginning_of_a_longer_one(room, model):
    """With one seed, n tokens are the first n of any longer run: budgets only cut."""
    long = room.block_sample(model, [1, 2], 11, 4, MASK, generator=generator(7))
    for n in (0, 1, 2, 6, 10):
        assert room.block_sample(model, [1, 2], n, 4, MASK, generator=generator(7)) == long[:n]


@pytest.mark.exercise("6.7")
def test_text_ends_with_the_first_stop_token(room, model):
    """Text is cut behind the first stop token, in whatever slot it falls, and no pass follows."""
    # case A2
    long = room.block_sample(model, [1, 2], 11, 4, MASK, generator=generator(7))
    for stop in set(long):
        model.begin(0)
        cut = long[: long.index(stop) + 1]
        out = room.block_sample(model, [1, 2], 11, 4, MASK, None, 1.0, [stop], generator(7))
        assert out == cut, f"stop token {stop} in {long}"
        whole = (2 + len(cut) + 3) // 4  # blocks that were begun: the last one is not kept
        assert len(model.fed) == 4 * whole - 2 + whole - 1, "no pass follows the stop"


@pytest.mark.exercise("6.7")
def test_the_law_of_blocks_of_one_is_the_product_of_its_steps(room, listed):
    """With L = 1 the text's law is the product of the model's own laws, place after place."""
    small = predictor(2, vocab=4)
    law = law_of(lambda g: tuple(room.block_sample(small, [1], 2, 1, 3, generator=g)))
    for words in itertools.product(range(3), repeat=2):
        chance, known = 1.0, [1]
        for word in words:
            mask = block_causal(len(known) + 1, 1)
            row = small(torch.tensor([[*known, 3]]), mask=mask)[0, -1, :3].softmax(-1)
            chance, known = chance * row[word].item(), [*known, word]
        assert law[words] == pytest.approx(chance, abs=1e-6), words


def laws_of_two_slots(model) -> tuple[dict, dict]:
    """Blocks of 2 behind [1, 2], by hand: the laws of one slot at a time, and of both at once."""

    def row(ids, slot, temperature=1.0):
        logits = model(torch.tensor([[1, 2, *ids]]), mask=block_causal(4, 2))[0, 2 + slot, :3]
        return (logits / temperature).softmax(-1).tolist()

    both = row([3, 3], 0), row([3, 3], 1)
    single, once = {}, {}
    for a, b in itertools.product(range(3), repeat=2):
        left = both[0][a] * row([a, 3], 1)[b]  # slot 0 first
        right = both[1][b] * row([3, b], 0)[a]  # slot 1 first
        single[a, b], once[a, b] = (left + right) / 2, both[0][a] * both[1][b]
    return single, once


@pytest.mark.exercise("6.6", "6.7")
def test_first_hitting_is_the_limit_of_many_steps(room, listed):
    """With N steps two slots fall together with chance 1/N; first hitting is the limit."""
    small = predictor(3, vocab=4)
    single, once = laws_of_two_slots(small)
    assert max(abs(single[x] - once[x]) for x in single) > 0.01, "else nothing is tested"
    for steps in (None, 1, 2, 3):
        law = law_of(lambda g, n=steps: tuple(
            room.block_sample(small, [1, 2], 2, 2, 3, n, generator=g)))  # fmt: skip
        w = 0 if steps is None else 1 / steps
        for x in single:
            due = (1 - w) * single[x] + w * once[x]
            assert law[x] == pytest.approx(due, abs=1e-6), f"steps={steps}, text {x}"


@pytest.mark.exercise("6.4", "6.5", "6.7")
def test_the_bound_is_above_minus_log_of_what_the_sampler_writes(room):
    """Averaged over noise, the bound is the mean over orders of -log p, so at least -log of it."""
    small = predictor(3, vocab=4)
    single, _ = laws_of_two_slots(small)
    for a, b in single:
        clean, mean = torch.tensor([[1, 2, a, b]]), 0.0
        # Each count of masks is equally likely, and so is each way to place them; weight L / count.
        for pattern, chance in (((1, 1), 1 / 2), ((1, 0), 1 / 4), ((0, 1), 1 / 4)):
            hidden = torch.tensor([[0, 0, *pattern]]).bool()
            t = torch.tensor([[1.0, sum(pattern) / 2]]).double()
            logits = room.noisy_logits(small, clean.masked_fill(hidden, 3), clean, 2)
            logits[..., 3] = -math.inf
            mean += chance * room.block_bound(logits, clean, hidden, t, 2).sum().item()
        assert mean >= -math.log(single[a, b]) - 1e-9, f"text {(a, b)}"


@pytest.mark.exercise("6.7")
def test_the_temperature_reaches_the_draw(room, listed):
    """The law of a single slot at temperature T is proportional to p to the power 1/T."""
    small = predictor(5, vocab=4)
    row = small(torch.tensor([[1, 3]]), mask=block_causal(2, 1))[0, 1, :3]
    for temperature in (0.5, 2.0):
        law = law_of(lambda g, t=temperature: tuple(
            room.block_sample(small, [1], 1, 1, 3, None, t, generator=g)))  # fmt: skip
        due = (row / temperature).softmax(-1).tolist()
        assert [law[x,] for x in range(3)] == pytest.approx(due, abs=1e-6)


@pytest.mark.exercise("6.7")
@pytest.mark.parametrize("change, message", [
    ({"prompt": []}, r"prompt=\[\] is empty"),
    ({"prompt": [9]}, "prompt holds 9"),
    ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ({"size": 0}, "size=0"),
    ({"steps": 0}, "steps=0"),
    ({"mask_id": 6}, "mask_id=6"),
    ({"mask_id": -1}, "mask_id=-1"),
    ({"temperature": -0.5}, "temperature=-0.5"),
    ({"temperature": math.inf}, "temperature=inf"),
    ({"stop_ids": 3}, "stop_ids=3"),
])  # fmt: skip
def test_a_senseless_request_is_refused(room, model, change, message):
    """A request that cannot be served is refused by name, before any pass."""
    request = dict(prompt=[1, 2], max_new_tokens=4, size=2, mask_id=MASK, generator=generator())
    model.begin(0)
    with pytest.raises(ValueError, match=message):
        room.block_sample(model, **(request | change))
    assert not model.fed, "work was done before the refusal"
