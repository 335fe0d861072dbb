"""Published chat templates, as TRL's package ships them (`make test-trl`): all through the check of templates, and those of
Qwen3 and Llama 3 in the default chat rollout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollbook.contracts.policy import Completion, FinishReason, SamplingParams
from rollbook.rollout.assemblers.chat import MessageTrajectoryAssembler
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from tests.parts.rollout import published_templates

PAGE = Path(__file__).parents[3] / "docs" / "token-fidelity.md"
TEMPLATES = Path(__file__).parents[3] / ".venvs" / "trl" / "lib"
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def tokenizer_with(template: str, *, eos: str) -> ModelTokenizer:
    """A tokenizer of bytes with the control tokens of both models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(SPECIAL)
    return ModelTokenizer(
        fast,
        chat_template=template,
        special_tokens={"bos_token": "<|begin_of_text|>", "eos_token": eos},
        eos_token_ids=[vocabulary[eos]],
    )


def template_text(name: str) -> str:
    found = list(TEMPLATES.glob(f"python3*/site-packages/trl/chat_templates/{name}.jinja"))
    if not found:
        pytest.skip("needs TRL in its own environment: make test-trl")
    return found[0].read_text(encoding="utf-8")


def answer(tokenizer: ModelTokenizer, text: str) -> Completion:
    ids = [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]
    return Completion(
        token_ids=np.array(ids, np.int32),
        logprobs=np.full(len(ids), -0.5, np.float32),
        versions=np.zeros(len(ids), np.int32),
        finish_reason=FinishReason.STOP,
    )


def test_the_table_of_published_templates_is_what_they_do() -> None:
    if (templates := published_templates.folder()) is None:
        pytest.skip("needs TRL in its own environment: make test-trl")
    assert published_templates.table(templates) in PAGE.read_text(encoding="utf-8"), (
        "python -m tests.parts.rollout.published_templates writes it"
    )


def play(tokenizer: ModelTokenizer, answers: list[str], **options: Any) -> tuple[MessageTrajectoryAssembler, list[str]]:
    """A chat with these answers: the assembler, and the text of each prompt."""
    chat = MessageTrajectoryAssembler(tokenizer, SamplingParams(), **options)
    prompts = []
    for number, text in enumerate(answers):
        chat.add_message("user", f"question {number}")
        prompts.append(tokenizer.decode(chat.next_prompt(), skip_special_tokens=False))
        chat.add_completion(answer(tokenizer, text))
    return chat, prompts


def test_the_template_of_llama_3_extends_one_sequence() -> None:
    tokenizer = tokenizer_with(template_text("llama3"), eos="<|eot_id|>")
    chat, prompts = play(tokenizer, ["four", "five", "six"])
    built = chat.build(reward=1.0)
    assert len(built.sequences) == 1
    assert prompts[-1] == tokenizer.render(chat.messages[:-1], add_generation_prompt=True)
    assert built.num_trained == sum(len(text) + 1 for text in ("four", "five", "six"))


def test_reasoning_that_the_template_of_qwen3_removes_starts_a_new_sequence() -> None:
    tokenizer = tokenizer_with(template_text("qwen3"), eos="<|im_end|>")
    answers = ["<think>\nhmm\n</think>\n\nfour", "<think>\naha\n</think>\n\nfive"]
    chat, prompts = play(tokenizer, answers, on_rewrite="fork")
    built = chat.build(reward=1.0)
    assert len(built.sequences) == 2
    assert "hmm" not in prompts[1], "the policy sees what the template renders"
    assert prompts[1] == tokenizer.render(chat.messages[:-1], add_generation_prompt=True)
    trained = [
        tokenizer.decode(row.token_ids[row.loss_mask].tolist(), skip_special_tokens=False) for row in built.sequences
    ]
    assert trained == [f"{text}<|im_end|>" for text in answers], "each sampled token is trained once"


def test_arguments_and_tools_reach_the_template_of_qwen3() -> None:
    tokenizer = tokenizer_with(template_text("qwen3"), eos="<|im_end|>")
    _, thinking = play(tokenizer, ["four"])
    _, silent = play(tokenizer, ["four"], template={"enable_thinking": False})
    _, with_tools = play(tokenizer, ["four"], tools=[TOOL])
    assert silent[0] == thinking[0] + "<think>\n\n</think>\n\n"
    assert '"name": "add"' in with_tools[0]
    assert '"name": "add"' not in thinking[0]


def test_without_thinking_the_template_of_qwen3_extends_one_sequence_or_forks() -> None:
    """The empty reasoning of the generation prompt is not in the history, so this template rewrites it, too."""
    tokenizer = tokenizer_with(template_text("qwen3"), eos="<|im_end|>")
    chat, prompts = play(tokenizer, ["four", "five"], template={"enable_thinking": False}, on_rewrite="fork")
    assert prompts[1] == tokenizer.render(
        chat.messages[:-1], add_generation_prompt=True, template={"enable_thinking": False}
    )
    assert chat.build(reward=1.0).num_trained == len("four") + len("five") + 2
