"""Room 10 · tree: many drafts that share beginnings, and one forward that checks them all."""

import math
import time

import pytest
import torch
from chance import assert_same_law, law_of, target_law
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import decoder, successor
from worlds import texts

from minidflash.greedy import greedy
from minidflash.speculate import speculate
from minidflash.verify import Draft

# Real models run here: fewer examples than elsewhere. They grow with the profile.
SOME = settings(max_examples=max(15, settings().max_examples // 2))
FEW = settings(max_examples=max(8, settings().max_examples // 6))


def exact(rows):
    return torch.tensor(rows, dtype=torch.float64)


def log(rows):
    return exact(rows).log()


def above(parents, node):
    """The nodes from the anchor down to this one, found by walking up."""
    found = [node]
    while parents[found[0]] >= 0:
        found.insert(0, parents[found[0]])
    return found


def all_parents(most=8):
    """Strategy: the parents of any tree, the anchor's -1 first."""
    steps = st.lists(st.integers(0, 99), max_size=most - 1)
    return steps.map(lambda xs: [-1, *(x % (i + 1) for i, x in enumerate(xs))])


def all_trees(vocab, most=8):
    """Strategy: (tokens, parents) of any tree; siblings may even hold the same token."""
    return all_parents(most).flatmap(lambda parents: st.tuples(
        st.lists(st.integers(0, vocab - 1), min_size=len(parents), max_size=len(parents)),
        st.just(parents)))  # fmt: skip


def from_paths(anchor, paths):
    """(tokens, parents) of the tree that holds these token paths, shared beginnings merged."""
    tokens, parents, place = [anchor], [-1], {(): 0}
    for path in paths:
        for i in range(len(path)):
            if tuple(path[: i + 1]) not in place:
                place[tuple(path[: i + 1])] = len(tokens)
                parents.append(place[tuple(path[:i])])
                tokens.append(path[i])
    return tokens, parents


# --- what a tree is


def test_a_tree_holds_one_chain_for_each_leaf(room):
    """The tree of parents -1 0 0 1 2 has the paths 0 1 3 and 0 2 4, and an anchor alone has one."""
    tree = room.Tree([7, 1, 2, 3, 4], [-1, 0, 0, 1, 2])
    assert tree.paths() == [[0, 1, 3], [0, 2, 4]]
    assert [tree.path(i) for i in range(5)] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    assert room.Tree([7], [-1]).paths() == [[0]]


# --- 10.1 who may look at whom


@pytest.mark.exercise("10.1")
def test_a_node_sees_itself_and_what_stands_above_it(room):
    """For the parents -1 0 0 1 2 the mask is the picture that one draws by hand."""
    found = room.ancestor_mask([-1, 0, 0, 1, 2])
    picture = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    assert found.dtype == torch.bool
    assert found.int().tolist() == picture, (
        "node 3 hangs below 1, so it sees 0, 1 and itself; node 2 is its uncle, and it never sees 2"
    )
    assert room.ancestor_mask([-1]).tolist() == [[True]], "the anchor alone sees itself"


@pytest.mark.exercise("10.1")
@given(parents=all_parents(12))
def test_the_mask_is_the_walk_to_the_anchor(room, parents):
    """Row i is True exactly at the nodes met on the way from node i up to the anchor."""
    found = room.ancestor_mask(parents).tolist()
    for i in range(len(parents)):
        seen = [j for j in range(len(parents)) if found[i][j]]
        assert seen == above(parents, i), f"node {i} of parents {parents} sees {seen}"


@pytest.mark.exercise("10.1")
@pytest.mark.parametrize("parents", [
    [], [0], [-1, 1], [-1, -1], [-1, 2, 0], [-1, 0, -2], [-1, 0, 3], [5],
])  # fmt: skip
def test_what_is_no_tree_is_refused(room, parents):
    """A second root, a parent that comes later, or no anchor at all is refused with the list."""
    with pytest.raises(ValueError) as error:
        room.ancestor_mask(parents)
    assert f"parents={parents}" in str(error.value)


# --- 10.2 growing

CONFIDENCE = {(): [0.6, 0.3, 0.1], (0,): [0.7, 0.2, 0.1], (1,): [0.9, 0.05, 0.05]}


def from_table(law, asked=None):
    """An opinion that knows a law for every prefix (the tokens below the anchor)."""

    def opinion(tree, nodes):
        if asked is not None:
            asked.append(list(nodes))
        paths = [above(tree.parents, node)[1:] for node in nodes]
        return log([law(tuple(tree.tokens[i] for i in path)) for path in paths])

    return opinion


def words(tree):
    """Every node as the tokens on its path, the anchor left out."""
    return [tuple(tree.tokens[i] for i in above(tree.parents, n)[1:])
            for n in range(len(tree.tokens))]  # fmt: skip


@pytest.mark.exercise("10.2")
def test_the_most_confident_paths_are_asked_again(room):
    """With A .6, B .3 and their followers .7 .2 and .9 .05 the third level hangs at A1 and B1."""
    asked = []
    opinion = from_table(lambda path: CONFIDENCE.get(path, [0.5, 0.3, 0.2]), asked)
    tree, scores = room.grow(9, opinion, 3, 2)
    assert words(tree)[:7] == [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    chances = [math.exp(score) for score in scores[:7]]
    assert chances == pytest.approx([1, 0.6, 0.3, 0.42, 0.12, 0.27, 0.015])
    assert asked == [[0], [1, 2], [3, 5]], (
        f"asked {asked}: of .42 .12 .27 .015 the best two are nodes 3 and 5, not node 4: "
        "confidence counts along the whole path"
    )
    assert len(tree.tokens) == len(tree.parents) == len(scores) == 1 + 2 + 4 + 4
    assert words(tree)[7:] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    assert tree.tokens[0] == 9 and tree.parents[0] == -1, "node 0 is the anchor"


def random_law(seed, vocab):
    """A law for every prefix, without ties."""

    def law(path):
        noise = torch.Generator().manual_seed(hash((seed, path)) % 2**31)
        return torch.rand(vocab, generator=noise, dtype=torch.float64).softmax(0).tolist()

    return law


@pytest.mark.exercise("10.2")
@given(seed=st.integers(0, 999), vocab=st.integers(2, 5), depth=st.integers(1, 4),
       width=st.integers(1, 4))  # fmt: skip
def test_every_level_holds_the_best_followers_of_the_best_nodes(room, seed, vocab, depth, width):
    """Every node of a level that is asked gets its best followers, each with log V of its path."""
    law, asked = random_law(seed, vocab), []
    tree, scores = room.grow(0, from_table(law, asked), depth, width)
    found = dict(zip(words(tree), scores, strict=True))
    assert len(found) == len(scores), "no path occurs twice"
    # By brute force: all followers of the frontier, level by level.
    due, frontier = {(): 0.0}, [()]
    for _ in range(depth):
        level = {}
        for path in frontier:
            best = sorted(((-c, x) for x, c in enumerate(law(path))))[:width]
            level |= {(*path, x): due[path] + math.log(-c) for c, x in best}
        due |= level
        frontier = sorted(level, key=lambda path: -level[path])[:width]
    assert set(found) == set(due), f"{sorted(found)} was thought of, {sorted(due)} is due"
    assert all(found[path] == pytest.approx(due[path]) for path in due)
    assert len(asked) == depth, f"{depth} levels are {depth} calls, {len(asked)} were made"
    assert all(p < i for i, p in enumerate(tree.parents)), "parents come first"
    depths = [len(path) for path in words(tree)]
    assert depths == sorted(depths), "nodes lie level by level"


@pytest.mark.exercise("10.2")
def test_no_depth_no_question(room):
    """At depth 0 the tree is the anchor, and nobody is asked."""
    asked = []
    tree, scores = room.grow(4, from_table(lambda path: [0.5, 0.5], asked), 0, 3)
    assert (tree.tokens, tree.parents, scores, asked) == ([4], [-1], [0.0], [])


@pytest.mark.exercise("10.2")
def test_a_node_that_gets_no_answer_is_not_passed_over(room):
    """Two nodes are asked on the second level; an opinion with one row for both is an error."""
    with pytest.raises(ValueError):
        room.grow(4, lambda tree, nodes: torch.tensor([[0.5, 0.5]]).log(), 2, 2)


@pytest.mark.exercise("10.2", "10.3")
def test_a_drafter_that_fills_slots_at_once_grows_a_tree_too(room):
    """From the marginals .6 .3 .1 and .7 .2 .1 the best four nodes are 0, 0 0, 1 and 1 0."""
    marginals = [[0.6, 0.3, 0.1], [0.7, 0.2, 0.1]]
    grown = room.grow(5, from_table(lambda path: marginals[len(path)]), 2, 3)
    tree = room.rerank(*grown, 4)
    assert set(words(tree)) == {(), (0,), (0, 0), (1,), (1, 0)}
    chance = {(): 1, (0,): 0.6, (0, 0): 0.42, (1,): 0.3, (1, 0): 0.21}
    assert sum(chance[w] for w in words(tree)) == pytest.approx(2.53), "1 + .6 + .42 + .3 + .21"


# --- 10.3 the best m


@pytest.mark.exercise("10.3")
def test_the_best_four_of_a_hand_made_tree(room):
    """Of A .6, B .3 and their followers .42 .12 .27 .015 the best four are .6 .42 .3 .27."""
    tree = room.Tree([9, 1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 1, 2, 2])
    scores = [math.log(v) for v in (1, 0.6, 0.3, 0.42, 0.12, 0.27, 0.015)]
    best = room.rerank(tree, scores, 4)
    assert best == ([9, 1, 2, 3, 5], [-1, 0, 0, 1, 2]), (
        "A, B, A1 and B1 stay, in their old order; B1's parent was node 2 and still is"
    )
    assert room.rerank(tree, scores, 2) == ([9, 1, 3], [-1, 0, 1]), ".6 and .42: A and A1, not B"
    assert room.rerank(tree, scores, 0) == ([9], [-1]), "the anchor always stays"
    shifted = room.rerank(room.Tree([9, 1, 2, 3], [-1, 0, 0, 2]), [0.0, -3.0, -1.0, -2.0], 2)
    assert shifted == ([9, 2, 3], [-1, 0, 1]), "without node 1, node 2 is number 1, 3's parent"
    assert room.rerank(tree, scores, 99) == tree, "no more than there is"
    assert len(tree.tokens) == 7, "the tree that was given is left alone"


@pytest.mark.exercise("10.3")
def test_of_equals_the_shallower_comes_first(room):
    """When a follower is certain it ties with its parent, and a shallower tie is kept before it."""
    tree = room.Tree([9, 1, 2, 3, 4], [-1, 0, 1, 0, 2])  # 2 hangs below 1, but 3 below the anchor
    half = math.log(0.5)
    scores = [0.0, half, half, half, half]
    assert room.rerank(tree, scores, 1).tokens == [9, 1]
    assert room.rerank(tree, scores, 2).tokens == [9, 1, 3], "nodes 1 and 3 have depth 1, 2 has 2"
    assert room.rerank(tree, scores, 3).tokens == [9, 1, 2, 3]


@pytest.mark.exercise("10.3")
@given(parents=all_parents(10), data=st.data())
def test_what_is_kept_hangs_together_and_is_the_best(room, parents, data):
    """The kept nodes are a tree, and no other choice of as many nodes has a higher sum of V."""
    size = len(parents)
    steps = data.draw(st.lists(st.sampled_from([0.0, -0.5, -1.0, -2.0]), min_size=size,
                               max_size=size), "log c")  # fmt: skip
    scores = [0.0]
    for i in range(1, size):
        scores.append(scores[parents[i]] + steps[i])
    count = data.draw(st.integers(0, size), "count")
    tree = room.Tree(list(range(size)), parents)  # every token is its node's old number
    kept = room.rerank(tree, scores, count)
    old = kept.tokens
    assert old[:1] == [0] and old == sorted(old) and len(old) == 1 + min(count, size - 1)
    for i in range(1, len(old)):
        assert old[kept.parents[i]] == parents[old[i]], (
            f"node {old[i]} hung below {parents[old[i]]}, and now below {old[kept.parents[i]]}"
        )
    best = sorted((math.exp(s) for s in scores[1:]), reverse=True)[:count]
    assert sum(math.exp(scores[i]) for i in old[1:]) == pytest.approx(sum(best))


# --- 10.4 one forward for all nodes


def filled(target, text, room_for=20):
    """A cache that holds this text."""
    cache = target.new_cache(len(text) + room_for)
    if text:
        target.forward(torch.tensor([text]), cache)
    return cache


@pytest.mark.exercise("10.4")
@SOME
@given(seed=st.integers(0, 99), text=texts(6, 0, 4), drawn=all_trees(6))
def test_every_node_answers_as_if_its_path_alone_had_been_fed(room, seed, text, drawn):
    """Logits and features of every node equal a plain run over the text and that node's path."""
    # case D4
    target, taps = decoder(seed, layers=3), (0, 2)
    tree = room.Tree(*drawn)
    logits, features = room.forward_tree(target, tree, filled(target, text), taps)
    assert logits.shape == (len(tree.tokens), 6) and features.shape == (len(tree.tokens), 16)
    for node in range(len(tree.tokens)):
        path = above(tree.parents, node)
        line = torch.tensor([[*text, *(tree.tokens[i] for i in path)]])
        want, seen = target.forward(line, taps=taps)
        gap = float((logits[node] - want[0, -1]).abs().max().detach())
        assert gap < 1e-5, (
            f"node {node} of parents {tree.parents} is off by {gap:.2g}: it stands at position "
            f"{len(text) + len(path) - 1} and sees the text and the nodes {path}"
        )
        assert torch.allclose(features[node], seen[0, -1], atol=1e-5), f"features of node {node}"


@pytest.mark.exercise("10.4")
def test_a_node_stands_at_its_depth_not_at_its_number(room):
    """Of the anchor, two children and a grandchild, the grandchild's key is turned to place 2."""
    # case D4: depths 0 1 1 2
    target = decoder(1, layers=1)
    cache = filled(target, [3, 1])
    room.forward_tree(target, room.Tree([4, 1, 2, 5], [-1, 0, 0, 1]), cache)
    straight = filled(target, [3, 1, 4, 1, 5])
    assert torch.allclose(cache.keys[0, :, :, 5], straight.keys[0, :, :, 4], atol=1e-6), (
        "node 3 is the second below the anchor: in one layer its key depends on token and position"
    )
    assert torch.allclose(cache.values[0, :, :, 5], straight.values[0, :, :, 4], atol=1e-6)


@pytest.mark.exercise("10.4")
def test_a_tree_is_one_pass_and_leaves_one_row_per_node(room):
    """Seven nodes pass each layer once, together, and their seven rows are in the cache."""
    target, passes = decoder(2, layers=2), []
    for layer in target.model.layers:
        layer.register_forward_hook(lambda _, args, out: passes.append(args[0].shape[1]))
    cache = target.new_cache(20)
    target.forward(torch.tensor([[1, 2, 3]]), cache)
    passes.clear()
    tree = room.Tree([4, 0, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 1, 2, 2])
    logits, features = room.forward_tree(target, tree, cache)
    assert passes == [7, 7], f"the two layers were called with {passes} rows; 7 each, once, are due"
    assert cache.length == 3 + 7 and features.shape == (7, 0)


@pytest.mark.exercise("10.4")
def test_a_chain_is_a_tree(room):
    """A tree without branches gives what the plain forward gives."""
    target = decoder(3, layers=3)
    want, seen = target.forward(torch.tensor([[2, 4, 1, 3]]), filled(target, [5, 0]), (1,))
    tree = room.Tree([2, 4, 1, 3], [-1, 0, 1, 2])
    logits, features = room.forward_tree(target, tree, filled(target, [5, 0]), (1,))
    assert torch.allclose(logits, want[0], atol=1e-6)
    assert torch.allclose(features, seen[0], atol=1e-6)


# --- 10.5 what survives


def best_is(choices, vocab=10):
    """Logits whose argmax in row i is choices[i], without ties."""
    steps = [[-float((v - best) % vocab) for v in range(vocab)] for best in choices]
    return exact(steps)


@pytest.mark.exercise("10.5")
def test_at_temperature_zero_the_argmax_child_survives(room):
    """Below the anchor hang 3, 5 and 8; the target says 5, then 2, and nothing else survives."""
    # case D8: siblings cannot change the text
    tree = room.Tree([1, 3, 5, 8, 2, 2, 6], [-1, 0, 0, 0, 1, 2, 5])
    #  target's choice after: 1  3  5  8  2  2  6
    logits = best_is([5, 2, 2, 2, 4, 7, 9])
    assert room.verify_tree(tree, logits, 0.0) == ([0, 2, 5], 7), (
        "the anchor's row says 5, which is node 2; its row says 2, which is node 5 and not node 4; "
        "node 5's row says 7, which nobody guessed: the bonus"
    )
    assert room.verify_tree(tree, best_is([4, 2, 2, 2, 4, 7, 9]), 0.0) == ([0], 4)
    assert room.verify_tree(tree, best_is([5, 2, 2, 2, 4, 6, 9]), 0.0) == ([0, 2, 5, 6], 9)
    assert room.verify_tree(room.Tree([1], [-1]), best_is([6]), 0.0) == ([0], 6)


@pytest.mark.exercise("10.5")
@given(drawn=all_trees(3, 10), seed=st.integers(0, 10**6))
def test_at_temperature_zero_the_longest_right_path_is_kept(room, drawn, seed):
    """The kept path is the longest on which every token is the argmax of the row above it."""
    tree = room.Tree(*drawn)
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(tree.tokens), 3, dtype=torch.float64, generator=noise)
    choice = [row.index(max(row)) for row in logits.tolist()]
    right = []  # every path on which the target agrees, as tokens
    for node in range(len(tree.tokens)):
        path = above(tree.parents, node)
        if all(tree.tokens[b] == choice[a] for a, b in zip(path, path[1:], strict=False)):
            right.append(path)
    path, bonus = room.verify_tree(tree, logits, 0.0)
    assert path in right, f"{path} was kept; the target agrees with {right}"
    # Where siblings hold one token twice, the first of them is taken, and its children only.
    if len({(tree.parents[i], tree.tokens[i]) for i in range(len(choice))}) == len(choice):
        assert len(path) == max(map(len, right)), f"{path} was kept; longer is among {right}"
    assert bonus == choice[path[-1]] and type(bonus) is int


@pytest.mark.exercise("10.5")
def test_siblings_are_asked_in_order_by_hand(room):
    """For p = .5 .3 .2 and the children 1, 0 the first is kept with .3, the second with .5."""
    tree = room.Tree([2, 1, 0], [-1, 0, 0])
    rows = log([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6]])
    law = law_of(lambda g: (lambda v: (tuple(v[0]), v[1]))(room.verify_tree(tree, rows, 1.0, g)))
    after = {end: sum(w for (path, _), w in law.items() if path[-1] == end) for end in (0, 1, 2)}
    assert after[1] == pytest.approx(0.3), "node 1 holds token 1, whose probability is .3"
    assert after[2] == pytest.approx(0.5), "after that p is .714 0 .286, and .7 * .714 = .5"
    assert law[((0,), 2)] == pytest.approx(0.2), "both rejected: only token 2 is left for the bonus"
    assert [law[((0, 1), t)] for t in range(3)] == pytest.approx([0.03, 0.03, 0.24])


def node_law(tree, rows, temperature=1.0):
    """The truth: draw from the target node by node, go down while a child holds what was drawn."""
    laws = (rows / temperature).softmax(-1).tolist()
    children = [[i for i, p in enumerate(tree.parents) if p == n] for n in range(len(rows))]
    law, todo = {}, [((0,), 1.0)]
    while todo:
        path, weight = todo.pop()
        for token, chance in enumerate(laws[path[-1]]):
            here = [i for i in children[path[-1]] if tree.tokens[i] == token]
            if here:
                todo.append(((*path, here[0]), weight * chance))
            elif chance > 0:
                law[path, token] = law.get((path, token), 0.0) + weight * chance
    return law


@pytest.mark.exercise("10.5")
@given(drawn=all_trees(3, 6), seed=st.integers(0, 10**6), temperature=st.sampled_from([0.7, 1, 2]))
def test_the_walk_has_the_law_of_drawing_token_by_token(room, drawn, seed, temperature):
    """Every path and bonus come with the probability that plain sampling would give them."""
    tree = room.Tree(*drawn)
    noise = torch.Generator().manual_seed(seed)
    rows = torch.randn(len(tree.tokens), 3, dtype=torch.float64, generator=noise)
    if seed % 3 == 0:  # some tokens are impossible
        rows[:, seed % 2] = -math.inf
    found = law_of(lambda g: (lambda v: (tuple(v[0]), v[1]))(
        room.verify_tree(tree, rows, temperature, g)))  # fmt: skip
    found = {key: chance for key, chance in found.items() if chance > 1e-12}
    truth = {key: chance for key, chance in node_law(tree, rows, temperature).items() if chance > 0}
    assert_same_law(found, truth, f"the walk down {tree}")


@pytest.mark.exercise("10.5")
@pytest.mark.parametrize("paths", [
    [], [[0]], [[1], [0]], [[0, 1], [1, 0]], [[2, 2], [2, 0], [0]], [[0, 0], [0, 1], [0, 2], [1]],
])  # fmt: skip
def test_the_text_has_the_targets_law_whatever_the_tree(room, paths):
    """Path, bonus and what the target writes after them have the target's law, token for token."""
    law = random_law(7, 3)
    tree = room.Tree(*from_paths(0, paths))
    rows = log([law(path) for path in words(tree)])

    def play(g):
        path, bonus = room.verify_tree(tree, rows, 1.0, g)
        return (*(tree.tokens[i] for i in path[1:]), bonus)

    found = {}
    for written, chance in law_of(play).items():
        for rest, more in target_law(lambda p: law(tuple(p)), [*written], 3 - len(written)).items():
            found[written + rest] = found.get(written + rest, 0.0) + chance * more
    assert_same_law(found, target_law(lambda p: law(tuple(p)), [], 3), f"the tree of {paths}")


def test_without_renormalising_the_law_would_bend():
    """Asking the second sibling with the old p turns .5 .3 .2 into .35 .3 .35, which shows here."""
    p = [0.5, 0.3, 0.2]

    def play(g):
        for x in (1, 0):
            if torch.bernoulli(exact(p[x]), generator=g):
                return x
        return 2

    law = law_of(play)
    assert [law[t] for t in range(3)] == pytest.approx([0.35, 0.3, 0.35])


@pytest.mark.exercise("10.5")
@pytest.mark.parametrize("tokens, shape", [
    ([1, 2, 0], (2, 5)), ([1, 2, 0], (4, 5)), ([1, 5, 0], (3, 5)), ([1, 2, -1], (3, 5)),
])  # fmt: skip
def test_logits_that_do_not_fit_the_tree_are_refused(room, tokens, shape):
    """Logits for another number of nodes, or a token outside the vocabulary, are refused."""
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError) as error:
            room.verify_tree(room.Tree(tokens, [-1, 0, 0]), torch.zeros(shape), temperature)
        assert str(shape) in str(error.value) and str(tokens) in str(error.value)


# --- 10.6 keeping a path


def numbered_cache(rows=10):
    """Two layers; row r of layer l holds 100 l + r as its key, and the negative as its value."""
    cache = decoder(0, layers=2).new_cache(rows + 3)
    for layer in range(2):
        k = (100.0 * layer + torch.arange(rows, dtype=torch.float64)).view(1, 1, rows, 1)
        cache.append(layer, k.expand(1, 1, rows, 4), -k.expand(1, 1, rows, 4))
    return cache


@pytest.mark.exercise("10.6")
@pytest.mark.parametrize("path, rows", [
    ([0, 2, 5], [4, 6, 9]), ([0], [4]), ([0, 1, 2], [4, 5, 6]), ([0, 3, 4, 5], [4, 7, 8, 9]),
])  # fmt: skip
def test_a_path_moves_together_and_the_rest_is_forgotten(room, path, rows):
    """With four settled rows and six nodes, a path's rows follow the settled ones, in order."""
    cache = numbered_cache()
    room.keep_path(cache, 4, path)
    assert cache.length == 4 + len(path) and cache.lengths == [4 + len(path)] * 2
    for layer in range(2):
        keys = cache.keys[layer, 0, 0, : cache.length, 0].tolist()
        due = [100.0 * layer + r for r in [0, 1, 2, 3, *rows]]
        assert keys == due, f"layer {layer} holds the rows {keys}, due are {due}"
        values = cache.values[layer, 0, 0, : cache.length, 3].tolist()
        assert values == [-x for x in due], f"values of layer {layer}"


@pytest.mark.exercise("10.4", "10.6")
@SOME
@given(seed=st.integers(0, 99), text=texts(6, 1, 4), drawn=all_trees(6), pick=st.integers(0, 99))
def test_the_cache_equals_a_linear_run_of_the_kept_path(room, seed, text, drawn, pick):
    """After a tree and the choice of a path the cache is that of the text with the path fed."""
    target, tree = decoder(seed, layers=2), room.Tree(*drawn)
    cache = filled(target, text)
    room.forward_tree(target, tree, cache)
    path = above(tree.parents, pick % len(tree.tokens))
    room.keep_path(cache, len(text), path)
    line = [*text, *(tree.tokens[i] for i in path)]
    fresh = filled(target, line)
    assert cache.length == len(line)
    for name in ("keys", "values"):
        mine, due = (getattr(c, name)[:, :, :, : len(line)] for c in (cache, fresh))
        assert torch.allclose(mine, due, atol=1e-6), f"stale {name}: path {path} of {tree.parents}"
    after, want = (target.forward(torch.tensor([[1, 2]]), c)[0] for c in (cache, fresh))
    assert torch.allclose(after, want, atol=1e-5), "and what comes after it is the same"


# --- 10.7 the loop


class Scripted:
    """A tree drafter whose tree is a function of the text so far; it checks what it is told."""

    def __init__(self, target, make, nodes=12, taps=()):
        self.target, self.make, self.nodes, self.taps = target, make, nodes, taps

    def begin(self, capacity):
        self.text, self.commits, self.asked, self.capacity = [], [], [], capacity

    def commit(self, tokens, features):
        self.text += tokens
        self.commits.append(len(tokens))
        assert features.shape[0] == len(tokens), f"{len(tokens)} tokens, {len(features)} features"
        if self.taps:
            _, due = self.target.forward(torch.tensor([self.text]), taps=self.taps)
            gap = float((features - due[0, -len(tokens) :]).abs().max().detach())
            assert gap < 1e-5, f"the features of {tokens} after {self.text} are off by {gap:.2g}"

    def propose_tree(self, anchor, depth):
        self.asked.append(depth)
        tokens, parents = self.make([*self.text, anchor], depth)
        return self.room.Tree(tokens, parents)


def with_room(room, drafter):
    drafter.room = room
    return drafter


def count_passes(target):
    """A list that gets the number of rows of every pass of the target from now on."""
    passes = []
    target.model.layers[0].register_forward_hook(lambda _, a, out: passes.append(a[0].shape[1]))
    return passes


def say(run):
    rounds = [(r.proposed, r.accepted, r.emitted) for r in run.rounds]
    return f"tokens {run.tokens}, rounds {rounds}"


@pytest.mark.exercise("10.7")
def test_three_rounds_by_hand(room):
    """Where token t is followed by t + 1, trees that are right 2, 0 and 1 deep are recorded so."""
    target, _ = successor([1, 2, 3, 4, 5, 6, 7, 0])
    trees = iter([
        ([1, 5, 2, 0, 3], [-1, 0, 0, 1, 2]),  # 2 and 3 are right, on nodes 2 and 4
        ([4, 0, 1], [-1, 0, 0]),  # 5 is not among them
        ([5, 2, 6], [-1, 0, 0]),  # 6 is
    ])
    drafter = with_room(room, Scripted(target, lambda text, depth: next(trees), taps=(1,)))
    run = room.speculate_tree(target, drafter, [0], 7)
    assert run.tokens == [1, 2, 3, 4, 5, 6, 7] and run.stop == "length", say(run)
    assert [(r.proposed, r.accepted, r.emitted) for r in run.rounds] == [
        ([2, 3, 5, 0], 2, [2, 3, 4]),  # the kept path comes first
        ([0, 1], 0, [5]),
        ([6, 2], 1, [6, 7]),
    ], say(run)
    assert drafter.commits == [1, 3, 1, 2], "the prompt, then each anchor with its kept guesses"
    assert drafter.asked == [5, 2, 1], "so many guesses in a row are of use: the bonus comes after"
    assert run.target_forwards == 4 and run.acceptance_length == pytest.approx(2.0)


@pytest.mark.exercise("10.7")
@SOME
@given(data=st.data())
def test_any_trees_any_request_the_output_is_greedy(room, data):
    """Random targets, trees, prompts, budgets and stops give greedy's tokens, a forward a round."""
    vocab = data.draw(st.integers(2, 6), "vocabulary")
    prompt, stop = data.draw(texts(vocab, 1, 4), "prompt"), data.draw(texts(vocab, 0, 2), "stops")
    n, taps = data.draw(st.integers(0, 12), "budget"), data.draw(st.sampled_from([(), (0, 1)]))
    target = decoder(data.draw(st.integers(0, 999), "weights"), vocab, layers=2)
    plain = greedy(target, prompt, n, stop)
    truth = [*prompt, *greedy(target, prompt, n)]

    def make(text, depth):
        tokens, parents = data.draw(all_trees(vocab, 7), "tree")
        right = data.draw(st.integers(0, 3), "of the truth")  # a right path beside the others
        line = truth[len(text) : len(text) + right]
        first = len(parents)
        return ([text[-1], *tokens[1:], *line],
                [*parents, *([0] + list(range(first, first + 9)))[: len(line)]])

    passes = count_passes(target)
    drafter = with_room(room, Scripted(target, make, 12, taps))
    run = room.speculate_tree(target, drafter, prompt, n, stop)
    assert run.tokens == plain, f"greedy writes {plain}; {say(run)}"
    assert run.stop == ("stop" if plain and plain[-1] in stop else "length")
    told = len(drafter.commits) if taps and n else 0  # this spec's own passes, to check features
    assert len(passes) - told == run.target_forwards == (1 + len(run.rounds) if n else 0)
    assert sum([r.emitted for r in run.rounds], run.tokens[:1]) == run.tokens, say(run)
    for i, r in enumerate(run.rounds):
        assert r.emitted[: r.accepted] == r.proposed[: r.accepted], f"round {i}: {say(run)}"
        last = i == len(run.rounds) - 1
        assert len(r.emitted) in ((r.accepted, r.accepted + 1) if last else (r.accepted + 1,))


@pytest.mark.exercise("10.7")
@SOME
@given(data=st.data())
def test_a_tree_that_holds_the_greedy_path_keeps_it(room, data):
    """Wherever the greedy path of depth d stands in a tree, at least d guesses are accepted."""
    target = decoder(data.draw(st.integers(0, 999), "weights"), layers=2)
    prompt, n = data.draw(texts(6, 1, 3), "prompt"), data.draw(st.integers(1, 10), "budget")
    truth, held = [*prompt, *greedy(target, prompt, n)], []

    def make(text, depth):
        d = data.draw(st.integers(0, depth), "d")
        right = truth[len(text) : len(text) + d]
        wrong = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=3), "others")
        paths = data.draw(st.permutations([right, *wrong]), "order")
        held.append(d)
        return from_paths(text[-1], paths)

    run = room.speculate_tree(target, with_room(room, Scripted(target, make, 99)), prompt, n)
    for d, r in zip(held, run.rounds, strict=True):
        assert r.accepted >= d, f"a path of {d} right guesses was there, {r.accepted} were kept"
    assert run.tokens == truth[len(prompt) :]


