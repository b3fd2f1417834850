"""Any causal LM of transformers as a target: the same contract as room 04's `CachedQwen3`.

    target = HFTarget(AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B-Instruct"))

This is the only place that knows transformers' cache. A drafter uses the target's embedding and
head by themselves, so both are tried out when the target is made: a model that scales them
elsewhere is refused, because a drafter would see other numbers than the model does. Nothing here
runs code from a model folder.
"""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


class HFCache:
    """transformers' growing cache behind `length` and `truncate`; the model appends by itself."""

    def __init__(self) -> None:
        from transformers import DynamicCache

        self.inner = DynamicCache()

    @property
    def length(self) -> int:
        """Positions held."""
        return int(self.inner.get_seq_length())

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on; `truncate(0)` empties the cache (case C1).

        Raises:
            ValueError: `length` is negative or more than what is held.
        """
        held = self.length
        if not 0 <= length <= held:
            raise ValueError(f"truncate({length}): this cache holds {held} positions")
        # Their `crop` counts what to take away, as a negative number; 0 would mean "all" or "none",
        # depending on the version.
        if length < held:
            self.inner.crop(length - held)


class HFTarget:
    """A frozen causal LM with full attention in every layer.

    Args:
        model: any `...ForCausalLM` of transformers.

    Raises:
        ValueError: its cache cannot be truncated (sliding windows, recurrent layers; case C8), or
            its embedding and head are not what the model itself computes with.
    """

    def __init__(self, model: Any):
        self.model = model.eval().requires_grad_(False)
        c = model.config.get_text_config()
        kinds = set(getattr(c, "layer_types", None) or []) - {"full_attention"}
        window = getattr(c, "sliding_window", None) and getattr(c, "use_sliding_window", True)
        if kinds or (window and not getattr(c, "layer_types", None)):
            what = ", ".join(sorted(kinds)) or f"sliding_window={c.sliding_window}"
            raise ValueError(f"{c.model_type} has {what}: its cache cannot drop rejected tokens")
        self.config = SimpleNamespace(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size,
            num_hidden_layers=c.num_hidden_layers,
            max_position_embeddings=c.max_position_embeddings,
        )
        self.cap = getattr(c, "final_logit_softcapping", None)
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._probe(c.model_type)

    @torch.no_grad()
    def _probe(self, kind: str) -> None:
        """Is hidden_states[0] the embedding, and does the head make the logits out of the last?"""
        ids = torch.tensor([[0, min(1, self.config.vocab_size - 1)]], device=self.device)
        out = self.model(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True,
                         use_cache=False)
        states = out.hidden_states
        if len(states) != self.config.num_hidden_layers + 1:
            raise ValueError(f"{kind} shows {len(states)} hidden states for"
                             f" {self.config.num_hidden_layers} layers")
        for what, mine, theirs in (("embedding", self.embed(ids), states[0]),
                                   ("head", self.head(states[-1]), out.logits)):
            bound = 1e-2 * max(1e-6, float(theirs.abs().max()))
            if mine.shape != theirs.shape or float((mine - theirs).abs().max()) > bound:
                raise ValueError(f"{kind} does more to its {what} than its {what} module:"
                                 " a drafter would see other numbers")

    @property
    def device(self) -> torch.device:
        """Where the embedding lies."""
        return self.model.get_input_embeddings().weight.device

    def new_cache(self, capacity: int, batch: int = 1) -> HFCache:
        """An empty cache; transformers' grows, so `capacity` is not needed."""
        return HFCache()

    def embed(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T W"]:
        """Token ids to rows."""
        return self.model.get_input_embeddings()(ids.to(self.device))

    def head(self, hidden: Float[Tensor, "*rows W"]) -> Float[Tensor, "*rows V"]:
        """Final hidden states (already normalised) to logits, capped if the model caps them."""
        logits = self.model.get_output_embeddings()(hidden)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    @torch.no_grad()
    def forward(
        self, ids: Int[Tensor, "B T"], cache: HFCache | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Logits [B T V], and the outputs of the tapped layers side by side, [B T len(taps)*W]."""
        ids = ids.to(self.device)
        past = cache.length if cache is not None else 0
        # Without an explicit mask transformers may take a prompt's token for padding.
        mask = torch.ones(ids.shape[0], past + ids.shape[1], dtype=torch.long, device=ids.device)
        more = {self._cache_name: cache.inner} if cache is not None else {}
        out = self.model(ids, attention_mask=mask, use_cache=cache is not None,
                         output_hidden_states=bool(taps), **more)
        # Tap L is the output of layer L; entry 0 is the embedding (case E1).
        tapped = [out.hidden_states[tap + 1] for tap in taps]
        features = torch.cat(tapped, dim=-1) if tapped else out.logits[..., :0]
        return out.logits, features

    __call__ = forward


def load_hf(folder: Path | str, dtype: torch.dtype, device: str = "cpu") -> HFTarget:
    """A target of any supported kind from a folder on this machine.

    Raises:
        ValueError: transformers cannot read it without running code from it, or see `HFTarget`.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True,
            use_safetensors=True,
        )
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{folder} is no target that transformers reads: {reason}") from None
    return HFTarget(model.to(device))
