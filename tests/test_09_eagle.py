"""Room 09 · eagle: an autoregressive drafter on the target's features, trained as it decodes."""

import math
from dataclasses import replace

import pytest
import torch
from chance import law_of, target_law
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import decoder, stir, successor
from worlds import texts

from minidflash.greedy import greedy
from minidflash.speculate import speculate

# Real models run here: fewer examples than elsewhere. They grow with the profile.
SOME = settings(max_examples=max(12, settings().max_examples // 2))
FEW = settings(max_examples=max(6, settings().max_examples // 5))
CLOSE = 1e-5  # float64 models, but their norms are float32


def pair(room, seed, vocab=6, taps=(1, 3), t2d=None, **sizes):
    """A random target and a random head for it."""
    target = decoder(seed, vocab, layers=4, **sizes).requires_grad_(False)
    model = room.EagleModel(target.config, taps, t2d)
    stir(model, seed + 1000)
    return target, model.to(torch.float64).eval()


# --- an independent answer: one row at a time, one head at a time, angles as complex numbers


def rms(x, norm):
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def turned(x, position, theta):
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=-1)


def one_row(model, g, e, position, seen):
    """The hidden row of (feature g, token e) at a position; its key and value join `seen`."""
    c, at = model.config, model.self_attn
    both = torch.cat([rms(g, model.hidden_norm), rms(e, model.input_layernorm)])
    q, k, v = (p(both).view(-1, c.head_dim) for p in (at.q_proj, at.k_proj, at.v_proj))
    q = turned(rms(q, at.q_norm), position, c.rope_theta)
    k = turned(rms(k, at.k_norm), position, c.rope_theta)
    seen.append((k, v))
    found = []
    for h in range(c.num_attention_heads):
        shared = h * c.num_key_value_heads // c.num_attention_heads
        scores = torch.stack([q[h] @ k[shared] for k, _ in seen]) / c.head_dim**0.5
        found.append(scores.softmax(0) @ torch.stack([v[shared] for _, v in seen]))
    h = g + at.o_proj(torch.cat(found))
    x = rms(h, model.post_attention_layernorm)
    return h + model.mlp.down_proj(
        torch.nn.functional.silu(model.mlp.gate_proj(x)) * model.mlp.up_proj(x))


def settled(model, target, ids, features):
    """Keys and values of the true rows: feature i with token i + 1, for all but the last token."""
    seen = []
    for i in range(len(ids) - 1):
        g, e = model.fc(features[i]), target.embed(torch.tensor([[ids[i + 1]]]))[0, 0]
        one_row(model, g, e, i, seen)
    return seen


def chain(model, target, ids, features, root, steps, tokens=None):
    """Hidden rows of a chain that leaves row `root`: the true rows before it, then its own.

    Its tokens are the true ones, or, when `tokens` is a list, the anchor in it and its own guesses.
    """
    seen = settled(model, target, ids[: root + 1], features)
    hidden, rows = model.fc(features[root]), []
    for k in range(steps):
        token = tokens[k] if tokens is not None else ids[root + k + 1]
        hidden = one_row(model, hidden, target.embed(torch.tensor([[token]]))[0, 0], root + k, seen)
        rows.append(hidden)
        if tokens is not None:
            tokens.append(int(target.head(rms(hidden, model.norm)).argmax()))
    return rows


def text_of(target, ids, taps):
    """A text's features [S F] and last hidden states [S W]."""
    last = target.config.num_hidden_layers - 1
    features = target.forward(torch.tensor([ids]), taps=(*taps, last))[1][0]
    width = target.config.hidden_size
    return features[:, :-width], features[:, -width:]


def say(run):
    rounds = [(r.proposed, r.accepted, r.emitted) for r in run.rounds]
    return f"tokens {run.tokens}, rounds {rounds}"


# --- 9.1 which layers


@pytest.mark.exercise("9.1")
@pytest.mark.parametrize("layers, taps, theirs", [
    (32, (1, 15, 28), (2, 16, 29)), (36, (1, 17, 32), (2, 18, 33)), (24, (1, 11, 20), (2, 12, 21)),
    (61, (1, 29, 57), (2, 30, 58)), (7, (1, 2, 3), (2, 3, 4)),
])  # fmt: skip
def test_eagle_reads_what_enters_three_layers(room, layers, taps, theirs):
    """A model of 32 layers is read at transformers' hidden states 2, 16 and 29: taps 1, 15, 28."""
    # case E1
    found = tuple(room.eagle_taps(layers))
    assert found == taps, (
        f"{found}; hidden_states{list(theirs)} enter layers {list(theirs)}, and tap t is "
        f"hidden_states[t + 1], the output of layer t: {taps}"
    )
    if layers == 24:
        target = decoder(0, layers=24)
        ids = torch.tensor([[1, 2, 3]])
        entered = torch.cat([target.hidden_states(ids)[i] for i in theirs], dim=-1)
        assert torch.equal(target.forward(ids, taps=found)[1], entered)


@pytest.mark.exercise("9.1")
@pytest.mark.parametrize("layers", [6, 3, 1, 0])
def test_a_target_too_shallow_for_three_taps_is_refused(room, layers):
    """With fewer than seven layers two of the three taps would be one layer: refused."""
    # case E3
    with pytest.raises(ValueError, match=f"num_layers={layers} is too shallow"):
        room.eagle_taps(layers)


# --- 9.2 draft vocabulary


@pytest.mark.exercise("9.2")
def test_a_draft_vocabulary_by_hand(room):
    """Of eight tokens 0, 3 and 7 are the most frequent: d2t is 0, 2, 5, and draft id 2 means 7."""
    d2t, t2d = room.draft_vocabulary(torch.tensor([9, 1, 0, 5, 1, 0, 0, 7]), 3)
    assert d2t.tolist() == [0, 2, 5], (
        f"d2t {d2t.tolist()}; the tokens are 0, 3, 7 in the order of their ids, and d2t[j] is how "
        "far token j is from j: 0 - 0, 3 - 1, 7 - 2"
    )
    assert t2d.dtype == torch.bool and t2d.nonzero().flatten().tolist() == [0, 3, 7]


@pytest.mark.exercise("9.2")
@given(counts=st.lists(st.integers(0, 3), min_size=1, max_size=9), data=st.data())
def test_a_draft_vocabulary_holds_the_most_frequent_tokens(room, counts, data):
    """The draft's tokens are the most frequent ones, ties to the lower id, in the order of ids."""
    size = data.draw(st.integers(1, len(counts)), "size")
    used = sorted(sorted(range(len(counts)), key=lambda v: (-counts[v], v))[:size])
    d2t, t2d = room.draft_vocabulary(torch.tensor(counts), size)
    assert [j + d for j, d in enumerate(d2t.tolist())] == used
    assert [v for v, known in enumerate(t2d.tolist()) if known] == used


# --- 9.3 who sees whom


def drawn(mask):
    return ["".join("#" if seen else "." for seen in row) for row in mask.tolist()]


@pytest.mark.exercise("9.3")
def test_a_chain_sees_the_text_before_it_and_itself(room):
    """Four true rows, chains that leave rows 1, 2 and 3, two steps on: the mask drawn by hand."""
    assert drawn(room.chain_mask(4, 1, 2)) == [
        "##.." + "#.." + "#..",
        "###." + ".#." + ".#.",
        "####" + "..#" + "..#",
    ]


@pytest.mark.exercise("9.3")
def test_at_step_0_a_chain_is_plain_causal_attention(room):
    """Before anything was guessed every row sees the true rows up to itself."""
    assert drawn(room.chain_mask(3, 0, 0)) == ["#..", "##.", "###"]


@pytest.mark.exercise("9.3")
@given(length=st.integers(1, 6), data=st.data())
def test_no_chain_has_holes_in_its_past(room, length, data):
    """Chain n sees exactly true rows 0 to its root, all of them, and its own row of each step."""
    # case F10
    first = data.draw(st.integers(0, length - 1), "first")
    step = data.draw(st.integers(0, 3), "step")
    mask, chains = room.chain_mask(length, first, step), length - first
    assert mask.dtype == torch.bool and tuple(mask.shape) == (chains, length + step * chains)
    for n in range(chains):
        due = {("text", s) for s in range(first + n + 1)} | {(k, n) for k in range(step)}
        names = [("text", s) for s in range(length)] + [
            (k, m) for k in range(step) for m in range(chains)]
        found = {name for name, sees in zip(names, mask[n].tolist(), strict=True) if sees}
        assert found == due, f"the chain that left row {first + n} sees {sorted(map(str, found))}"


# --- 9.4 the layer


@pytest.mark.exercise("9.4")
@SOME
@given(seed=st.integers(0, 99), rows=st.integers(1, 5), shared=st.sampled_from([1, 2]))
def test_the_layer_equals_one_written_row_by_row(room, seed, rows, shared):
    """The layer equals an independent one that takes rows and heads one at a time."""
    # case E10
    target, model = pair(room, seed, num_key_value_heads=shared)
    noise = torch.Generator().manual_seed(seed)
    g, e = (torch.randn(2, rows, 8, dtype=torch.float64, generator=noise) for _ in range(2))
    kept = []

    def store(k, v):
        kept.append((k, v))
        return k, v

    causal = torch.ones(rows, rows).tril().bool()
    out = model(g, e, torch.arange(rows) + 3, store, causal)
    assert len(kept) == 1, "keys and values are handed to `store` once, and its answer is used"
    assert kept[0][0].shape == (2, shared, rows, 4)
    for r in range(2):
        seen = []
        for i in range(rows):
            due = one_row(model, g[r, i], e[r, i], i + 3, seen)
            gap = float((out[r, i] - due).detach().abs().max())
            assert gap < CLOSE, f"row {i} of text {r} is off by {gap:.2g}"


@pytest.mark.exercise("9.4")
def test_a_row_looks_at_what_store_answers(room):
    """Row by row, with a store that answers with all rows so far, the layer gives the same rows."""
    _, model = pair(room, 1)
    noise = torch.Generator().manual_seed(1)
    g, e = (torch.randn(1, 3, 8, dtype=torch.float64, generator=noise) for _ in range(2))
    whole = model(g, e, torch.arange(3), lambda k, v: (k, v), torch.ones(3, 3).tril().bool())
    kept = []

    def store(k, v):
        kept.append((k, v))
        return [torch.cat(x, dim=2) for x in zip(*kept, strict=True)]

    for i in range(3):
        row = model(g[:, i : i + 1], e[:, i : i + 1], torch.tensor([i]), store)
        gap = float((row - whole[:, i : i + 1]).detach().abs().max())
        assert gap < CLOSE, f"row {i} is off by {gap:.2g}: what `store` answers are all its keys"


@pytest.mark.exercise("9.4")
def test_a_row_is_computed_where_the_weights_are(room):
    """Positions and mask may come from elsewhere; tried on torch's `meta` device."""
    _, model = pair(room, 3)
    g = torch.zeros(1, 2, 8, dtype=torch.float64, device="meta")
    mask = torch.ones(2, 2, dtype=torch.bool)
    out = model.to("meta")(g, g, torch.arange(2), lambda k, v: (k, v), mask)
    assert out.device.type == "meta"


def test_the_layer_has_no_bias(room):
    """Qwen3 has none, and neither has what EAGLE-3 adds: fc, and an own head."""
    _, model = pair(room, 3, t2d=torch.arange(6) < 4)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


@pytest.mark.exercise("9.4")
def test_the_residual_stream_is_the_features(room):
    """With silent attention and MLP the layer passes on the feature, and no trace of the token."""
    _, model = pair(room, 0)
    with torch.no_grad():
        model.self_attn.o_proj.weight.zero_()
        model.mlp.down_proj.weight.zero_()
    g, e = (torch.randn(1, 3, 8, dtype=torch.float64) for _ in range(2))
    out = model(g, e, torch.arange(3), lambda k, v: (k, v))
    assert torch.equal(out, g), "h = g + attention(x): the layer adds to the feature, not to x"


def test_head_and_embedding_are_the_targets(room):
    """A head has no embedding and, without a draft vocabulary, no output layer of its own."""
    # case E11
    target, model = pair(room, 1)
    names = {name for name, _ in model.named_parameters()}
    assert not [n for n in names if "embed" in n or "lm_head" in n]
    hidden = torch.randn(3, 8, dtype=torch.float64)
    capped = model.logits(hidden, lambda x: torch.tanh(target.head(x)))
    assert torch.allclose(capped, torch.tanh(target.head(model.norm(hidden)))), "a cap is kept"


def test_a_smaller_vocabulary_has_a_head_of_its_own(room):
    """With t2d the logits of known tokens come from an own head, and no other can be guessed."""
    # case E6
    t2d = torch.tensor([True, False, True, True, False, True])
    target, model = pair(room, 2, t2d=t2d)
    assert tuple(model.lm_head.weight.shape) == (4, 8)
    hidden = torch.randn(2, 5, 8, dtype=torch.float64)
    found = model.logits(hidden, target.head)
    assert torch.equal(found[..., t2d], model.norm(hidden) @ model.lm_head.weight.mT)
    assert (found.softmax(-1)[..., ~t2d] == 0).all() and found.isfinite().all()


# --- 9.5 training-time test


@pytest.mark.exercise("9.5")
@pytest.mark.parametrize("S, first", [(S, first) for S in (3, 5) for first in range(S - 1)])
def test_training_unrolls_what_decoding_does(room, S, first):
    """Every row of every step equals the chain that decoding drafts from there, tokens given."""
    # case F10
    target, model = pair(room, S)
    ids, steps = [[0, 3, 1, 5, 2][:S], [4, 4, 0, 1, 3][:S]], 3
    features = torch.stack([text_of(target, line, model.taps)[0] for line in ids])
    out = list(model.unroll(target.embed, torch.tensor(ids), features, steps, first))
    assert [tuple(h.shape[:2]) for h in out] == [(2, S)] + [(2, S - first)] * (steps - 1), (
        "step 0 has a row for every token, later steps one for every chain"
    )
    for r, root in [(r, root) for r in range(2) for root in range(first, S - 1)]:
        for k, due in enumerate(chain(model, target, ids[r], features[r], root,
                                      min(steps, S - 1 - root))):
            found = out[k][r, root if k == 0 else root - first]
            gap = (found - due).abs().max().item()
            assert gap < CLOSE, f"text {r}, the chain that leaves row {root}, step {k}: {gap:.2g}"


@pytest.mark.exercise("9.5")
def test_a_chain_knows_nothing_of_later_features(room):
    """A chain that leaves row 2 depends on features 0 to 2, on all of them, and on no later one."""
    # case F1
    target, model = pair(room, 3)
    ids = torch.tensor([[1, 2, 3, 4, 5, 0]])
    features = torch.randn(1, 6, 16, dtype=torch.float64, requires_grad=True)
    for k, hidden in enumerate(model.unroll(target.embed, ids, features, 3)):
        (gradient,) = torch.autograd.grad(hidden[0, 2].sum(), features, retain_graph=True)
        moved = gradient[0].abs().sum(-1).gt(0).nonzero().flatten().tolist()
        assert moved == [0, 1, 2], f"step {k} of the chain that left row 2 read features {moved}"


@pytest.mark.exercise("9.5")
def test_a_later_step_teaches_the_earlier_ones(room):
    """The gradient of a step reaches the output of the step before, which it was fed with."""
    target, model = pair(room, 4)
    features = torch.randn(1, 5, 16, dtype=torch.float64)
    first, second = model.unroll(target.embed, torch.tensor([[1, 2, 3, 4, 5]]), features, 2)
    (gradient,) = torch.autograd.grad(second[0, 2].sum(), first, allow_unused=True)
    assert gradient is not None and gradient[0, 2].abs().sum() > 0, "step 1 was cut off step 0"


@pytest.mark.exercise("9.5")
def test_a_step_is_one_pass_over_all_chains(room):
    """Seven steps are seven passes of the layer, and later ones pass only the chains' rows."""
    target, model = pair(room, 4)
    rows = []
    model.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[1]))
    features = torch.randn(1, 8, 16, dtype=torch.float64)
    list(model.unroll(target.embed, torch.zeros(1, 8).long(), features, 7, 5))
    assert rows == [8, 3, 3, 3, 3, 3, 3], f"the layer was given {rows} rows"


# --- 9.6 the loss


def entropy(truth, guess):
    """-sum p log q in plain Python, from two rows of logits."""
    p, q = ([math.exp(x - max(row)) for x in row] for row in (truth, guess))
    p, q = ([x / sum(row) for x in row] for row in (p, q))
    return -sum(a * math.log(b) for a, b in zip(p, q, strict=True))


def smooth(h, f):
    gaps = [abs(a - b) for a, b in zip(h.tolist(), f.tolist(), strict=True)]
    return sum(d * d / 2 if d < 1 else d - 0.5 for d in gaps) / len(gaps)


def loss_by_hand(model, target, ids, wanted, steps, decay, v, p):
    """Every chain of every text, one at a time: [total, weight], right by step, seen by step."""
    totals, right, seen = [0.0, 0.0], [0] * steps, [0] * steps
    for line, mask in zip(ids, wanted, strict=True):
        features, last = text_of(target, line, model.taps)
        for root in range(len(line) - 2):
            rows = chain(model, target, line, features, root, min(steps, len(line) - 2 - root))
            for k, h in enumerate(rows):
                truth = target.head(last[root + k + 1]).tolist()
                best = truth.index(max(truth))
                if not mask[root + k + 2] or not model.t2d[best]:
                    continue
                words = [w for w in range(len(truth)) if model.t2d[w]]
                guess = model.logits(h[None], target.head)[0].tolist()
                loss = p * entropy([truth[w] for w in words], [guess[w] for w in words])
                loss += v * smooth(h, last[root + k + 1])
                totals[0] += decay**k * loss
                totals[1] += decay**k
                right[k] += guess.index(max(guess)) == best
                seen[k] += 1
    return totals, right, seen


def loss_of(model, target, ids, wanted, **options):
    parts = [text_of(target, line, model.taps) for line in ids]
    features, last = (torch.stack(x) for x in zip(*parts, strict=True))
    mask = torch.tensor(wanted).bool()
    return model.loss(target.embed, target.head, torch.tensor(ids), features, last, mask, **options)


SETTINGS = {"EAGLE-3": (3, 0.8, 0.0, 1.0), "EAGLE-1": (1, 0.8, 1.0, 0.1), "both": (2, 0.5, 0.7, 2)}


@pytest.mark.exercise("9.6")
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("reduced", [False, True], ids=["all tokens", "draft vocabulary"])
def test_the_loss_counted_out_chain_by_chain(room, name, reduced):
    """The loss, its weight and its counts equal a sum over all chains, written in plain Python."""
    # case F9
    steps, decay, v, p = SETTINGS[name]
    t2d = torch.arange(6) != 0 if reduced else None  # 0 is the target's favourite in some rows
    target, model = pair(room, 5, t2d=t2d)
    ids, wanted = [[1, 2, 3, 4, 5, 0], [5, 0, 4, 1, 3, 3]], [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 1]]
    totals, right, seen = loss_by_hand(model, target, ids, wanted, steps, decay, v, p)
    total, weight, counts = loss_of(model, target, ids, wanted, steps=steps, decay=decay, v=v, p=p)
    assert counts["seen"].tolist() == seen, (
        f"{counts['seen'].tolist()} rows were asked at each step, {seen} are due: row i of step k "
        "is asked for token i + k + 2, if the target wrote it"
    )
    assert counts["right"].tolist() == right
    assert float(weight) == pytest.approx(totals[1]), "w is decay^k for every row asked at step k"
    assert float(total.detach()) == pytest.approx(totals[0], rel=1e-4)
    assert not weight.requires_grad and not counts["seen"].requires_grad


