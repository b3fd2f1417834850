"""Chat: prompts by the template, masks of the assistant's tokens, settings that would be lost."""

import pytest
import transformers as hf

from minidflash.kit.chat import (
    Settings,
    masked_conversation,
    other_habits,
    prompt_ids,
    settings_of,
)
from minidflash.kit.tokenizer import load_tokenizer

# Shaped as Qwen3's: roles between markers, thoughts switched off by an empty stretch, which the
# template writes before the last answer and into the prompt, and leaves out of earlier answers.
QWEN = """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.last and not enable_thinking|default(true) -%}
{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{%- set said = m.content.split('</think>')[-1].strip() if m.role == 'assistant' else m.content -%}
{{ said + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}
{%- if not enable_thinking|default(true) -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{%- endif -%}"""
TAGGED = """{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' -%}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else -%}{{ m.content + '<|im_end|>' }}{%- endif -%}{{ '\n' }}{%- endfor -%}"""
NO_END = "{%- for m in messages -%}{{ m.role + ': ' + m.content + '\n' }}{%- endfor -%}"
SHOUTS = "{%- for m in messages -%}{{ m.content.upper() + '<|im_end|>' }}{%- endfor -%}"
TALK = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "It is 5.\nAnd that is all."},
    {"role": "user", "content": "你好"},
    {"role": "assistant", "content": "你好！ 😀"},
]


def words(template):
    """The shipped tokenizer with chat markers and a template."""
    tokenizer = load_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def marked(tokenizer, ids, mask):
    """The text of each stretch of marked tokens."""
    parts, last = [], False
    for token, flag in zip(ids, mask, strict=True):
        if flag:
            parts.append([token]) if not last else parts[-1].append(token)
        last = flag
    return [tokenizer.decode(part) for part in parts]


@pytest.mark.parametrize("template, thinking", [(QWEN, False), (QWEN, True), (TAGGED, None)])
def test_only_the_assistants_tokens_are_marked(template, thinking):
    """In two turns exactly the answers and their end markers are marked, whether or not the
    template has generation tags (case F16)."""
    tokenizer = words(template)
    ids, mask = masked_conversation(tokenizer, TALK, thinking)
    assert marked(tokenizer, ids, mask) == [
        "It is 5.\nAnd that is all.<|im_end|>", "你好！ 😀<|im_end|>"]
    assert len(ids) == len(mask)


@pytest.mark.parametrize("template, message", [
    (NO_END, "messages.1.: no end marker follows the answer"),
    (SHOUTS, "messages.1.: this chat template does not write the answer as it is"),
])  # fmt: skip
def test_a_template_that_cannot_mark_is_refused(template, message):
    """A template that rewrites answers, or ends them with nothing, is refused."""
    with pytest.raises(ValueError, match=message):
        masked_conversation(words(template), TALK)


def test_thoughts_that_the_template_drops_are_refused():
    """An answer with thoughts that the template leaves out cannot be marked as it was written."""
    talk = [TALK[0], {"role": "assistant", "content": "<think>hm</think>5"}]
    with pytest.raises(ValueError, match="does it hold thoughts"):
        masked_conversation(words(QWEN), talk, True)


def test_a_prompt_by_hand():
    """The prompt ends where the answer begins; thinking switched off puts its empty stretch
    there."""
    tokenizer = words(QWEN)
    on, off = (tokenizer.decode(prompt_ids(tokenizer, TALK[:1], x)) for x in (True, False))
    assert on == "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert off == on + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("template, thinking, message", [
    (QWEN, None, "say enable_thinking=True or False"),
    (TAGGED, False, "enable_thinking=False: this chat template does not know it"),
    (None, None, "has no chat template"),
])  # fmt: skip
def test_thinking_is_never_assumed(template, thinking, message):
    """Where a template can think you must say whether; where it cannot you must not (case F18)."""
    with pytest.raises(ValueError, match=message):
        prompt_ids(words(template), TALK[:1], thinking)


def test_a_drafter_trained_in_another_way_is_told(tmp_path):
    """Where a drafter's recipe says that it was trained with thinking off, using it with thinking
    on gives a warning; in the same way, or where nothing is said, none (case F18)."""
    assert other_habits(tmp_path, True) is None
    (tmp_path / "recipe.json").write_text('{"thinking": false}')
    assert "trained with thinking off, and thinking is on now" in other_habits(tmp_path, True)
    assert other_habits(tmp_path, False) is None
    (tmp_path / "recipe.json").write_text('{"scores": {}}')
    assert other_habits(tmp_path, True) is None


@pytest.mark.parametrize("talk, message", [
    ([], "messages is empty"),
    ([{"role": "user"}], "messages.0."),
    (["hello"], "messages.0.='hello'"),
    (TALK, "the assistant has already answered"),
])  # fmt: skip
def test_what_is_no_conversation_is_refused(talk, message):
    """A message is a role and a content, and a prompt ends before the assistant speaks."""
    with pytest.raises(ValueError, match=message):
        prompt_ids(words(QWEN), talk, False)


# ---------------------------------------------------------------------- settings


def test_what_published_settings_mean():
    """Qwen3's own generation settings are temperature 0.6, top-p 0.95, top-k 20 and two end
    tokens."""
    raw = {"bos_token_id": 3, "do_sample": True, "eos_token_id": [5, 3], "pad_token_id": 3,
           "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"}
    wanted = Settings(0.6, 20, 0.95, None, (5, 3))
    assert settings_of(raw) == settings_of(hf.GenerationConfig(**raw)) == wanted


def test_greedy_is_what_do_sample_says():
    """Without do_sample the sampling fields say nothing; with it an unset top-k is 50, as in
    transformers."""
    assert settings_of(hf.GenerationConfig(temperature=0.6, top_p=0.9)) == Settings()
    assert settings_of({"do_sample": True}) == Settings(1.0, 50, 1.0)
    assert settings_of(hf.GenerationConfig(max_new_tokens=7, eos_token_id=2)) == Settings(
        max_new_tokens=7, stop_ids=(2,))


@pytest.mark.parametrize("field, value", [
    ("repetition_penalty", 1.1), ("num_beams", 4), ("min_new_tokens", 3), ("bad_words_ids", [[1]]),
    ("no_repeat_ngram_size", 2), ("min_p", 0.1), ("typical_p", 0.5), ("suppress_tokens", [2]),
    ("guidance_scale", 2.0), ("stop_strings", ["x"]), ("num_return_sequences", 2),
    ("exponential_decay_length_penalty", [3, 1.1]), ("max_time", 1.0), ("penalty_alpha", 0.6),
    ("some_new_field", 1),
])  # fmt: skip
def test_a_setting_that_would_be_lost_is_refused(field, value):
    """A set field that would change the output is refused by name, unknown ones too."""
    with pytest.raises(ValueError, match=f"{field}="):
        settings_of({field: value, "do_sample": True})


def test_a_config_with_nothing_set_is_accepted():
    """transformers' own defaults ask for nothing."""
    assert settings_of(hf.GenerationConfig()) == Settings()


def test_settings_of_a_folder(tmp_path):
    """A folder's generation_config.json is read; without one nothing is set."""
    assert settings_of(tmp_path) == Settings()
    hf.GenerationConfig(do_sample=True, temperature=0.5, top_k=0, eos_token_id=[4]).save_pretrained(
        tmp_path)
    assert settings_of(tmp_path) == Settings(0.5, 0, 1.0, None, (4,))
