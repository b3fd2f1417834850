"""The spec of room 13 · anchors: exercises 13.1 (sample_anchors), 13.2 (block_inputs), 13.3
(block_labels) and 13.4 (may_attend).

Two kinds of truth: pictures drawn by hand, and sets collected from the rule's own sentence. The
second half packs blocks into a real, tiny drafter and watches what reaches what.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidflash.drafter import DrafterConfig, DraftModel


def picture(mask: torch.Tensor) -> str:
    """A mask as text: # sees, . does not."""
    return "\n".join("".join("#" if seen else "." for seen in row) for row in mask.tolist())


def drawn(text: str) -> str:
    """A hand-drawn mask without the spaces that set its halves apart."""
    return "\n".join(line.replace(" ", "") for line in text.split("\n") if line.strip())


def assert_drawn(mask: torch.Tensor, text: str, why: str) -> None:
    """Compare a mask with its hand-drawn picture, and show both."""
    mine, wanted = picture(mask), drawn(text)
    assert mine == wanted, f"{why}; yours:\n{mine}\nwanted:\n{wanted}\n"


def bits(text: str) -> torch.Tensor:
    """Rows of loss mask: 1 where the target wrote the token."""
    return torch.tensor([[char == "1" for char in row] for row in text.split()])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def usable(row: list[bool]) -> list[int]:
    """The rule's sentence, position by position: written by the target, and so is the next one."""
    return [i for i in range(len(row) - 1) if row[i] and row[i + 1]]


masks = st.integers(1, 14).flatmap(
    lambda length: st.lists(
        st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=4
    )
)
# Rising anchors, closer together than a block or not, then padding: what a row can look like.
anchor_rows = st.tuples(
    st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(sorted), st.integers(0, 2)
).map(lambda pair: pair[0] + [-1] * pair[1])


# --- exercise 13.1: where blocks begin -----------------------------------------------------------


@pytest.mark.exercise("13.1")
def test_every_usable_position_becomes_an_anchor_when_asked_for_enough(room):
    """Asked for plenty, every usable position is an anchor once, in rising order, then padding."""
    # case F6: ten positions, 512 anchors wanted
    anchors = room.sample_anchors(bits("0001111111"), 512, generator())
    assert anchors[0, :6].tolist() == [3, 4, 5, 6, 7, 8], (
        "positions 3 .. 8 are the target's own and have a successor that is too"
    )
    assert set(anchors[0, 6:].tolist()) <= {room.PADDING}, "what is left over is PADDING"


@pytest.mark.exercise("13.1")
@pytest.mark.parametrize("where", [0, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 512])
def test_a_single_usable_anchor_is_used_once(room, where, count):
    """If a row has just one usable anchor, that one is drawn, once, wherever it lies."""
    # case F4
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, where : where + 2] = True
    anchors = room.sample_anchors(mask, count, generator())[0].tolist()
    assert anchors[0] == where and set(anchors[1:]) <= {room.PADDING}


@pytest.mark.exercise("13.1")
def test_a_row_with_nothing_to_learn_is_all_padding(room):
    """A row without two neighbouring tokens of the target yields no anchor, and no error."""
    anchors = room.sample_anchors(bits("0000 0101 0001 1000"), 3, generator())
    assert anchors.shape[0] == 4 and (anchors == room.PADDING).all(), (
        "a lone token has no successor to learn, and the last position has none at all"
    )


@pytest.mark.exercise("13.1")
@given(rows=masks, count=st.integers(1, 16), seed=st.integers(0, 999))
def test_anchors_are_usable_distinct_and_sorted(room, rows, count, seed):
    """Every row gets min(count, usable) different usable positions, rising, padding last."""
    # case F6
    anchors = room.sample_anchors(torch.tensor(rows), count, generator(seed))
    assert anchors.dtype == torch.int64 and anchors.shape[1] <= count
    for row, drawn_row in zip(rows, anchors.tolist(), strict=True):
        real = [a for a in drawn_row if a != room.PADDING]
        assert drawn_row == real + [room.PADDING] * (len(drawn_row) - len(real)), "padding is last"
        assert real == sorted(set(real)), f"{real} must rise and never repeat"
        assert set(real) <= set(usable(row)), f"of {real}, only {usable(row)} are usable"
        assert len(real) == min(count, len(usable(row))), (
            f"{len(real)} anchors drawn; {count} wanted, {len(usable(row))} usable"
        )