@pytest.mark.exercise("9.6")
def test_the_first_token_of_an_answer_is_learnt_and_the_end_is_not_passed(room):
    """Every token that the target wrote is asked for, the first and the last, and nothing after."""
    # case F9
    target, model = pair(room, 6)
    _, weight, counts = loss_of(model, target, [[1, 2, 3, 4, 5]], [[0, 0, 1, 1, 1]], steps=3)
    assert counts["seen"].tolist() == [3, 2, 1], "tokens 2, 3, 4 from rows 0, 1, 2; then 3, 4; 4"
    assert float(weight) == pytest.approx(3 + 2 * 0.8 + 0.64)


@pytest.mark.exercise("9.6")
def test_a_long_prompt_is_not_unrolled(room):
    """A chain of 3 steps that leaves row 4 reaches token 8: the chains before it ask for nothing.
    """
    target, model = pair(room, 6)
    rows = []
    model.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[1]))
    ids, first = [[1, 2, 3, 4, 5, 0] * 2, [5, 4, 3, 2, 1, 0] * 2], [0] * 8 + [1] * 4
    _, _, counts = loss_of(model, target, ids, [first, [0] * 9 + [1] * 3], steps=3)
    assert counts["seen"].tolist() == [7, 7, 7]
    assert rows == [12, 8, 8], f"rows {rows}: all once, for their keys; then rows 4 to 11"


