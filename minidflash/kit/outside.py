"""Decoders of others on the very weights of a pair, for comparison.

`hf-greedy` and `hf-lookup` are transformers' own `generate`. `official` is the DFlash authors'
package (dflash 0.1.0), where it is installed; nothing here needs it. No tensor is copied: a twin
model is made without memory and given the pair's own.
"""

import time
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch

from minidflash.drafter import DraftModel
from minidflash.kit.hf import HFTarget
from minidflash.speculate import Generation, Round


def twin(target: Any) -> Any:
    """A model of transformers with this target's weights: the same storage, no second copy."""
    if isinstance(target, HFTarget):
        return target.model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from minidflash.kit.checkpoint import target_config

    weight = target.model.embed_tokens.weight
    config = Qwen3Config(**target_config(target.config, weight.dtype))
    with torch.device("meta"):
        model: Any = Qwen3ForCausalLM(config)
    model.load_state_dict(target.state_dict(), assign=True)
    _give_angles(model.model, config, weight)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def _give_angles(model: Any, config: Any, weight: torch.Tensor) -> None:
    """The one thing that no file holds: the angles' speeds, made anew where the weights are."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    model.rotary_emb = Qwen3RotaryEmbedding(config).to(weight.device)


class Watch:
    """A streamer that notes when each chunk came: the prompt first, then the tokens."""

    def __init__(self) -> None:
        self.chunks: list[tuple[float, list[int]]] = []

    def put(self, value: Any) -> None:
        """Note a chunk."""
        self.chunks.append((time.perf_counter(), value.flatten().tolist()))

    def end(self) -> None:
        """Nothing more comes."""


class Outside:
    """A decoder that is not of this house. Greedy only.

    Args:
        model: transformers' causal LM.
        options: what to hand to its `generate` besides the usual.
    """

    def __init__(self, model: Any, **options: Any):
        self.model, self.options = model, options

    @torch.no_grad()
    def run(
        self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Collection[int] = ()
    ) -> Generation:
        """Continue one prompt; a round is what the streamer is given at once.

        The first chunk is counted as the prefill. What was drafted is not told, so `proposed` is
        empty, and all of a round's time is the target's.
        """
        out, watch, begin = Generation(), Watch(), time.perf_counter()
        if max_new_tokens == 0:
            return out
        ids = torch.tensor([list(prompt)], device=self.model.device)
        stops = sorted(stop_ids)
        done = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
            do_sample=False, num_beams=1, eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0, streamer=watch, **self.options)
        out.seconds = time.perf_counter() - begin
        out.tokens = done[0, len(prompt) :].tolist()
        (first, chunk), *later = watch.chunks[1:]
        out.prefill_seconds, written = first - begin, len(chunk)
        for moment, chunk in later:
            chunk = chunk[: len(out.tokens) - written]  # past the end nothing is kept
            written += len(chunk)
            if chunk:
                out.rounds.append(Round([], len(chunk) - 1, chunk, 0.0, moment - first))
            first = moment
        out.stop = "stop" if out.tokens[-1] in stops else "length"
        return out


def transformers_decoders(target: Any) -> dict[str, Outside]:
    """Its greedy decoding, and its prompt lookup with the 10 guesses that its manual suggests."""
    model = twin(target)
    return {"hf-greedy": Outside(model), "hf-lookup": Outside(model, prompt_lookup_num_tokens=10)}


class Official(Outside):
    """The authors' loop and draft model. Greedy here.

    Raises:
        ValueError: their package is not installed.
    """

    def __init__(self, target: Any, draft: DraftModel):
        from transformers import Qwen3Config

        from minidflash.kit.checkpoint import zlab_config

        try:
            from dflash import model as theirs
        except ImportError:
            raise ValueError("official needs the authors' package:"
                             "  pip install --no-deps dflash==0.1.0") from None
        super().__init__(twin(target))
        weight, most = draft.fc.weight, target.config.max_position_embeddings
        config = Qwen3Config(**zlab_config(draft.config, weight.dtype, most))
        with torch.device("meta"):
            self.draft: Any = theirs.DFlashDraftModel(config)
        self.draft.load_state_dict(draft.state_dict(), assign=True)
        _give_angles(self.draft, config, weight)
        self.draft.eval().requires_grad_(False)
        self.theirs = theirs

    def run(
        self, prompt: Sequence[int], max_new_tokens: int, stop_ids: Collection[int] = ()
    ) -> Generation:
        """Continue one prompt; rounds and times are what the package reports."""
        if max_new_tokens == 0:
            return Generation()
        clock, device = self.theirs._cuda_time, self.model.device
        if device.type != "cuda":  # their clock waits for a GPU, and fails where there is none
            self.theirs._cuda_time = time.perf_counter
        begin = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # what they hand to transformers
                done = self.theirs.dflash_generate(
                    self.draft, self.model, torch.tensor([list(prompt)], device=device),
                    max_new_tokens, sorted(stop_ids) or None, return_stats=True)
        finally:
            self.theirs._cuda_time = clock
        seconds = time.perf_counter() - begin
        tokens, rounds, place = done.output_ids[0, len(prompt) :].tolist(), [], 1
        each = (seconds - done.time_to_first_token) / max(1, len(done.acceptance_lengths))
        for length in done.acceptance_lengths:
            rounds.append(Round([], length - 1, tokens[place : place + length], 0.0, each))
            place += length
        stop = "stop" if tokens[-1] in stop_ids else "length"
        return Generation(tokens, rounds, stop, done.time_to_first_token, seconds)