@pytest.mark.exercise("13.1")
def test_every_set_of_anchors_is_equally_likely(room):
    """Drawing 2 of 4 usable positions gives each of the 6 pairs one time in six, row by row."""
    rows = 6000
    anchors = room.sample_anchors(bits("0111110").expand(rows, -1), 2, generator(7))
    pairs = [(a, b) for a in range(1, 5) for b in range(a + 1, 5)]
    seen = [sum(row == [a, b] for row in anchors.tolist()) for a, b in pairs]
    assert sum(seen) == rows
    # 1000 expected each; one standard deviation is about 29. A fair draw with this seed stays near.
    assert all(850 < n < 1150 for n in seen), (
        f"{dict(zip(pairs, seen, strict=True))}: rows draw for themselves, without replacement"
    )


@pytest.mark.exercise("13.1")
def test_the_generator_alone_decides(room):
    """The generator's state alone decides which anchors are drawn."""
    mask = bits("0" + "1" * 60)
    torch.manual_seed(1)
    first = room.sample_anchors(mask, 8, generator(3))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(first, room.sample_anchors(mask, 8, generator(3)))
    assert torch.equal(state, torch.get_rng_state()), "torch's global generator was used"
    assert not torch.equal(first, room.sample_anchors(mask, 8, generator(4)))
    again = generator(3)
    room.sample_anchors(mask, 8, again)
    assert not torch.equal(first, room.sample_anchors(mask, 8, again)), (
        "a second draw, as in the next epoch, must give new anchors"
    )


@pytest.mark.exercise("13.1")
def test_bad_requests_for_anchors_are_refused(room):
    """A count below 1 and a mask that is not boolean are refused in a sentence."""
    with pytest.raises(ValueError, match="count=0 must be at least 1"):
        room.sample_anchors(bits("111"), 0)
    unchecked = getattr(room.sample_anchors, "__wrapped__", room.sample_anchors)
    with pytest.raises(ValueError, match="loss_mask is torch.int64; it must be torch.bool"):
        unchecked(torch.tensor([[0, 1, 1]]), 1)


# --- exercises 13.2 and 13.3: what a block is shown, and what it must say ------------------------


def test_a_block_stands_at_its_anchors_own_position(room):
    """Slot j of a block has position anchor + j, counted from 0 in the row; padding stands at 0."""
    # case D7
    assert room.block_positions(torch.tensor([[3]]), 4).tolist() == [[3, 4, 5, 6]]
    rows = room.block_positions(torch.tensor([[2, 4], [0, -1]]), 3)
    assert rows.tolist() == [[2, 3, 4, 4, 5, 6], [0, 1, 2, 0, 1, 2]]


@pytest.mark.exercise("13.2")
def test_a_block_is_shown_its_anchor_and_masks(room):
    """The drafter is shown each anchor's own token in slot 0 and mask ids in all other slots."""
    ids = torch.arange(100, 110)[None]
    shown = room.block_inputs(ids, torch.tensor([[2, 7, -1]]), 4, 999)
    assert shown[0, :8].tolist() == [102, 999, 999, 999, 107, 999, 999, 999]
    assert shown.shape == (1, 12) and shown[0, 9:].tolist() == [999] * 3