@pytest.mark.exercise("9.6")
def test_as_it_stands_the_loss_is_eagle_3s(room):
    """Without settings: seven steps of weights 0.8^k, together 3.951424, and no regression."""
    target, model = pair(room, 7)
    ids, wanted = [list(range(6)) * 2], [[0] * 11 + [1]]  # one token, reached by seven chains
    _, weight, counts = loss_of(model, target, ids, wanted)
    assert counts["seen"].tolist() == [1] * 7
    assert float(weight) == pytest.approx(3.951424)
    same = loss_of(model, target, ids, wanted, steps=7, decay=0.8, v=0, p=1)[0]
    assert loss_of(model, target, ids, wanted)[0].item() == pytest.approx(same.item())


@pytest.mark.exercise("9.6")
def test_the_loss_does_not_depend_on_how_a_batch_is_split(room):
    """Sums and gradients of two texts together are those of the texts one by one, added."""
    # case F14
    target, model = pair(room, 8)
    ids, wanted = [[1, 2, 3, 4, 5, 0], [5, 0, 4, 1, 3, 3]], [[0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 1]]

    def measured(groups):
        model.zero_grad()
        parts = [loss_of(model, target, [ids[r] for r in g], [wanted[r] for r in g], steps=3)
                 for g in groups]
        sum(part[0] for part in parts).backward()
        sums = [float(sum(part[i].detach() for part in parts)) for i in (0, 1)]
        return sums, [p.grad.clone() for p in model.parameters()]

    (whole, gradients), (split, again) = measured([[0, 1]]), measured([[0], [1]])
    assert whole == pytest.approx(split)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients, again, strict=True))


