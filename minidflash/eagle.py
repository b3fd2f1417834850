"""Room 09 · eagle: a small autoregressive drafter that reads the target's features.

Uses   rooms 01, 02, 04, 08.    Gives  EagleModel and its training, EagleDraft.
Row i joins feature i with token i + 1, stands at position i, and predicts token i + 2.
Axes   R texts, S positions, N rows, W width, F = taps * W, V vocabulary, K keys.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from minidflash.attention import Attention, RMSNorm, rotary
from minidflash.cache import KVCache
from minidflash.qwen3 import DecoderLayer, Qwen3Config, causal_mask
from minidflash.speculate import Draft, Drafter


# exercise 9.1
def eagle_taps(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's layers: what ENTERS layers 2, L // 2 and L - 3. ValueError: fewer than 7 layers."""
    if num_layers < 7:
        raise ValueError(f"num_layers={num_layers} is too shallow: three different taps need 7")
    # What enters a layer left the one before: taps = (1, L // 2 - 1, L - 4)        (eq. 09.1)
    return 1, num_layers // 2 - 1, num_layers - 4


# exercise 9.2
def draft_vocabulary(counts: Int[Tensor, "V"], size: int) -> tuple[Tensor, Tensor]:
    """The `size` most frequent tokens, in order of id: d2t [size], t2d [V]. Ties: the lower id."""
    used = counts.sort(descending=True, stable=True).indices[:size].sort().values
    # token(j) = j + d2t_j,   t2d_v = [v is some token(j)]                         (eq. 09.2)
    return used - torch.arange(len(used)), torch.isin(torch.arange(len(counts)), used)


# exercise 9.3
def chain_mask(length: int, first: int, step: int) -> Bool[Tensor, "N K"]:
    """Chain n left at row first + n. Keys: `length` true rows, then a row of each chain a step."""
    n = torch.arange(length - first)[:, None]
    # sees(n, true row s) = [s <= first + n],   sees(n, a row of chain m) = [m = n]  (eq. 09.3)
    return torch.cat([torch.arange(length) <= first + n, n == n.flatten().repeat(step)], dim=1)


class EagleModel(DecoderLayer):
    """EAGLE-3's one layer, of the target's own sizes. `t2d` [V] says which tokens it can guess."""

    def __init__(self, config: Qwen3Config, taps: tuple[int, ...], t2d: Tensor | None = None):
        super().__init__(config)
        self.config, self.taps, W, eps = config, taps, config.hidden_size, config.rms_norm_eps
        self.fc: nn.Module = nn.Linear(len(taps) * W, W, bias=False)
        self.hidden_norm, self.norm = RMSNorm(W, eps), RMSNorm(W, eps)
        self.self_attn = Attention(replace(config, hidden_size=2 * W))  # reads 2 W, writes W:
        self.self_attn.o_proj = nn.Linear(self.self_attn.o_proj.in_features, W, bias=False)
        self.lm_head = None if t2d is None else nn.Linear(W, int(t2d.sum()), bias=False)
        self.t2d = nn.Buffer(torch.ones(config.vocab_size).bool() if t2d is None else t2d)

    # exercise 9.4
    def forward(self, g: Float[Tensor, "R N W"], e: Float[Tensor, "R N W"],  # type: ignore
                positions: Int[Tensor, "N"], store, mask=None) -> Float[Tensor, "R N W"]:
        """Features (fused, or own outputs) and embedded tokens to hidden rows; see room 02."""
        at, mask = positions.to(g.device), mask if mask is None else mask.to(g.device)
        cos, sin = rotary(at, self.config.head_dim, self.config.rope_theta, g.dtype)
        # x = [norm(g) ; norm(e)],   h = g + attention(x),   out = h + MLP(norm(h))   (eq. 09.4)
        x = torch.cat([self.hidden_norm(g), self.input_layernorm(e)], dim=-1)
        k, v = store(*self.self_attn.keys_values(x, cos, sin))
        h = g + self.self_attn.mix(self.self_attn.queries(x, cos, sin), k, v, mask)
        return h + self.mlp(self.post_attention_layernorm(h))

    def logits(self, hidden: Float[Tensor, "*N W"], head) -> Float[Tensor, "*N V"]:
        """By the target's head, or by an own, smaller one: then what t2d lacks is hopeless."""
        scores = (self.lm_head or head)(self.norm(hidden))
        wide = scores.new_full((*hidden.shape[:-1], len(self.t2d)), torch.finfo(scores.dtype).min)
        return wide.masked_scatter(self.t2d, scores) if self.lm_head else scores

    # exercise 9.5
    def unroll(self, embed, ids: Int[Tensor, "R S"], features, steps: int, first: int = 0):
        """EAGLE-3's training-time test: yields hidden rows, first [R S W], then [R S-first W]."""
        S, hidden, kept = ids.shape[1], self.fc(features), []
        def store(*kv):  # a cache that gradients pass through
            kept.append(kv)
            return [torch.cat(rows, dim=2) for rows in zip(*kept, strict=True)]
        for k in range(steps):
            # Row i of step k stands at i + k: its own last output joins the true next token.
            rows = torch.arange(first if k else 0, S)
            e, mask = embed(ids[:, (rows + k + 1).clamp(max=S - 1)]), chain_mask(S, int(rows[0]), k)
            # h_i^k = layer(h_i^{k-1}, e(token_{i+k+1})),   h_i^{-1} = fc(feature_i)  (eq. 09.5)
            yield (hidden := self(hidden[:, -len(rows) :], e, rows + k, store, mask))

    # exercise 9.6
    def loss(self, embed, head, ids, features, last, wanted, steps=7, decay=0.8, v=0.0, p=1.0):
        """Sums of w * loss and w, and counts; `last` [R S W] makes laws. EAGLE-1: 1, 1, 1, 0.1."""
        parts, first = [], max(0, int(wanted.any(0).int().argmax()) - steps - 1)
        for k, hidden in enumerate(self.unroll(embed, ids, features, steps, first)):
            # Row i of step k is asked for token i + k + 2: mask and law move along (case F9).
            valid = nn.functional.pad(wanted, (0, k + 2))[:, -hidden.shape[1] :]
            h, f = hidden[valid], last.roll(-k - 1, 1)[:, -valid.shape[1] :][valid]
            guess, truth = self.logits(h, head), head(f)
            # Where the target's favourite is no word of the draft there is nothing to learn.
            best, law = truth.argmax(-1), truth.masked_fill(~self.t2d, -torch.inf).softmax(-1)
            known = self.t2d[best]
            # l = v SmoothL1(h, f) + p H(law, guess),   w = decay^k                   (eq. 09.6)
            near = nn.functional.smooth_l1_loss(h, f, reduction="none").mean(-1)
            loss = v * near + p * nn.functional.cross_entropy(guess, law, reduction="none")
            n, right = known.sum(), (known & (guess.argmax(-1) == best)).sum()
            parts.append(torch.stack([decay**k * loss[known].sum(), decay**k * n, right, n]))
        total, weight, right, seen = torch.stack(parts, dim=1)
        return total.sum(), weight.sum().detach(), {"right": right.detach(), "seen": seen.detach()}