@pytest.mark.exercise("13.2")
@given(ids=st.lists(st.integers(0, 4), min_size=2, max_size=9), size=st.integers(2, 5))
def test_no_block_is_shown_a_token_that_it_must_guess(room, ids, size):
    """Whatever the text holds, the mask id included, only slot 0 shows any of it."""
    # case A6: id 4 is the mask, and it may well stand in the text
    anchors = torch.arange(len(ids))[None]
    shown = room.block_inputs(torch.tensor([ids]), anchors, size, 4).view(len(ids), size)
    assert shown.tolist() == [[token] + [4] * (size - 1) for token in ids]


@pytest.mark.exercise("13.3")
def test_labels_are_the_tokens_at_the_slots_own_positions(room):
    """In the row 0, 1, 2, ... the labels of a block at a are a+1 .. a+B-1; the anchor has none."""
    # case F2: no shift, neither once nor twice
    ids = torch.arange(12)[None]
    labels, valid = room.block_labels(ids, torch.tensor([[3, 5]]), 4, bits("1" * 12))
    assert labels.tolist() == [[[4, 5, 6], [6, 7, 8]]], (
        "slot k predicts the token AT anchor + k: no shift to the left as in next-token training"
    )
    assert valid.all()


@pytest.mark.exercise("13.3")
def test_a_block_of_b_slots_has_b_minus_1_labels(room):
    """Eight slots give 7 labels: the layout with 8, where the anchor predicts too, is not ours."""
    # case F3
    labels, valid = room.block_labels(
        torch.arange(20)[None], torch.tensor([[2]]), 8, bits("1" * 20)
    )
    assert labels.shape == valid.shape == (1, 1, 7)
    assert labels.tolist() == [[[3, 4, 5, 6, 7, 8, 9]]]


@pytest.mark.exercise("13.3")
def test_slots_past_the_end_of_the_row_do_not_count(room):
    """A block near the end of its row learns from the tokens that exist, and from no others."""
    # case F6
    ids = torch.arange(10)[None]
    labels, valid = room.block_labels(ids, torch.tensor([[5, 6, 7, 8]]), 4, bits("1" * 10))
    assert valid.tolist() == [[[True] * 3, [True] * 3, [True, True, False], [True, False, False]]]
    assert labels[valid].tolist() == [6, 7, 8, 7, 8, 9, 8, 9, 9]


@pytest.mark.exercise("13.3")
def test_only_the_targets_own_tokens_count(room):
    """Slots over a prompt or a user's turn carry no loss, and neither do padding blocks."""
    # case A6: the id 9 is the mask; standing in the text it is a token like any other
    ids = torch.tensor([[9, 9, 5, 9, 6, 7, 9, 8]])
    labels, valid = room.block_labels(ids, torch.tensor([[2, 4, -1]]), 4, bits("00111011"))
    assert valid.tolist() == [[[True, True, False], [False, True, True], [False] * 3]]
    assert labels[valid].tolist() == [9, 6, 9, 8]


@pytest.mark.exercise("13.3")
@given(data=st.data(), rows=masks, size=st.integers(2, 6))
def test_labels_equal_the_row_looked_up_slot_by_slot(room, data, rows, size):
    """For any row, anchors and loss mask, labels and validity equal a look-up, slot by slot."""
    length = len(rows[0])
    ids = torch.randint(0, 7, (len(rows), length), generator=generator(length))
    anchors = [data.draw(anchor_rows.map(lambda a: (a + [-1] * 6)[:6])) for _ in rows]
    anchors = [[a if a < length else -1 for a in row] for row in anchors]
    labels, valid = room.block_labels(ids, torch.tensor(anchors), size, torch.tensor(rows))
    for r, row in enumerate(anchors):
        for n, anchor in enumerate(row):
            for k in range(1, size):
                place = anchor + k
                counts = anchor != -1 and place < length and rows[r][place]
                at = f"row {r} of {length} tokens, anchor {anchor}, slot {k}: position {place}"
                mine, label = valid[r, n, k - 1].item(), labels[r, n, k - 1].item()
                assert mine == counts, f"{at} is {'not ' * (not counts)}to be learnt"
                assert not counts or label == ids[r, place].item(), f"{at} has another label"