@pytest.mark.exercise("9.6")
def test_training_moves_the_head_and_nothing_else(room):
    """One step of the optimiser lowers the loss and leaves the target as it was, bit for bit."""
    # case E11
    target, model = pair(room, 9)
    before = {name: w.clone() for name, w in target.state_dict().items()}
    options = {"ids": [[1, 2, 3, 4, 5, 0]], "wanted": [[0, 0, 1, 1, 1, 1]], "steps": 3}
    optimiser = torch.optim.SGD(model.parameters(), 1e-2)
    total = loss_of(model, target, **options)[0]
    total.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    optimiser.step()
    assert loss_of(model, target, **options)[0] < total
    assert all(torch.equal(before[name], w) for name, w in target.state_dict().items())
    assert all(p.grad is None for p in target.parameters())


@pytest.mark.exercise("9.6")
def test_a_batch_without_a_wanted_token_has_no_loss(room):
    """Where the target wrote nothing the loss and its weight are 0, and the gradient is finite."""
    target, model = pair(room, 10)
    total, weight, _ = loss_of(model, target, [[1, 2, 3]], [[0, 0, 0]], steps=2)
    total.backward()
    assert float(total.detach()) == 0 == float(weight)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# --- 9.7 and 9.8 in the loop


def told(room, target, model, ids, cuts=None, block_size=4):
    """A drafter that was told this text, in pieces if `cuts` says so, and the text's features."""
    mine = room.EagleDraft(target, model, block_size)
    mine.begin(len(ids) + 20)
    features, _ = text_of(target, ids, model.taps)
    start = 0
    for n in cuts or [len(ids)]:
        mine.commit(ids[start : start + n], features[start : start + n])
        start += n
    return mine, features


