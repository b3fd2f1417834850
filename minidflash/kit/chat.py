"""Chat: prompts by a tokenizer's template, loss masks for training, settings of a GenerationConfig.

Whether a model thinks before it answers changes every token that follows, and a drafter trained on
one way drafts badly in the other (case F18). So `enable_thinking` is never assumed: where a
template knows the word you must say True or False, and where it doesn't you must not.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Message = Mapping[str, str]  # {"role": "user", "content": "..."}


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse what is no conversation.

    Raises:
        ValueError: no messages, or one without a role and a content that are texts.
    """
    if not messages:
        raise ValueError("messages is empty: a conversation has at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError(f'messages[{number}]={message!r} must be {{"role": text,'
                             ' "content": text}')


def template_options(tokenizer: Any, enable_thinking: bool | None) -> dict[str, Any]:
    """What to hand to the template besides the messages.

    Raises:
        ValueError: there is no template; it knows `enable_thinking` and you did not say; or it does
            not know it and you did.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ValueError("this tokenizer has no chat template: give plain text")
    # A tokenizer may have several templates by name; transformers then takes "default".
    text = template if isinstance(template, str) else template.get("default", "")
    knows = "enable_thinking" in text
    if knows and enable_thinking is None:
        raise ValueError("this chat template can think: say enable_thinking=True or False")
    if not knows and enable_thinking is not None:
        raise ValueError(f"enable_thinking={enable_thinking}: this chat template does not know it;"
                         " leave it None")
    return {"enable_thinking": enable_thinking} if knows else {}


def _render(tokenizer: Any, messages: Sequence[Message], prompt: bool, options: dict) -> str:
    try:
        return tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=prompt, **options)
    except Exception as error:  # templates raise errors of their own
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"the chat template refuses this conversation: {reason}") from None


def prompt_ids(
    tokenizer: Any, messages: Sequence[Message], enable_thinking: bool | None = None
) -> list[int]:
    """The ids after which the assistant's answer begins.

    Raises:
        ValueError: see `check_messages` and `template_options`; or the assistant spoke last.
    """
    check_messages(messages)
    if messages[-1]["role"] == "assistant":
        raise ValueError("the assistant has already answered: the last message must be another's")
    options = template_options(tokenizer, enable_thinking)
    text = _render(tokenizer, messages, True, options)
    return tokenizer.encode(text, add_special_tokens=False)


class Masked(NamedTuple):
    """A conversation for training: its ids, and True where the assistant wrote the token."""

    ids: list[int]
    loss_mask: list[bool]


def masked_conversation(
    tokenizer: Any, messages: Sequence[Message], enable_thinking: bool | None = None
) -> Masked:
    """A whole conversation with the assistant's tokens marked, end markers included (case F16).

    A template with generation tags marks them by itself. For any other the place of each answer is
    found by rendering the conversation again with other words in that one answer: what changes is
    the answer. The end marker is the special token that follows it.

    Raises:
        ValueError: the template rewrites an answer, or puts no end marker after it, so that it
            cannot be said which tokens the assistant wrote; no answer at all; see `prompt_ids`.
    """
    check_messages(messages)
    options = template_options(tokenizer, enable_thinking)
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not answers:
        raise ValueError("messages has no answer of the assistant: there is nothing to learn")
    whole = _render(tokenizer, messages, False, options)
    coded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, places = coded["input_ids"], coded["offset_mapping"]
    template = tokenizer.chat_template
    if isinstance(template, str) and "generation" in template and "endgeneration" in template:
        marked = tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True, **options)
        ids = list(marked["input_ids"])
        mask = [bool(flag) for flag in marked["assistant_masks"]]
    else:
        spans = [_span(tokenizer, messages, i, whole, options) for i in answers]
        mask = [end > start and any(a <= start and end <= b for a, b in spans)
                for start, end in places]
    runs = sum(mask[i] and not (i and mask[i - 1]) for i in range(len(mask)))
    if runs != len(answers):
        raise ValueError(f"this chat template marks {runs} stretches for {len(answers)} answers:"
                         " it cannot be said which tokens the assistant wrote")
    return Masked(list(ids), mask)


def _span(
    tokenizer: Any, messages: Sequence[Message], i: int, whole: str, options: dict
) -> tuple[int, int]:
    """Where in the rendered text answer i and its end marker stand."""
    content = messages[i]["content"]
    # The two renderings differ in every character of the answer's place and nowhere else.
    other = "\u2402" if "\u2402" not in whole else "\u2403"
    changed = [*messages]
    changed[i] = {**messages[i], "content": other}
    again = _render(tokenizer, changed, False, options)
    start = again.find(other)
    tail = len(again) - start - 1
    end = len(whole) - tail
    fits = start >= 0 and again.count(other) == 1 and start <= end
    fits = fits and whole[:start] == again[:start] and whole[end:] == again[start + 1 :]
    if not fits or whole[start:end] != content.strip() or start == end:
        raise ValueError(f"messages[{i}]: this chat template does not write the answer as it is"
                         " (does it hold thoughts?), so its tokens cannot be marked")
    special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
    closing = next((s for s in special if whole.startswith(s, end)), None)
    if closing is None:
        raise ValueError(f"messages[{i}]: no end marker follows the answer in this chat template:"
                         " nobody could learn where an answer ends")
    return start, end + len(closing)


def other_habits(drafter: Path | str, enable_thinking: bool | None) -> str | None:
    """A warning if a drafter was trained in the other way of thinking, as its recipe.json says.

    Such a drafter still leads to the target's own words; it only guesses them more seldom.
    """
    path = Path(drafter) / "recipe.json"
    if not path.exists():
        return None
    from minidflash.kit.checkpoint import read_json

    trained = read_json(path).get("thinking")
    if trained is None or trained == enable_thinking:
        return None
    words = {True: "on", False: "off", None: "not said"}
    return (f"{drafter} was trained with thinking {words[trained]}, and thinking is"
            f" {words[enable_thinking]} now: fewer of its guesses will be kept")


# --------------------------------------------------------------------------------------------------
# settings

TAKEN = ("do_sample", "temperature", "top_k", "top_p", "max_new_tokens", "eos_token_id")
# Fields that cannot change a token here.
NEUTRAL = frozenset(
    "bos_token_id pad_token_id transformers_version _from_model_config use_cache cache_config"
    " return_dict_in_generate disable_compile compile_config is_assistant num_assistant_tokens"
    " num_assistant_tokens_schedule assistant_confidence_threshold max_matching_ngram_size"
    " assistant_lookbehind target_lookbehind low_memory prefill_chunk_size cache_implementation"
    " continuous_batching_config decoder_start_token_id renormalize_logits"
    " trust_remote_code".split()
)
# Fields whose usual value asks for nothing.
NOTHING: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_return_sequences": (1,), "repetition_penalty": (1.0,),
    "length_penalty": (1.0,), "typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,),
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "min_length": (0,),
    "encoder_repetition_penalty": (1.0,), "early_stopping": (False,), "num_beam_groups": (1,),
    "remove_invalid_values": (False,), "output_scores": (False,), "output_logits": (False,),
    "output_attentions": (False,), "output_hidden_states": (False,), "diversity_penalty": (0.0,),
    "use_mtp": (False,), "token_healing": (False,), "min_new_tokens": (0,), "min_p": (0, 0.0),
    "guidance_scale": (1.0,), "max_length": (20,),
}


class Settings(NamedTuple):
    """The settings of a GenerationConfig in the words of room 08's loop."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int | None = None
    stop_ids: tuple[int, ...] = ()