# --- exercise 13.4: who may look at whom ---------------------------------------------------------


@pytest.mark.exercise("13.4")
def test_the_mask_of_two_blocks_by_hand(room):
    """Blocks at 2 and 4 see the context before themselves, and themselves, both ways."""
    # the chapter's picture: six context positions, B = 3
    mask = room.training_mask(torch.tensor([[2, 4]]), 3, 6)
    wanted = """
        ##.... ### ...
        ##.... ### ...
        ##.... ### ...
        ####.. ... ###
        ####.. ... ###
        ####.. ... ###
    """
    assert_drawn(mask[0], wanted, "six columns of context come first, then block 0, then block 1")


@pytest.mark.exercise("13.4")
def test_overlapping_blocks_by_hand(room):
    """Anchors closer than a block: the later block still sees no feature at or after its anchor."""
    # case F1: row 3, B = 4, anchors 3 and 5; block 2 sees context 0 .. 4, not block 1's slots
    mask = room.training_mask(torch.tensor([[3, 5]]), 4, 12)
    wanted = """
        ###......... #### ....
        ###......... #### ....
        ###......... #### ....
        ###......... #### ....
        #####....... .... ####
        #####....... .... ####
        #####....... .... ####
        #####....... .... ####
    """
    assert_drawn(mask[0], wanted, "the anchor's POSITION ends the context, not its block's number")


@pytest.mark.exercise("13.4")
def test_edges_by_hand(room):
    """A block at 0 has no context, one at the row's end sees all before it, padding nothing."""
    # case F6
    mask = room.training_mask(torch.tensor([[0, 3, -1], [-1, -1, -1]]), 2, 4)
    wanted = """
        .... ## .. ..
        .... ## .. ..
        ###. .. ## ..
        ###. .. ## ..
        .... .. .. ..
        .... .. .. ..
    """
    assert_drawn(mask[0], wanted, "blocks at 0 and 3 of four positions, then padding")
    assert not mask[1].any(), "a row without anchors sees nothing at all"


@pytest.mark.exercise("13.4")
@given(
    rows=st.lists(anchor_rows.map(lambda a: (a + [-1] * 6)[:6]), min_size=1, max_size=3),
    size=st.integers(2, 5),
    context=st.integers(0, 12),
)
def test_the_mask_equals_its_sentence(room, rows, size, context):
    """A slot sees the context before its anchor and the slots of its own block, nothing else."""
    mask = room.training_mask(torch.tensor(rows), size, context)
    assert mask.dtype == torch.bool
    assert mask.shape == (len(rows), 6 * size, context + 6 * size)
    for r, row in enumerate(rows):
        for n, anchor in enumerate(row):
            # Collect, by the sentence, which columns a slot of block n sees.
            sees = set()
            if anchor != room.PADDING:
                sees |= {position for position in range(context) if position < anchor}
                sees |= {context + n * size + slot for slot in range(size)}
            for slot in range(size):
                seen = set(mask[r, n * size + slot].nonzero().flatten().tolist())
                assert seen == sees, (
                    f"anchors {row}, B={size}: slot {slot} of block {n} sees columns "
                    f"{sorted(seen)}, should see {sorted(sees)}"
                )


@pytest.mark.exercise("13.4")
def test_the_rule_answers_one_question_at_a_time(room):
    """The rule is a predicate on positions: it also answers for one slot and one key."""

    def ask(anchor, q_block, k_block, k_position):
        numbers = (torch.tensor([n]) for n in (anchor, q_block, k_block, k_position))
        return room.may_attend(*numbers).item()

    assert ask(5, 0, -1, 4) is True, "the last position before the anchor is context"
    assert ask(5, 0, -1, 5) is False, (
        "the anchor's own feature: in decoding the target has not been fed the anchor yet"
    )
    assert ask(5, 0, -1, 6) is False, "a later feature gives the answer away"
    assert ask(5, 3, 3, 99) is True, "its own block, whatever the key's position"
    assert ask(5, 3, 2, 0) is False, "another block, even one that stands before the anchor"
    assert ask(-1, 3, 3, 0) is False and ask(-1, 3, -1, 0) is False, "padding sees nothing"


