"""Tiny real models for the specs of the loop: random ones, and ones whose every step is known."""

import torch
from torch import nn

from minidflash.cache import CachedQwen3
from minidflash.drafter import DrafterConfig, DraftModel
from minidflash.qwen3 import Qwen3Config

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 4, "rope_theta": 100.0}  # fmt: skip


class Watched(CachedQwen3):
    """A decoder that lets a test see its newest cache, and counts its forwards."""

    forwards = 0

    def new_cache(self, capacity, batch=1):
        self.cache = super().new_cache(capacity, batch)
        return self.cache

    def forward(self, ids, cache=None, taps=()):
        self.forwards += 1
        return super().forward(ids, cache, taps)


@torch.no_grad()
def stir(model: nn.Module, seed: int) -> None:
    """Draw every weight anew, large enough for every part to matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1:
            weight.copy_(1.0 + 0.3 * noise)
        else:
            weight.copy_(noise if "embed" in name else noise / weight.shape[1] ** 0.5)


def decoder(seed: int, vocab: int = 6, dtype=torch.float64, layers: int = 5, **sizes) -> Watched:
    """A random Qwen3."""
    sizes = SIZES | sizes
    target = Watched(Qwen3Config(vocab_size=vocab, num_hidden_layers=layers, **sizes)).eval()
    stir(target, seed)
    return target.to(dtype)


def drafter(seed: int, target: Watched, block_size: int = 4, mask: int = 0,
            taps: tuple[int, ...] = (1, 3)) -> DraftModel:
    """A random draft model for this target."""
    c = target.config
    sizes = {name: getattr(c, name) for name in SIZES}
    model = DraftModel(DrafterConfig(
        num_hidden_layers=2, block_size=block_size, mask_token_id=mask, target_layer_ids=taps,
        num_target_layers=c.num_hidden_layers, target_hidden_size=c.hidden_size,
        vocab_size=c.vocab_size, **sizes)).eval()  # fmt: skip
    stir(model, seed + 1000)
    return model.to(target.model.embed_tokens.weight.dtype)


@torch.no_grad()
def successor(after: list[int], block_size: int = 4, mask: int = 0) -> tuple[Watched, DraftModel]:
    """A pair with empty minds: token t is followed by after[t], and every guess is after[mask].

    No layer writes anything into the residual stream, so a row's logits depend on its own token:
    the embedding of t points to axis t, and the head reads after[t] off that axis.
    """
    vocab = len(after)
    assert vocab <= SIZES["hidden_size"]
    target = decoder(0, vocab)
    model = drafter(0, target, block_size, mask)
    for part in (*target.model.layers, *model.layers):
        part.self_attn.o_proj.weight.zero_()
        part.mlp.down_proj.weight.zero_()
    for norm in (target.model.norm, model.norm):
        norm.weight.fill_(1.0)
    target.model.embed_tokens.weight.copy_(torch.eye(vocab, SIZES["hidden_size"]))
    head = torch.zeros(vocab, SIZES["hidden_size"])
    for token, follower in enumerate(after):
        head[follower, token] = 1.0
    target.lm_head.weight.copy_(head)
    return target, model