@torch.no_grad()
def minds_that_repeat(room, after):
    """A target where token t is followed by after[t]; the head guesses what follows its feature.

    Nothing is added to the residual stream, so the head's rows are its features for ever: they say
    which token stood BEFORE the anchor, and its follower is the anchor itself.
    """
    target, _ = successor(after)
    model = room.EagleModel(target.config, (1, 3)).to(torch.float64).requires_grad_(False)
    for part in (model.self_attn.o_proj, model.mlp.down_proj, model.fc):
        part.weight.zero_()
    model.fc.weight[:, 8:] = torch.eye(8)
    return target, model


@pytest.mark.exercise("9.7", "9.8")
def test_a_head_that_repeats_the_anchor_by_hand(room):
    """Tokens run 3 2 1 0 0 0 0 and every guess is the anchor: the records worked out by hand."""
    target, model = minds_that_repeat(room, [0, 0, 1, 2])
    run = speculate(target, room.EagleDraft(target, model, 4), [3], 8)
    assert run.tokens == [2, 1, 0, 0, 0, 0, 0, 0], say(run)
    assert [(r.proposed, r.accepted, r.emitted) for r in run.rounds] == [
        ([2, 2, 2], 0, [1]),  # anchor 2, feature of the 3: what follows 3 is the anchor
        ([1, 1, 1], 0, [0]),
        ([0, 0, 0], 3, [0, 0, 0, 0]),  # 0 is followed by 0: all right, and a bonus
        ([], 0, [0]),  # one token due: no guess
    ], say(run)