def settings_of(config: Any) -> Settings:
    """Read a GenerationConfig, the mapping in a generation_config.json, or a model's folder.

    `do_sample` decides: without it decoding is greedy and the sampling fields say nothing. With it,
    an unset `top_k` is 50 and an unset temperature 1, as in transformers.

    Raises:
        ValueError: a field that is set would change the output and is not supported here.
    """
    if isinstance(config, str | Path):
        from minidflash.kit.checkpoint import read_json

        path = Path(config) / "generation_config.json"
        config = read_json(path) if path.exists() else {}
    raw = dict(config if isinstance(config, Mapping) else config.to_dict())
    for name in sorted(raw.keys() - {*TAKEN, *NEUTRAL}):
        value = raw[name]
        if value is not None and value not in NOTHING.get(name, ()):
            raise ValueError(f"{name}={value!r} of the GenerationConfig is not supported: it would"
                             f" change the output; supported are {', '.join(TAKEN)}")
    stops = raw.get("eos_token_id")
    stop_ids = () if stops is None else (stops,) if isinstance(stops, int) else tuple(stops)
    found = Settings(max_new_tokens=raw.get("max_new_tokens"), stop_ids=stop_ids)
    if not raw.get("do_sample"):
        return found

    def or_else(name: str, usual: Any) -> Any:
        return usual if raw.get(name) is None else raw[name]

    return found._replace(temperature=float(or_else("temperature", 1.0)),
                          top_k=int(or_else("top_k", 50)), top_p=float(or_else("top_p", 1.0)))
