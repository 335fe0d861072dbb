"""The tokenizer from a model directory, without transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from tests.parts.rollout.guessing import CHATML, fast_letters, letter_tokenizer


def model_directory(path: Path, *, template_in_config: bool = False) -> Path:
    fast_letters().save(str(path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"}
    if template_in_config:
        config["chat_template"] = CHATML
    else:
        (path / "chat_template.jinja").write_text(CHATML)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return path


@pytest.mark.parametrize("template_in_config", [False, True])
def test_tokens_template_and_end_tokens_are_read_from_a_model_directory(
    tmp_path: Path, template_in_config: bool
) -> None:
    tokenizer = ModelTokenizer.from_directory(model_directory(tmp_path, template_in_config=template_in_config))
    text = tokenizer.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text)
    assert ids[0] == 1, "special tokens in the text are one token"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "user\nhi\nassistant\n"
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.vocab_size == fast_letters().get_vocab_size()


def test_a_cached_rendering_equals_the_first() -> None:
    tokenizer = letter_tokenizer()
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    first = tokenizer.render(chat, add_generation_prompt=False)
    assert tokenizer.render(chat, add_generation_prompt=False) == first
    assert tokenizer.render(chat, add_generation_prompt=True) != first
    assert tokenizer.render([{"role": "user", "content": "ab"}], add_generation_prompt=False) != first
    tokenizer.encode("abc").append(99)
    assert tokenizer.encode("abc")[-1] != 99


def test_messages_with_more_than_role_and_content_reach_the_template() -> None:
    tokenizer = letter_tokenizer("{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.calls | tojson }};{% endfor %}")
    rendered = tokenizer.render(
        [{"role": "tool", "content": "", "name": "ls", "calls": [{"a": "<b>"}]}], add_generation_prompt=False
    )
    assert rendered == 'tool ls [{"a": "<b>"}];'


def test_marks_of_generated_text_and_the_arguments_of_tojson_are_those_of_transformers() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ m.call | tojson(ensure_ascii=False, separators=(',', ':'), sort_keys=True) }}{% endfor %}"
    )
    tokenizer = ModelTokenizer(fast_letters(), chat_template=source)
    message = {"role": "assistant", "content": "hi ", "call": {"b": "é", "a": 1}}
    assert tokenizer.render([message], add_generation_prompt=False) == 'hi {"a":1,"b":"é"}'


@pytest.mark.parametrize("start", ["<think>\n", ""], ids=["in the reply", "in the prompt"])
def test_a_thought_reaches_a_template_that_reads_it_from_a_field(start: str) -> None:
    source = "{% for m in messages %}({{ m.reasoning_content or '' }})[{{ m.content }}]{% endfor %}"
    tokenizer = ModelTokenizer(fast_letters(), chat_template=source)
    thought = {"role": "assistant", "content": f"{start}hm\n</think>\n\nyes"}
    assert tokenizer.render([thought], add_generation_prompt=False) == "(hm)[yes]"
    # Of a user, without a thought, or with a field of its own: unchanged.
    for message, expected in (
        ({"role": "user", "content": "a</think>b"}, "()[a</think>b]"),
        ({"role": "assistant", "content": "yes"}, "()[yes]"),
        ({"role": "assistant", "content": "a</think>b", "reasoning_content": "c"}, "(c)[a</think>b]"),
    ):
        assert tokenizer.render([message], add_generation_prompt=False) == expected


def test_invalid_files_stop_the_run_and_rejected_messages_only_the_episode(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"tokenizer\.json"):
        ModelTokenizer.from_directory(tmp_path)
    with pytest.raises(RunError, match="does not parse: line 1"):
        letter_tokenizer("{% for %}")
    with pytest.raises(EpisodeError, match="roles must alternate"):
        letter_tokenizer("{{ raise_exception('roles must alternate') }}").render([], add_generation_prompt=True)
    with pytest.raises(EpisodeError, match="no chat template"):
        ModelTokenizer(fast_letters(), chat_template=None).render([], add_generation_prompt=True)


def test_playing_episodes_imports_neither_torch_nor_transformers() -> None:
    modules = ("rollout.dispatch.dispatcher", "rollout.episodes.chat", "rollout.chat.tokenizer", "tasks.cursor")
    code = f"import sys, {', '.join(f'rollbook.{module}' for module in modules)};"
    code += "print(*sorted({'torch', 'transformers', 'aiohttp'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []
