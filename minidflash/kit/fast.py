"""DFlash decoding with less to launch and one look at the device per round. Greedy.

Room 16 says what is computed; this says it again with fewer, larger steps, and equals it:

- the context's keys and values of ALL layers come from one matrix product, one norm, one rotation
  and one copy, instead of two products, a norm, a rotation and two copies per layer;
- guesses stay on the device until the target has judged them. The host reads once per round: how
  many were accepted, and the tokens;
- the head gets B contiguous rows of a 2-D matrix, the anchor's too, whose result is dropped. A view
  of B - 1 rows can be slower than all B (on one CPU 51 ms against 21, float32, one thread);
- the layers of both models have their products put together (kit/fused.py).

On the shipped pair a commit is 47 torch operations instead of 196, a draft 351 instead of 443, a
target's forward of 16 rows 1690 instead of 2190. On a GPU each launch costs some microseconds of
the host's time whatever it computes, and each read waits for everything launched before it. What it
gains on a CPU stands in docs/results/oracle.json; on a GPU it is not measured yet.
"""

import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minidflash.attention import rotate
from minidflash.cache import CachedQwen3
from minidflash.dflash import DFlashDrafter
from minidflash.drafter import KV, DraftModel
from minidflash.features import fuse
from minidflash.greedy import check_request, trim
from minidflash.kit.fused import FusedLayer, FusedTarget
from minidflash.kit.outside import Outside
from minidflash.kit.published import drafter_for
from minidflash.speculate import Generation, NoDrafter, Round, speculate


class FastDrafter(DFlashDrafter):
    """Room 16's drafter whose layers' key and value weights lie in one matrix.

    The matrix is a copy: 2 * layers * kv_heads * head_dim * hidden_size numbers more.

    Raises:
        ValueError: see room 16.
    """

    def __init__(self, target: Any, model: DraftModel, block_size: int | None = None):
        plain = drafter_for(target, model, block_size)
        super().__init__(target, model, block_size)
        self.target, attentions = plain.target, [layer.self_attn for layer in model.layers]
        parts = [a.k_proj for a in attentions] + [a.v_proj for a in attentions]
        self.weight = torch.cat([p.weight for p in parts]).detach()
        self.bias = None if parts[0].bias is None else torch.cat([p.bias for p in parts]).detach()
        self.k_norm = torch.stack([a.k_norm.weight for a in attentions])[:, None].detach()  # L 1 D
        # Windows, scales and causal layers are left to the model that knows them.
        fusible = type(model) is DraftModel
        self.layers = [FusedLayer(layer) for layer in model.layers] if fusible else []

    def keys_values(
        self, features: Float[Tensor, "n F"], start: int
    ) -> tuple[Float[Tensor, "L G n D"], Float[Tensor, "L G n D"]]:
        """Keys and values of every layer for positions start, start + 1, ..."""
        c, model = self.model.config, self.model
        fused = fuse(features, model.fc, model.hidden_norm)
        # [n C] x [C, 2 L G D]: one product for all layers, keys first, then values.
        flat = torch.nn.functional.linear(fused, self.weight, self.bias)
        rows = flat.view(len(fused), 2, c.num_hidden_layers, c.num_key_value_heads, c.head_dim)
        k, v = rows.permute(1, 2, 3, 0, 4)  # L G n D each
        wide = k.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps)
        at = torch.arange(start, start + len(fused), device=fused.device)
        cos, sin = model.angles(at, fused.dtype)
        return rotate(self.k_norm[:, :, None] * wide.to(k.dtype), cos, sin), v

    def commit(self, tokens: list[int], features: Float[Tensor, "n F"]) -> None:
        """Take in settled positions, all layers at once."""
        start, end = self.cache.length, self.cache.length + len(features)
        if end > self.cache.capacity:
            raise ValueError(f"cache of capacity {self.cache.capacity} cannot hold {end} positions")
        k, v = self.keys_values(features, start)
        self.cache.keys[:, 0, :, start:end] = k
        self.cache.values[:, 0, :, start:end] = v
        self.cache.lengths = [end] * self.model.config.num_hidden_layers

    def guess(self, block: Int[Tensor, "1 B"]) -> Int[Tensor, "guesses"]:
        """The argmax of slots 1 .. B-1, left on the device. `block` is the anchor, then masks."""
        start, B = self.cache.length, block.shape[1]
        at = torch.arange(start, start + B, device=self.cache.keys.device)
        context = [(self.cache.keys[i, :, :, :start], self.cache.values[i, :, :, :start])
                   for i in range(len(self.model.layers))]
        x = self.target.embed(block)
        if self.layers:
            cos, sin = self.model.angles(at, x.dtype)
            for layer, held in zip(self.layers, context, strict=True):
                x = layer(x, cos, sin, None, partial(joined, held))
            hidden = self.model.norm(x)
        else:
            hidden = self.model(x, at, context)
        return self.target.head(hidden[0]).argmax(-1)[1:]