@pytest.mark.exercise("10.7")
@pytest.mark.parametrize("n", [1, 2, 5, 9, 10])
@pytest.mark.parametrize("d", [0, 1, 3])
def test_the_depth_of_right_trees_sets_the_amount_of_work(room, n, d):
    """With the right path d deep in each tree n tokens need 1 + ceil((n-1)/(d+1)) forwards."""
    target, _ = successor([1, 2, 3, 4, 5, 6, 7, 0])

    def make(text, depth):
        right = [(text[-1] + 1 + i) % 8 for i in range(d)]
        return from_paths(text[-1], [[(text[-1] + 3) % 8, 2], right, [x for x in right[:1]]])

    passes = count_passes(target)
    drafter = with_room(room, Scripted(target, make))
    run = room.speculate_tree(target, drafter, [7], n)
    assert run.tokens == [i % 8 for i in range(n)]
    due = 1 + math.ceil((n - 1) / (d + 1))
    assert len(passes) == run.target_forwards == due, f"{len(passes)} forwards, {due} are due"


class Chain(Scripted):
    """A drafter for both loops: the same guesses as a chain, or as a tree without branches."""

    block_size = 4

    def propose(self, anchor, count):
        self.asked.append(count)
        return Draft(self.make([*self.text, anchor], count)[:count])

    def propose_tree(self, anchor, depth):
        guesses = self.propose(anchor, min(depth, self.block_size - 1)).tokens
        return self.room.Tree([anchor, *guesses], list(range(-1, len(guesses))))