@pytest.mark.exercise("13.4")
@given(anchors=anchor_rows, size=st.integers(2, 5))
def test_a_mask_has_no_more_entries_than_its_blocks_need(room, anchors, size):
    """A block at a costs B (a + B) entries of the mask, padding none: no hidden extra."""
    seen = room.training_mask(torch.tensor([anchors]), size, 12).sum().item()
    due = sum(size * (a + size) for a in anchors if a != -1)
    assert seen == due, f"anchors {anchors}, B={size}: {seen} pairs see each other, {due} should"


# --- the packed pass: a real drafter under the mask ----------------------------------------------

SIZES = dict(
    hidden_size=6,
    intermediate_size=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    rope_theta=100.0,
    num_hidden_layers=2,
    block_size=4,
    mask_token_id=6,
    target_layer_ids=(1, 2),
    num_target_layers=8,
    target_hidden_size=5,
    vocab_size=7,
)
S, B = 12, 4


def tensors(*shapes, seed=0) -> list[torch.Tensor]:
    g = generator(seed)
    return [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]


def world(rows: int, seed: int = 0):
    """A drafter, the target's table (embedding and head in one), ids and features."""
    model = DraftModel(DrafterConfig(**SIZES)).double()
    g = generator(seed)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=g, dtype=torch.float64) * (0.5 if p.ndim > 1 else 1)
    table, features = tensors((7, 6), (rows, S, 10), seed=seed + 1)
    return model, table, torch.randint(0, 6, (rows, S), generator=g), features


def packed(room, model, table, ids, features, anchors):
    """Logits [R N B V] of all blocks in one pass, made with the room under examination."""
    context = model.context(features, torch.arange(S))
    shown = table[room.block_inputs(ids, anchors, B, SIZES["mask_token_id"])]
    mask = room.training_mask(anchors, B, S)[:, None]
    hidden = model(shown, room.block_positions(anchors, B), context, mask)
    return (hidden @ table.T).unflatten(1, (-1, B))


def alone(model, table, ids, features, anchor):
    """Logits [B V] of one block as in decoding: context cut off before the anchor, no mask."""
    block = torch.tensor([ids[anchor].item()] + [SIZES["mask_token_id"]] * (B - 1))
    context = model.context(features[None, :anchor], torch.arange(anchor))
    hidden = model(table[block][None], torch.arange(anchor, anchor + B), context)
    return hidden[0] @ table.T


def cross_entropy(logits, labels):
    """Minus log of the label's probability, summed: plain, without torch's own loss."""
    return sum(row.logsumexp(0) - row[label] for row, label in zip(logits, labels, strict=True))


@pytest.mark.exercise("13.4")
@given(
    rows=st.lists(
        st.lists(st.integers(0, S - 1), min_size=3, max_size=3, unique=True).map(sorted),
        min_size=1,
        max_size=2,
    ),
    seed=st.integers(0, 99),
)
def test_a_packed_pass_equals_one_pass_per_block(room, rows, seed):
    """Many blocks in one masked pass give the logits of decoding each block by itself, unmasked."""
    model, table, ids, features = world(len(rows), seed)
    with torch.no_grad():
        together = packed(room, model, table, ids, features, torch.tensor(rows))
        for r, row in enumerate(rows):
            for n, anchor in enumerate(row):
                single = alone(model, table, ids[r], features[r], anchor)
                worst = (together[r, n] - single).abs().max().item()
                assert worst < 1e-9, (
                    f"row {r}: the block at {anchor}, packed with {row}, is off by {worst:.2g}"
                )