@pytest.mark.exercise("9.7", "9.8")
@pytest.mark.parametrize("n", [1, 2, 9, 20])
@pytest.mark.parametrize("B", [2, 5])
def test_perfect_and_hopeless_heads_set_the_amount_of_work(room, n, B):
    """A head that is always right needs 1 + ceil((n-1)/B) target forwards, one never right n."""
    target, model = minds_that_repeat(room, [3, 3, 3, 3])
    assert speculate(target, room.EagleDraft(target, model, B), [1], n).tokens == [3] * n
    assert target.forwards == 1 + math.ceil((n - 1) / B)
    target, model = minds_that_repeat(room, [3, 2, 1, 0])  # 1 2 1 2 ...: never the anchor again
    run = speculate(target, room.EagleDraft(target, model, B), [1], n)
    assert run.tokens == [2, 1] * (n // 2) + [2] * (n % 2) and target.forwards == n


@pytest.mark.exercise("9.7", "9.8")
@SOME
@given(data=st.data())
def test_any_weights_any_request_the_output_is_greedy(room, data):
    """Random targets, heads, prompts, blocks, budgets and stops give plain greedy's tokens."""
    vocab = data.draw(st.integers(2, 6), "vocabulary")
    known = data.draw(st.sets(st.integers(0, vocab - 1)), "draft vocabulary")
    t2d = torch.tensor([v in known for v in range(vocab)]) if known else None
    target, model = pair(room, data.draw(st.integers(0, 999), "weights"), vocab, t2d=t2d)
    B, n = data.draw(st.integers(2, 6), "B"), data.draw(st.integers(0, 12), "budget")
    prompt, stop = data.draw(texts(vocab, 1, 5), "prompt"), data.draw(texts(vocab, 0, 2), "stops")
    target.forwards = 0
    run = speculate(target, room.EagleDraft(target, model, B), prompt, n, stop)
    forwards = target.forwards
    plain = greedy(target, prompt, n, stop)
    assert run.tokens == plain, f"greedy writes {plain}; {say(run)}"
    assert run.stop == ("stop" if plain and plain[-1] in stop else "length")
    assert run.target_forwards == forwards <= max(1, len(plain)) or n == 0
    assert all(len(r.proposed) <= B - 1 for r in run.rounds)
    assert not known or {g for r in run.rounds for g in r.proposed} <= known


@pytest.mark.exercise("9.7")
@FEW
@given(seed=st.integers(0, 99), cuts=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_a_feature_waits_for_the_token_after_it(room, seed, cuts):
    """In whatever pieces a text is told, row i joins feature i and token i + 1; the last waits."""
    # case C4, case D3
    target, model = pair(room, seed)
    ids = torch.randint(0, 6, (sum(cuts),), generator=torch.Generator().manual_seed(seed)).tolist()
    mine, features = told(room, target, model, ids, cuts)
    due = settled(model, target, ids, features)
    assert mine.cache.length == len(due), (
        f"{len(ids)} positions, told in pieces of {cuts}, make {len(due)} rows: the newest "
        f"feature's next token is not settled; the cache holds {mine.cache.length}"
    )
    for i, (k, v) in enumerate(due):
        for found, right, what in ((mine.cache.keys, k, "key"), (mine.cache.values, v, "value")):
            gap = (found[0, 0, :, i] - right).abs().max().item()
            assert gap < CLOSE, f"{what} of row {i}, told in pieces of {cuts}, is off by {gap:.2g}"


@pytest.mark.exercise("9.7")
def test_settled_rows_cost_no_head(room):
    """Settled text passes the layer in one pass a piece, and nobody asks the head about it."""
    target, model = pair(room, 12)
    rows = []
    model.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[1]))
    model.norm.register_forward_hook(lambda *_: pytest.fail("the prompt's logits were computed"))
    told(room, target, model, [1, 2, 3, 4, 5, 0], [4, 2])
    assert rows == [3, 2], f"pieces of 4 and 2 tokens complete 3 and 2 rows, not {rows}"