@pytest.mark.exercise("10.7")
@FEW
@given(seed=st.integers(0, 99), prompt=texts(6, 1, 3), n=st.integers(1, 12))
def test_chains_give_the_records_of_the_plain_loop(room, seed, prompt, n):
    """A drafter of unbranched trees leaves exactly the records that room 08's loop would leave."""
    target = decoder(seed, layers=2)
    truth = [*prompt, *greedy(target, prompt, n)]

    def make(text, count):  # right, right, wrong, in turn
        return [(x + (i + len(text)) % 3 // 2) % 6 for i, x in enumerate(truth[len(text) :])]

    runs = [loop(target, with_room(room, Chain(target, make, 4)), prompt, n)
            for loop in (speculate, room.speculate_tree)]
    plain, mine = ([tuple(r)[:3] for r in run.rounds] for run in runs)
    assert mine == plain, f"{say(runs[1])}; room 08: {say(runs[0])}"
    assert (runs[1].tokens, runs[1].stop) == (runs[0].tokens, runs[0].stop)


@pytest.mark.exercise("10.7")
def test_the_cache_holds_the_settled_text_and_nothing_else(room):
    """After every round the cache is as long as the text without its newest token, and as clean."""
    target, prompt = decoder(3, layers=2), [1, 2]
    truth = [*prompt, *greedy(target, prompt, 9)]

    def make(text, depth):
        right = truth[len(text) : len(text) + min(depth, len(text) % 3)]
        return from_paths(text[-1], [[0, 1], [5, 5, 5], right])

    lengths = []
    drafter = with_room(room, Scripted(target, make))
    run = room.speculate_tree(target, drafter, prompt, 9,
                              on_round=lambda r: lengths.append(target.cache.length))  # fmt: skip
    assert len(lengths) == len(run.rounds), "on_round is called once for every round"
    written = [1 + sum(len(r.emitted) for r in run.rounds[: i + 1]) for i in range(len(lengths))]
    assert lengths == [len(prompt) + w - 1 for w in written], "all but the newest token are cached"
    used, settled = target.cache, [*prompt, *run.tokens[:-1]]
    fresh = filled(target, settled)
    for name in ("keys", "values"):
        mine, due = (getattr(c, name)[:, :, :, : len(settled)] for c in (used, fresh))
        assert torch.allclose(mine, due, atol=1e-6), f"stale {name} in the cache"


@pytest.mark.exercise("10.7")
@pytest.mark.parametrize("place", range(7))
def test_a_stop_token_ends_the_output_wherever_it_stands(room, place):
    """A stop token first, inside a path or as the bonus is written and is the last."""
    target, _ = successor([1, 2, 3, 4, 5, 6, 7, 0])
    right = Scripted(target, lambda text, d: from_paths(text[-1], [[text[-1] + 1, text[-1] + 2]]))
    run = room.speculate_tree(target, with_room(room, right), [0], 7, stop_ids=[place + 1])
    assert run.tokens == list(range(1, place + 2)) and run.stop == "stop", say(run)
    assert sum([r.emitted for r in run.rounds], run.tokens[:1]) == run.tokens, "the records too"
    assert all(r.accepted <= len(r.emitted) for r in run.rounds), say(run)


@pytest.mark.exercise("10.7")
def test_a_request_without_a_budget_costs_nothing(room):
    """Nothing is fed for a budget of 0, and a bad request is refused before any work."""
    target = decoder(0, layers=2)
    passes = count_passes(target)
    drafter = with_room(room, Scripted(target, lambda text, depth: ([text[-1]], [-1])))
    assert room.speculate_tree(target, drafter, [1], 0).tokens == []
    for prompt, n, temperature, message in (
        ([], 3, 0.0, "is empty"), ([9], 3, 0.0, "prompt holds 9"), ([1], -1, 0.0, "max_new_tokens"),
        ([1], 3, -1.0, "temperature"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            room.speculate_tree(target, drafter, prompt, n, (), temperature)
    assert passes == [], "work for nothing"


@pytest.mark.exercise("10.7")
@pytest.mark.parametrize("tokens, message", [
    ([1, 2, 3, 4], "at most 3 nodes"), ([2, 1], r"the first is the anchor, 1"),
])  # fmt: skip
def test_a_tree_that_breaks_its_promise_is_refused(room, tokens, message):
    """A tree with more nodes than were promised, or one that hangs at no anchor, is refused."""
    target, _ = successor([1, 2, 3, 4, 5, 6, 7, 0])
    parents = [-1] + [0] * (len(tokens) - 1)
    drafter = with_room(room, Scripted(target, lambda text, depth: (tokens, parents), 3))
    with pytest.raises(ValueError, match=message):
        room.speculate_tree(target, drafter, [0], 5)


@pytest.mark.exercise("10.7")
@pytest.mark.parametrize("paths", [[], [[1], [0]], [[0, 1], [0, 2], [2]], [[2, 2], [1, 0]]])
def test_above_zero_the_text_has_the_targets_law(room, paths):
    """With dice, three tokens come with exactly the probabilities of plain sampling."""
    target = decoder(5, 3, layers=1)
    generators = []

    def play(generator):
        generators.append(generator)
        drafter = Scripted(target, lambda text, depth: from_paths(text[-1], paths))
        run = room.speculate_tree(target, with_room(room, drafter), [1], 3, (), 0.7, generator)
        return tuple(run.tokens)

    def law(prefix):
        logits, _ = target.forward(torch.tensor([prefix]))
        return (logits[0, -1].double() / 0.7).softmax(-1).tolist()

    truth = {}
    for tokens, chance in target_law(lambda prefix: law(prefix), [1], 3).items():
        truth[tokens] = chance
    assert_same_law(law_of(play), truth, f"trees of {paths}")


@pytest.mark.exercise("10.7")
def test_the_same_seed_gives_the_same_text(room):
    """A generator decides a sampled text, and at temperature 0 none is needed."""
    target = decoder(6, layers=2)

    def once(seed):
        dice = torch.Generator().manual_seed(seed)
        drafter = Scripted(target, lambda text, depth: from_paths(text[-1], [[0, 1], [2], [3, 3]]))
        return room.speculate_tree(target, with_room(room, drafter), [1], 20, (), 1.0, dice).tokens

    assert once(1) == once(1)
    assert len({tuple(once(seed)) for seed in range(4)}) > 1


@pytest.mark.exercise("10.7")
def test_seconds_go_to_whoever_spent_them(room):
    """Proposing and committing are the drafter's seconds, the forward and the walk the target's."""
    target, _ = successor([1, 2, 3, 4, 5, 6, 7, 0])

    class Slow(Scripted):
        def commit(self, tokens, features):
            time.sleep(0.004)
            super().commit(tokens, features)

        def propose_tree(self, anchor, depth):
            time.sleep(0.008)
            return super().propose_tree(anchor, depth)

    drafter = with_room(room, Slow(target, lambda text, d: from_paths(text[-1], [[text[-1] + 1]])))
    run, slept = room.speculate_tree(target, drafter, [0], 3), []
    assert all(r.draft_seconds >= 0.012 for r in run.rounds), f"the drafter slept 12 ms: {run}"
    hook = target.model.layers[0].register_forward_hook(lambda *_: slept.append(time.sleep(0.012)))
    quick = with_room(room, Scripted(target, lambda text, d: from_paths(text[-1], [[2]])))
    begun = time.perf_counter()
    run = room.speculate_tree(target, quick, [0], 3)
    elapsed = time.perf_counter() - begun
    hook.remove()
    assert all(r.verify_seconds >= 0.012 for r in run.rounds), f"the target slept 12 ms: {run}"
    busy = sum(r.draft_seconds + r.verify_seconds for r in run.rounds)
    assert run.prefill_seconds >= 0.012
    assert run.prefill_seconds + busy <= run.seconds <= elapsed