@pytest.mark.exercise("13.4")
@pytest.mark.parametrize("rows", [[[3, 5, 8], [1, 6, -1]], [[0, 10, -1], [9, 10, -1]]])
def test_a_packed_pass_has_the_gradients_of_one_pass_per_block(room, rows):
    """The packed loss sends the drafter, and the features, the gradients of separate passes."""
    model, table, ids, features = world(len(rows))
    features.requires_grad_()
    wanted, loss_mask = [*model.parameters(), features], bits(" ".join(["1" * S] * len(rows)))
    anchors = torch.tensor(rows)
    labels, valid = room.block_labels(ids, anchors, B, loss_mask)
    logits = packed(room, model, table, ids, features, anchors)[:, :, 1:]
    together = torch.autograd.grad(cross_entropy(logits[valid], labels[valid]), wanted)

    total = [torch.zeros_like(x) for x in wanted]
    for r, row in enumerate(rows):
        for anchor in row:
            if anchor == -1:
                continue
            guesses = alone(model, table, ids[r], features[r], anchor)[1:]
            truth = ids[r, anchor + 1 : anchor + B]  # shorter where the row ends
            loss = cross_entropy(guesses[: len(truth)], truth)
            grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
            total = [a + b for a, b in zip(total, grads, strict=True)]
    names = [name for name, _ in model.named_parameters()] + ["features"]
    for name, mine, truth in zip(names, together, total, strict=True):
        worst = (mine - truth).abs().max().item()
        scale = max(1.0, truth.abs().max().item())
        # 1e-6: room 01's norms compute in float32, also backwards
        assert worst < 1e-6 * scale, f"the gradient of {name} is off by {worst:.2g}"


@pytest.mark.exercise("13.4")
@pytest.mark.parametrize("anchors", [[3, 5], [0, 1, 2], [4, 11]])
def test_no_block_sees_a_feature_at_or_after_its_anchor(room, anchors):
    """Changing the feature of a position changes only blocks whose anchor lies behind it."""
    # case F1
    model, table, ids, features = world(1)
    rows = torch.tensor([anchors])
    with torch.no_grad():
        before = packed(room, model, table, ids, features, rows)
        for place in range(S):
            moved = features.clone()
            moved[0, place] += 1.0
            change = (packed(room, model, table, ids, moved, rows) - before).abs().amax((0, 2, 3))
            for n, anchor in enumerate(anchors):
                leaks, lacks = place >= anchor, place < anchor
                assert not (leaks and change[n] > 0), (
                    f"the block at {anchor} reacts to the feature of position {place}: in decoding "
                    "the target has not read it yet"
                )
                assert not (lacks and change[n] == 0), (
                    f"the block at {anchor} is blind to position {place}"
                )


@pytest.mark.exercise("13.4")
def test_blocks_do_not_see_each_other(room):
    """Gradients flow between the slots of a block, both ways, and never from block to block."""
    # case F8
    model, table, ids, features = world(1)
    anchors = torch.tensor([[3, 5, 9]])
    shown = table[room.block_inputs(ids, anchors, B, SIZES["mask_token_id"])].requires_grad_()
    context = model.context(features, torch.arange(S))
    mask = room.training_mask(anchors, B, S)[:, None]
    hidden = model(shown, room.block_positions(anchors, B), context, mask)
    for q in range(3 * B):
        (grad,) = torch.autograd.grad(hidden[0, q].sum(), shown, retain_graph=True)
        reached = grad[0].abs().sum(-1).unflatten(0, (3, B)) > 0
        own = q // B
        assert reached[own].all(), f"slot {q % B} of block {own} misses slots of its own block"
        assert reached.any(1).tolist() == [n == own for n in range(3)], (
            f"slot {q % B} of block {own} hears from blocks {reached.any(1).nonzero().tolist()}"
        )


@pytest.mark.exercise("13.4")
def test_features_get_gradients_only_from_blocks_behind_them(room):
    """A block's loss reaches every feature before its anchor and none at or after it."""
    # case F1, by gradient
    model, table, ids, features = world(1)
    features.requires_grad_()
    logits = packed(room, model, table, ids, features, torch.tensor([[3, 5]]))
    for n, anchor in enumerate([3, 5]):
        (grad,) = torch.autograd.grad(logits[0, n].sum(), features, retain_graph=True)
        reached = (grad[0].abs().sum(-1) > 0).tolist()
        assert reached == [place < anchor for place in range(S)]