class EagleDraft(Drafter):
    """A chain of guesses, the argmax of each step: room 08's drafter, with a cache of its own."""

    def __init__(self, target, model: EagleModel, block_size: int = 8):
        if block_size < 2 or target.config != model.config:
            raise ValueError(f"{block_size=} must be above 1, and {target.config=} {model.config}")
        self.target, self.model, self.taps, self.block_size = target, model, model.taps, block_size

    def begin(self, capacity: int) -> None:  # noqa: D102
        c, w = self.model.config, self.model.hidden_norm.weight
        self.cache = KVCache(1, c.num_key_value_heads, c.head_dim, capacity, w.dtype, w.device)
        self.waiting = w.new_zeros(0, len(self.taps) * c.hidden_size)

    def step(self, hidden, tokens: Int[Tensor, "n"], positions, cache: KVCache, mask=None):
        """Add n rows to `cache`: hidden [n W], logits [n V]. Mask [n K]; without, all see all."""
        g, e = hidden[None], self.target.embed(tokens[None])
        hidden = self.model(g, e, positions, lambda k, v: cache.append(0, k, v), mask)[0]
        return hidden, self.model.logits(hidden, self.target.head)

    # exercise 9.7
    def commit(self, tokens: list[int], features: Float[Tensor, "n F"]) -> None:
        """Feature i waits for token i + 1; so the newest one waits for the next call."""
        features, start = torch.cat([self.waiting, features]), self.cache.length
        self.waiting, n = features[-1:], len(features) - 1
        after, at = torch.tensor(tokens[len(tokens) - n :]).long(), torch.arange(start, start + n)
        g, e = self.model.fc(features[:-1])[None], self.target.embed(after[None])
        self.model(g, e, at, lambda k, v: self.cache.append(0, k, v), causal_mask(n, start))

    # exercise 9.8
    def propose(self, anchor: int, count: int) -> Draft:
        """`count` guesses by `count` passes: each reads the guess and the output before it."""
        start, hidden, guesses = self.cache.length, self.model.fc(self.waiting), list[int]()
        while len(guesses) < count:
            # h_j, l_j = step(h_{j-1}, token_{j-1}),   token_j = argmax l_j          (eq. 09.7)
            token, at = torch.tensor(guesses[-1:] or [anchor]), torch.tensor([self.cache.length])
            hidden, logits = self.step(hidden, token, at, self.cache)
            guesses.append(int(logits.argmax()))
        # Rows that were fed with guesses do not stay (case C4).
        self.cache.truncate(start)
        return Draft(guesses)
