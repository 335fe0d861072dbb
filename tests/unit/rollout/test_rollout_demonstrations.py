"""Demonstrations: chats from a file become rows in which exactly the assistant's tokens are trained."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.contracts.policy import Completion, FinishReason, SamplingParams
from rollbook.contracts.trajectory import CHAT_FACT
from rollbook.rollout.assemblers.chat import MessageTrajectoryAssembler
from rollbook.rollout.chat.demonstrations import ChatError, DemonstrationError, chat_row, read_demonstrations
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.trainer.model.model_directory import build_tokenizer
from rollbook.trainer.model_config import ModelBuildConfig

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
NO_END = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
TOOLS = (
    "{% for t in tools or [] %}<|tool|>{{ t.function.name }}{% endfor %}{% if is_brief %}<|brief|>{% endif %}" + CHATML
)
REWRITES_HISTORY = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<|{{ m.role }}|>{{ m.content }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelTokenizer]:
    loaded = {}
    for name, template in (
        ("chatml", CHATML),
        ("no_end", NO_END),
        ("tools", TOOLS),
        ("rewrites_history", REWRITES_HISTORY),
    ):
        directory = tmp_path_factory.mktemp(name)
        build = ModelBuildConfig(tokenizer="bytes", chat_template=template)
        build_tokenizer(build).save_pretrained(str(directory))
        loaded[name] = ModelTokenizer.from_directory(directory)
    return loaded


def chat(*texts: str) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    return [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(texts)]


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


texts = (
    st.text(st.characters(codec="utf-8", exclude_characters="<\x00"), min_size=1, max_size=20)
    .map(str.strip)
    .filter(bool)
)


ADD: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add"}}]


@given(
    turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=3),
    given=st.sampled_from([{}, {"tools": ADD}, {"tools": ADD, "template": {"is_brief": True}}]),
)
def test_a_demonstration_is_what_a_rollout_would_have_recorded(
    tokenizers: dict[str, ModelTokenizer], turns: list[tuple[str, str]], given: dict[str, Any]
) -> None:
    tokenizer = tokenizers["tools"]
    assembler = MessageTrajectoryAssembler(tokenizer, SamplingParams(), **given)
    for question, answer in turns:
        assembler.add_message("user", question)
        assembler.next_prompt()
        ids = np.array([*tokenizer.encode(answer), *tokenizer.eos_token_ids[:1]], dtype=np.int32)
        zeros = np.zeros(len(ids))
        assembler.add_completion(
            Completion(
                token_ids=ids,
                logprobs=zeros.astype(np.float32),
                versions=zeros.astype(np.int32),
                finish_reason=FinishReason.STOP,
            )
        )
    sample = assembler.build(reward=1.0)
    recorded = sample.sequences[0]
    assert sample.facts.get(CHAT_FACT, {}) == given
    demonstrated = chat_row(chat(*(text for turn in turns for text in turn)), tokenizer, **given)
    assert demonstrated.token_ids.tolist() == recorded.token_ids.tolist()
    assert demonstrated.loss_mask.tolist() == recorded.loss_mask.tolist()


def test_only_assistant_tokens_and_their_end_tokens_are_trained(tokenizers: dict[str, ModelTokenizer]) -> None:
    tokenizer = tokenizers["chatml"]
    row = chat_row(chat("hi", "yes", "more", "no"), tokenizer)
    assert tokenizer.decode(row.token_ids[row.loss_mask].tolist(), skip_special_tokens=False) == "yes<eos>no<eos>"
    assert not row.has_logprobs


def test_an_assistant_message_with_weight_0_is_context(tokenizers: dict[str, ModelTokenizer]) -> None:
    tokenizer = tokenizers["chatml"]
    plain = chat("a", "b", "c", "d")
    weighted: list[dict[str, Any]] = [plain[0], {**plain[1], "weight": 0}, plain[2], {**plain[3], "weight": 1}]
    row, whole = chat_row(weighted, tokenizer), chat_row(plain, tokenizer)
    assert tokenizer.decode(row.token_ids[row.loss_mask].tolist()) == "d"
    assert tokenizer.decode(row.token_ids.tolist(), skip_special_tokens=False) == tokenizer.decode(
        whole.token_ids.tolist(), skip_special_tokens=False
    )
    with pytest.raises(ChatError, match="no assistant message with a token to train"):
        chat_row(weighted[:2], tokenizer)


def test_an_end_token_is_trained_even_if_the_template_writes_none(tokenizers: dict[str, ModelTokenizer]) -> None:
    tokenizer = tokenizers["no_end"]
    row = chat_row(chat("hi", "yes"), tokenizer)
    assert tokenizer.decode(row.token_ids.tolist(), skip_special_tokens=False) == "[user]hi[assistant]yes<eos>"


def test_a_template_that_rewrites_the_history_is_reported_with_the_position(
    tokenizers: dict[str, ModelTokenizer],
) -> None:
    with pytest.raises(ChatError, match=r"rewrites the history before message 4: at character"):
        chat_row(chat("hi", "yes", "more", "no"), tokenizers["rewrites_history"])


def test_every_bad_line_is_reported_with_number_and_cause(
    tmp_path: Path, tokenizers: dict[str, ModelTokenizer]
) -> None:
    path = write(
        tmp_path / "demos.jsonl",
        {"messages": chat("hi", "yes")},
        "{not json",
        {"chat": []},
        {"messages": [{"role": "user", "content": "only a question"}]},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": 7}, {"role": "assistant", "content": "x"}]},
        {"messages": chat("hi", "y" * 200)},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x", "weight": 0.5}]},
    )
    with pytest.raises(DemonstrationError) as caught:
        read_demonstrations(path, tokenizers["chatml"], max_tokens=100, is_strict=True)
    message = str(caught.value)
    for part in (
        "7 bad lines",
        "line 2: is not JSON",
        'line 3: has no list "messages"',
        "line 4: has no assistant message",
        'line 5: message 1 is not an object with a "role"',
        'line 6: message 1 (user) has no text in "content"',
        "line 7: has 2",
        'line 8: message 2 (assistant) has a "weight" that is not 0 or 1',
    ):
        assert part in message
    kept = read_demonstrations(path, tokenizers["chatml"], max_tokens=100, is_strict=False)
    assert len(kept.rows) == 1
    assert [line.number for line in kept.bad] == [2, 3, 4, 5, 6, 7, 8]


def test_a_line_with_tokens_is_trained_as_it_is_by_a_model_with_the_same_vocabulary_only(
    tmp_path: Path, tokenizers: dict[str, ModelTokenizer]
) -> None:
    tokenizer = tokenizers["rewrites_history"]
    row = chat_row(chat("hi", "yes"), tokenizers["chatml"])
    line = {
        "token_ids": row.token_ids.tolist(),
        "loss_mask": row.loss_mask.astype(int).tolist(),
        "vocabulary": tokenizer.vocabulary_digest,
    }
    found = read_demonstrations(write(tmp_path / "a.jsonl", line), tokenizer, max_tokens=99, is_strict=True)
    assert found.rows[0].token_ids.tolist() == row.token_ids.tolist()
    assert found.rows[0].loss_mask.tolist() == row.loss_mask.tolist()
    bad: dict[str, dict[str, Any]] = {
        "use a model with the same tokenizer": {"vocabulary": "another"},
        "no list of numbers from 0 to": {"token_ids": [10**6, *line["token_ids"][1:]]},
        "numbers that are 0 or 1": {"loss_mask": [0, 1]},
        "not the first one": {"loss_mask": [1] * len(row)},
    }
    path = write(tmp_path / "b.jsonl", line, *({**line, **change} for change in bad.values()))
    skipped = read_demonstrations(path, tokenizer, max_tokens=99, is_strict=False)
    assert len(skipped.rows) == 1
    for cause, entry in zip(bad, skipped.bad, strict=True):
        assert cause in str(entry)


def test_changes_to_other_lines_do_not_move_a_chat_across_the_split(
    tmp_path: Path, tokenizers: dict[str, ModelTokenizer]
) -> None:
    lines = [{"messages": chat(f"question {n}", "yes")} for n in range(60)]
    everything = read_demonstrations(
        write(tmp_path / "a.jsonl", *lines), tokenizers["chatml"], max_tokens=99, is_strict=True
    )
    fewer = read_demonstrations(
        write(tmp_path / "b.jsonl", *lines[:5:-2]), tokenizers["chatml"], max_tokens=99, is_strict=True
    )
    train, validation = everything.split(0.3)
    assert len(train) + len(validation) == 60
    assert 8 <= len(validation) <= 28
    assert {row.token_ids.tobytes() for row in fewer.split(0.3)[1]} < {row.token_ids.tobytes() for row in validation}