@pytest.mark.exercise("13.4")
def test_padding_blocks_see_nothing_and_add_nothing(room):
    """Padding changes no other block, is finite, and carries no loss and no gradient."""
    # case F6
    model, table, ids, features = world(2)
    short, long = torch.tensor([[3, 5], [2, 7]]), torch.tensor([[3, 5, -1, -1], [2, 7, -1, -1]])
    logits = packed(room, model, table, ids, features, long)
    assert logits.isfinite().all(), "a padding block sees nothing: zeros, not NaN"
    plain = packed(room, model, table, ids, features, short)
    assert (logits[:, :2] - plain).abs().max() < 1e-9, "padding must not change the real blocks"
    labels, valid = room.block_labels(ids, long, B, bits(f"{'1' * S} {'1' * S}"))
    assert not valid[:, 2:].any(), "a padding block has nothing to learn"
    wanted = list(model.parameters())
    with_padding = torch.autograd.grad(
        cross_entropy(logits[:, :, 1:][valid], labels[valid]), wanted
    )
    without = torch.autograd.grad(
        cross_entropy(plain[:, :, 1:][valid[:, :2]], labels[:, :2][valid[:, :2]]), wanted
    )
    for a, b in zip(with_padding, without, strict=True):
        assert a.isfinite().all() and (a - b).abs().max() < 1e-6 * max(1.0, b.abs().max())


@pytest.mark.exercise("13.4")
def test_packing_fuses_every_feature_once(room):
    """However many blocks a row holds, its S features pass fc once: that is what packing saves."""
    model, table, ids, features = world(1)
    fused, drafted = [], []
    model.fc.register_forward_hook(lambda _, x, y: fused.append(x[0].shape[1]))
    model.layers[0].mlp.register_forward_hook(lambda _, x, y: drafted.append(x[0].shape[1]))
    packed(room, model, table, ids, features, torch.tensor([[1, 3, 5, 8]]))
    assert fused == [S], f"rows through fc: {fused}; one pass per block would make it 1+3+5+8"
    assert drafted == [4 * B], f"slots through an MLP: {drafted}"


# torch's `meta` device computes shapes only, and a tensor made on the CPU does not fit there.


@pytest.mark.exercise("13.1")
def test_anchors_are_drawn_on_the_device_of_the_mask(room):
    """Tried on `meta`, so without a GPU."""
    wanted = torch.ones(2, 9, dtype=torch.bool, device="meta")
    assert room.sample_anchors(wanted, 3).device.type == "meta"


@pytest.mark.exercise("13.2")
def test_blocks_are_shown_on_the_device_of_the_ids(room):
    """Tried on `meta`, so without a GPU."""
    ids, anchors = (torch.zeros(2, n, dtype=torch.long, device="meta") for n in (9, 3))
    assert room.block_positions(anchors, 4).device.type == "meta"
    assert room.block_inputs(ids, anchors, 4, 1).device.type == "meta"


@pytest.mark.exercise("13.3")
def test_labels_are_read_on_the_device_of_the_ids(room):
    """Tried on `meta`, so without a GPU."""
    ids, anchors = (torch.zeros(2, n, dtype=torch.long, device="meta") for n in (9, 3))
    labels, valid = room.block_labels(ids, anchors, 4, ids > 0)
    assert labels.device.type == valid.device.type == "meta"


@pytest.mark.exercise("13.4")
def test_the_mask_is_made_on_the_device_of_the_anchors(room):
    """Tried on `meta`, so without a GPU."""
    anchors = torch.zeros(2, 3, dtype=torch.long, device="meta")
    assert room.training_mask(anchors, 4, 9).device.type == "meta"
