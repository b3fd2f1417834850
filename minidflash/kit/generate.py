"""`generate(...)` in the manner of transformers, for any drafter of this house.

    out = generate(pair.target, pair.model, ids, max_new_tokens=128, eos_token_id=[0])
    out = generate(target, None, ids, max_new_tokens=64, do_sample=True, top_p=0.9, seed=1,
                   streamer=TextStream(tokenizer), return_dict_in_generate=True)

The tokens are room 08's: with any drafter those of the target alone. What is new is only how it is
asked and answered.
"""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import torch
from jaxtyping import Int
from torch import Tensor

from minidflash.drafter import DraftModel
from minidflash.greedy import check_request
from minidflash.kit.chat import settings_of
from minidflash.kit.published import drafter_for
from minidflash.kit.show import Detokenizer
from minidflash.speculate import Drafter, Generation, NGramDrafter, NoDrafter, Round, speculate

Criterion = Callable[[Tensor, Any], Any]  # transformers': (ids [1 T], scores) -> stop?


class Streamer(Protocol):
    """What transformers' streamers have."""

    def put(self, value: Tensor) -> None:
        """Take the prompt [1 T], then each chunk of accepted tokens [n]."""

    def end(self) -> None:
        """Nothing more comes."""


@dataclass(frozen=True)
class DFlashOutput:
    """What `return_dict_in_generate=True` gives; the names are those of the official package.

    Attributes:
        sequences: prompt and answer, [1 T].
        acceptance_lengths: tokens written in each round, the bonus included.
        trace: one record per round: proposed, accepted, emitted, seconds.
        stop: "stop" (a stop token), "length" (the budget) or "criterion" (one of yours).
    """

    sequences: Int[Tensor, "1 T"]
    acceptance_lengths: list[int]
    trace: list[Round]
    stop: str
    num_input_tokens: int
    num_output_tokens: int
    time_to_first_token: float
    time_per_output_token: float


class TextStream:
    """A streamer that writes text while it is made, and never half a character.

    Args:
        tokenizer: turns ids into text.
        out: where to write; standard output if not given.
        skip_prompt: leave the prompt out.
    """

    def __init__(self, tokenizer: Any, out: TextIO | None = None, skip_prompt: bool = True):
        self.words, self.out = Detokenizer(tokenizer), sys.stdout if out is None else out
        self.skip = skip_prompt

    def put(self, value: Tensor) -> None:
        """Write what has become certain."""
        if self.skip:
            self.skip = False
            return
        self.out.write(self.words.put(value.flatten().tolist()))
        self.out.flush()

    def end(self) -> None:
        """Write what is still kept back."""
        self.out.write(self.words.end())
        self.out.flush()


class _Enough(Exception):
    """A criterion wants no more."""


class _Watcher(Drafter):
    """Hands everything on to a drafter, and reports tokens as soon as they are certain."""

    def __init__(self, drafter: Drafter, prompt: list[int], criteria: Sequence[Criterion],
                 streamer: Streamer | None):
        self.drafter, self.text, self.prompt = drafter, list(prompt), len(prompt)
        self.block_size, self.taps = drafter.block_size, drafter.taps
        self.criteria, self.streamer = criteria, streamer
        self.rounds: list[Round] = []
        self.begun, self.prefill = time.perf_counter(), 0.0

    def begin(self, capacity: int) -> None:
        self.drafter.begin(capacity)

    def commit(self, tokens: list[int], features: Tensor) -> None:
        self.drafter.commit(tokens, features)

    def propose(self, anchor: int, count: int) -> Any:
        if len(self.text) == self.prompt:  # the prefill's token belongs to no round
            self.prefill = time.perf_counter() - self.begun
            self.tell([anchor])
        return self.drafter.propose(anchor, count)

    def round(self, one: Round) -> None:
        """Take a round's record, as `speculate` ends it."""
        before = len(self.text)
        try:
            self.tell(one.emitted)
        finally:
            kept = len(self.text) - before
            self.rounds.append(one._replace(
                emitted=one.emitted[:kept], accepted=min(one.accepted, kept)))

    def tell(self, tokens: list[int]) -> None:
        """Write these tokens down, up to the first after which a criterion says stop."""
        kept, enough = len(tokens), False
        for n in range(1, len(tokens) + 1) if self.criteria else ():
            ids = torch.tensor([[*self.text, *tokens[:n]]])
            # As in transformers each is asked after each token, and any of them may stop.
            if any([bool(torch.as_tensor(c(ids, None)).any()) for c in self.criteria]):
                kept, enough = n, True
                break
        self.text += tokens[:kept]
        if self.streamer is not None and kept:
            self.streamer.put(torch.tensor(tokens[:kept]))
        if enough:
            raise _Enough