@pytest.mark.exercise("9.8")
@FEW
@given(seed=st.integers(0, 99), ids=texts(6, 1, 4), anchor=st.integers(0, 5))
def test_the_chain_feeds_on_its_own_output(room, seed, ids, anchor):
    """The guesses are those of an independent chain fed with its own hidden rows and argmaxes."""
    target, model = pair(room, seed)
    mine, features = told(room, target, model, ids)
    tokens = [anchor]
    chain(model, target, ids, features, len(ids) - 1, 4, tokens)
    draft = mine.propose(anchor, 4)
    assert draft.tokens == tokens[1:], f"guesses {draft.tokens}; by hand {tokens[1:]}"
    assert draft.probs is None, "an argmax was not drawn, so there is no law to tell"


@pytest.mark.exercise("9.7", "9.8")
@FEW
@given(seed=st.integers(0, 999), prompt=texts(6, 1, 3), B=st.integers(2, 4))
def test_every_round_drafts_as_if_from_scratch(room, seed, prompt, B):
    """In every round the guesses are those of a head that was told the settled text at once."""
    # case C4, case C2, case C5
    target, model = pair(room, seed)
    mine, text = room.EagleDraft(target, model, B), list(prompt)

    class Checked:
        block_size, taps, begin, commit = B, mine.taps, mine.begin, mine.commit

        def propose(self, anchor, count):
            text.append(anchor) if len(text) == len(prompt) else None
            fresh, _ = told(room, target, model, text[:-1], block_size=B)
            found, due = mine.propose(anchor, count), fresh.propose(anchor, count)
            assert found.tokens == due.tokens, f"after {text}: {found.tokens}, anew {due.tokens}"
            held = mine.cache.length, target.cache.length
            assert count == 0 or held == (len(text) - 2, len(text) - 1), (
                f"after {text} the drafter holds {held[0]} rows and the target {held[1]}"
            )
            return found

    run = speculate(target, Checked(), prompt, 8, on_round=lambda r: text.extend(r.emitted))
    assert run.tokens == text[len(prompt) :]


@pytest.mark.exercise("9.8")
@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_a_draft_of_m_tokens_is_m_passes(room, count):
    """Each guess costs one pass over one row, and none of these rows is left behind."""
    target, model = pair(room, 3)
    mine, _ = told(room, target, model, [1, 2, 3, 4], block_size=9)
    rows = []
    model.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[1]))
    first = mine.propose(5, count).tokens
    assert rows == [1] * count, f"the layer was given {rows} rows for {count} guesses"
    assert len(first) == count and mine.cache.length == 3, "rows fed with guesses do not stay"
    assert mine.propose(5, count).tokens == first