def joined(held: KV, k: Float[Tensor, "R G Q D"], v: Float[Tensor, "R G Q D"]) -> KV:
    """Keys and values of the context, then those of the block (eq. 12.2)."""
    # K = [K_ctx ; K_block],  V = [V_ctx ; V_block]
    return torch.cat([held[0], k], dim=2), torch.cat([held[1], v], dim=2)


@torch.no_grad()
def generate(
    target: Any, drafter: FastDrafter, prompt: Sequence[int], max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> Generation:
    """Room 08's loop for this drafter at temperature 0: the same tokens, the same rounds.

    A round's draft and verification are launched one behind the other, so only their sum can be
    timed: it stands in `verify_seconds`.

    Raises:
        ValueError: see room 03's `check_request`.
    """
    check_request(target, prompt, max_new_tokens, stop_ids)
    clock, begin, out = time.perf_counter, time.perf_counter(), Generation()
    if max_new_tokens == 0:
        return out
    capacity, B = len(prompt) + max_new_tokens, drafter.block_size
    cache = target.new_cache(capacity)
    drafter.begin(capacity)
    logits, features = target.forward(torch.tensor([list(prompt)]), cache, drafter.taps)
    choice = logits[0, -1:].argmax(-1)
    out.tokens, reason = trim(choice.tolist(), max_new_tokens, stop_ids)
    drafter.commit(list(prompt), features[0])
    block = torch.full((1, B), drafter.model.config.mask_token_id, device=choice.device)
    out.prefill_seconds = clock() - begin
    while reason is None:
        t0, start, room = clock(), cache.length, max_new_tokens - len(out.tokens)
        count = min(B, room) - 1
        # Launch everything: draft, verification, verdict. The anchor is the last choice.
        block[0, :1] = choice
        guesses = drafter.guess(block)[:count] if count else choice[:0]
        fed = torch.cat([choice, guesses])
        logits, features = target.forward(fed[None], cache, drafter.taps)
        best = logits[0].argmax(-1)
        kept = (guesses == best[:-1]).long().cumprod(0).sum(0, keepdim=True)
        # The one read of this round: how many were kept, what was drafted, what is right.
        accepted, *told = torch.cat([kept, guesses, best]).tolist()
        drafted, right = told[:count], told[count:]
        choice = best[accepted : accepted + 1]
        cache.truncate(start + 1 + accepted)
        drafter.commit(right[:accepted], features[0, : 1 + accepted])
        emitted, reason = trim(right[: accepted + 1], room, stop_ids)
        out.tokens += emitted
        out.rounds.append(Round(drafted, min(accepted, len(emitted)), emitted, 0.0, clock() - t0))
    out.stop, out.seconds = reason, clock() - begin
    return out


class FastPlain(Outside):
    """Plain greedy with fused layers, as a decoder of kit.bench: what `Fast` has to beat.

    Raises:
        ValueError: see `FusedTarget`.
    """

    def __init__(self, target: Any):
        self.target = FusedTarget(target)

    def run(
        self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Collection[int] = ()
    ) -> Generation:
        """Continue one prompt."""
        return speculate(self.target, NoDrafter(), prompt, max_new_tokens, stop_ids)


class Fast(Outside):
    """This loop as a decoder of kit.bench."""

    def __init__(self, target: Any, model: DraftModel, block_size: int | None = None):
        self.target = FusedTarget(target) if isinstance(target, CachedQwen3) else target
        self.drafter = FastDrafter(self.target, model, block_size)

    def run(
        self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Collection[int] = ()
    ) -> Generation:
        """Continue one prompt."""
        return generate(self.target, self.drafter, prompt, max_new_tokens, stop_ids)