def generate(
    target: Any, draft: DraftModel | Drafter | str | None, input_ids: Any, *,
    max_new_tokens: int | None = None, do_sample: bool | None = None,
    temperature: float | None = None, top_p: float | None = None, top_k: int | None = None,
    eos_token_id: int | Collection[int] | None = None, generation_config: Any = None,
    stopping_criteria: Sequence[Criterion] | None = None, streamer: Streamer | None = None,
    generator: torch.Generator | None = None, seed: int | None = None,
    block_size: int | None = None, return_dict_in_generate: bool = False,
) -> Any:
    """Continue one prompt; the answer's law is the target's own whatever drafts.

    Args:
        target: kit.models' or kit.hf's.
        draft: a DFlash model, any drafter of room 08, "n-gram", or None: plain decoding.
        input_ids: [1 T], [T] or a list of ids.
        max_new_tokens: the budget; the config's if not given.
        do_sample: False is greedy, whatever the config says. True without a temperature means 1.
        temperature: 0 is greedy; above 0 samples.
        top_p: nucleus sampling, at temperature above 0.
        top_k: the k best only, at temperature above 0; 0 is no limit.
        eos_token_id: one id, several, or None: the config's.
        generation_config: transformers', a mapping, or a folder; arguments override it.
        stopping_criteria: transformers', asked after every token with (ids [1 T], None).
        streamer: gets the prompt, then each chunk of tokens as soon as it is certain, then `end`.
        generator: the source of chance, or
        seed: to make one. Without either, temperature above 0 is refused.
        block_size: slots of a block, if not what the drafter was trained with.
        return_dict_in_generate: a `DFlashOutput` instead of the sequence.

    Returns:
        Prompt and answer, [1 T + n], or `DFlashOutput`.

    Raises:
        ValueError: more than one prompt, no budget, no seed, contradicting arguments, an
            unsupported field in the config, or see room 08's `speculate`.
    """
    prompt = _one_prompt(input_ids)
    set_by = settings_of({} if generation_config is None else generation_config)
    heat = set_by.temperature if temperature is None else float(temperature)
    if do_sample is True:
        heat = heat or (1.0 if temperature is None else 0.0)
        if heat == 0:
            raise ValueError("do_sample=True contradicts temperature=0: at 0 nothing is drawn")
    if do_sample is False:
        if temperature:
            raise ValueError(f"do_sample=False contradicts temperature={temperature}")
        heat = 0.0
    budget = set_by.max_new_tokens if max_new_tokens is None else max_new_tokens
    if budget is None:
        raise ValueError("max_new_tokens is missing: it is given neither here nor in the config")
    if generator is not None and seed is not None:
        raise ValueError("give generator or seed, not both")
    if heat > 0 and generator is None and seed is None:
        raise ValueError(f"temperature={heat} draws tokens: give seed=... or generator=...")
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
    stops = set_by.stop_ids if eos_token_id is None else eos_token_id
    stops = (stops,) if isinstance(stops, int) else tuple(stops)
    cuts: dict[str, Any] = {"top_k": set_by.top_k if top_k is None else top_k,
            "top_p": set_by.top_p if top_p is None else top_p}
    check_request(target, prompt, budget, stops)
    watch = _Watcher(_drafter(target, draft, block_size), prompt,
                     tuple(stopping_criteria or ()), streamer)
    if streamer is not None:
        streamer.put(torch.tensor([prompt]))
    try:
        done = speculate(target, watch, prompt, budget, stops, heat, generator, watch.round, **cuts)
        if len(watch.text) < len(prompt) + len(done.tokens):  # the prefill's token was the last
            watch.tell(done.tokens)
    except _Enough:
        done = Generation(watch.text[len(prompt) :], watch.rounds, "criterion", watch.prefill)
    if streamer is not None:
        streamer.end()
    return _answer(done, prompt, return_dict_in_generate)


def _answer(done: Generation, prompt: list[int], whole: bool) -> Any:
    sequences = torch.tensor([[*prompt, *done.tokens]])
    if not whole:
        return sequences
    busy = sum(r.draft_seconds + r.verify_seconds for r in done.rounds)
    return DFlashOutput(
        sequences, [len(r.emitted) for r in done.rounds], done.rounds, done.stop, len(prompt),
        len(done.tokens), done.prefill_seconds,
        max(busy, done.seconds - done.prefill_seconds) / max(1, len(done.tokens)))


def _one_prompt(input_ids: Any) -> list[int]:
    if isinstance(input_ids, Tensor):
        if input_ids.ndim == 2 and len(input_ids) != 1:
            raise ValueError(f"input_ids {tuple(input_ids.shape)} holds {len(input_ids)} prompts:"
                             " this loop takes one at a time (batch 1)")
        if input_ids.ndim not in (1, 2):
            raise ValueError(f"input_ids {tuple(input_ids.shape)} must be [1 T] or [T]")
        return input_ids.flatten().tolist()
    return list(input_ids)


def _drafter(target: Any, draft: Any, block_size: int | None) -> Drafter:
    if isinstance(draft, DraftModel):
        return drafter_for(target, draft, block_size)
    if draft == "n-gram":
        return NGramDrafter(block_size or 16)
    if block_size is not None:
        raise ValueError(f"block_size={block_size}: this drafter has its own, {draft!r}")
    if draft is None:
        return NoDrafter()
    if isinstance(draft, str):
        raise ValueError(f"draft={draft!r} is unknown: a model, a drafter, 'n-gram' or None")
    return draft