@pytest.mark.exercise("9.7", "9.8")
def test_a_new_prompt_starts_from_nothing(room):
    """The same drafter used for another prompt drafts as a new one would."""
    target, model = pair(room, 2)
    used = room.EagleDraft(target, model, 4)
    speculate(target, used, [1, 2, 3], 6)
    again = speculate(target, used, [4, 5], 9)
    fresh = speculate(target, room.EagleDraft(target, model, 4), [4, 5], 9)
    assert [r.proposed for r in again.rounds] == [r.proposed for r in fresh.rounds]


@pytest.mark.exercise("9.8")
def test_the_target_itself_embeds_and_reads(room):
    """A target that scales its embedding and caps its logits does so for the draft as well."""
    target, model = pair(room, 5)
    embed, head = target.embed, target.head
    target.embed = lambda ids: 3.0 * embed(ids)
    target.head = lambda hidden: -head(hidden)
    mine, features = told(room, target, model, [1, 2, 3])
    tokens = [4]
    chain(model, target, [1, 2, 3], features, 2, 3, tokens)
    assert mine.propose(4, 3).tokens == tokens[1:], "always by the target's own embed and head"


def test_a_step_serves_several_rows_under_a_mask(room):
    """Two children of one node, one pass: each gets the logits of its own line."""
    # case D4
    target, model = pair(room, 11)
    lines = []
    for guess in (2, 5):
        mine, features = told(room, target, model, [1, 2, 3])
        tokens = [4, guess]
        rows = chain(model, target, [1, 2, 3], features, 2, 2, list(tokens))
        hidden, _ = mine.step(model.fc(features[2:]), torch.tensor([4]), torch.tensor([2]),
                              mine.cache)
        hidden, logits = mine.step(hidden, torch.tensor([guess]), torch.tensor([3]), mine.cache)
        lines.append((hidden[0], logits[0], rows))
    mine, features = told(room, target, model, [1, 2, 3])
    root, _ = mine.step(model.fc(features[2:]), torch.tensor([4]), torch.tensor([2]), mine.cache)
    sees = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]).bool()
    hidden, logits = mine.step(root.expand(2, -1), torch.tensor([2, 5]), torch.tensor([3, 3]),
                               mine.cache, sees)
    for n, (alone, said, _) in enumerate(lines):
        assert torch.allclose(hidden[n], alone, atol=CLOSE), f"child {n}"
        assert torch.allclose(logits[n], said, atol=CLOSE)
    assert mine.cache.length == 5


# --- temperature


@pytest.mark.exercise("9.7", "9.8")
@pytest.mark.parametrize("seed, temperature", [(0, 1.0), (1, 0.6)])
def test_above_temperature_zero_the_law_is_the_targets(room, seed, temperature):
    """Of a random pair every text of three tokens comes with the target's own probability."""
    target, model = pair(room, seed, vocab=2)

    def law(text):
        logits = (target.forward(torch.tensor([text]))[0][0, -1] / temperature).tolist()
        weights = [math.exp(x) for x in logits]
        return [w / sum(weights) for w in weights]

    found = law_of(lambda g: tuple(speculate(
        target, room.EagleDraft(target, model, 3), [1], 3, temperature=temperature,
        generator=g).tokens))  # fmt: skip
    truth = target_law(law, [1], 3)
    gap = max(abs(found.get(text, 0) - p) for text, p in truth.items())
    assert gap < CLOSE and sum(found.values()) == pytest.approx(1), f"off by {gap:.2g}"


# --- bad input


@pytest.mark.parametrize("change", [
    {"vocab_size": 7}, {"num_hidden_layers": 9}, {"hidden_size": 16}, {"rope_theta": 7.0},
])  # fmt: skip
def test_a_head_of_another_target_is_refused(room, change):
    """A head made for a target of another size is refused, and both sizes are shown."""
    target, model = pair(room, 0)
    model.config = replace(model.config, **change)
    (name, value), = change.items()
    with pytest.raises(ValueError, match=f"target.config=.*{name}={value}"):
        room.EagleDraft(target, model)


@pytest.mark.parametrize("B", [1, 0, -3])
def test_a_block_without_a_guess_is_refused(room, B):
    """A block size below 2 is refused: it would hold the anchor only."""
    target, model = pair(room, 0)
    with pytest.raises(ValueError, match=f"block_size={B} must be above 1"):
        room.EagleDraft(target, model, B)
