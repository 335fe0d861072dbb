"""Chat templates in the style of recent families through the assembler: what extends a sequence, and what forks it."""

from pathlib import Path

import numpy as np
import pytest

from rollbook.contracts.policy import Completion, FinishReason, SamplingParams
from rollbook.rollout.assemblers.chat import MessageTrajectoryAssembler
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from tests.parts.rollout.family_templates import STYLES, Style, table

PAGE = Path(__file__).parents[3] / "docs" / "token-fidelity.md"
EXTENDING = {
    "Qwen3.8 (thinking)",
    "Qwen3-Coder",
    "Qwen2.5, Qwen3-Instruct, Hermes",
    "Llama 3.1 to 3.3",
    "Gemma 3",
    "Mistral Small 3, Magistral",
    "Phi 4, Granite 3 and 4",
}


def completion(tokenizer: ModelTokenizer, text: str) -> Completion:
    ids = [*tokenizer.encode(text), *tokenizer.eos_token_ids[:1]]
    return Completion(
        token_ids=np.array(ids, np.int32),
        logprobs=np.full(len(ids), -0.5, np.float32),
        versions=np.zeros(len(ids), np.int32),
        finish_reason=FinishReason.STOP,
    )


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.families)
@pytest.mark.parametrize("thought", ["", "<think>\nhmm\n</think>\n\n"], ids=["plain", "thinking"])
def test_every_sampled_token_is_trained_once_whatever_the_template_does_with_history(
    style: Style, thought: str
) -> None:
    tokenizer = style.tokenizer()
    chat = MessageTrajectoryAssembler(tokenizer, SamplingParams(), on_rewrite="fork")
    if style.opens_thought:
        thought = "hmm\n</think>\n\n"
    replies = [f"{thought}four", f"{thought}five", f"{thought}six"]
    for number, reply in enumerate(replies):
        chat.add_message("user", f"question {number}")
        prompt = tokenizer.decode(chat.next_prompt(), skip_special_tokens=False)
        # The policy sees what the template renders: either the same text, or that text with the sampled tokens in it.
        assert prompt.endswith(tokenizer.render(chat.messages, add_generation_prompt=True)[-12:])
        chat.add_completion(completion(tokenizer, reply))
    built = chat.build(reward=1.0)
    trained = [
        tokenizer.decode(row.token_ids[row.loss_mask].tolist(), skip_special_tokens=False) for row in built.sequences
    ]
    assert "".join(trained) == "".join(f"{reply}{style.eos}" for reply in replies)
    is_rewriting = style.families == "gpt-oss (harmony)" or (
        bool(thought) and style.families not in EXTENDING | {"Mistral 7B v0.3 to Nemo"}
    )
    assert len(built.sequences) == (3 if is_rewriting else 1)


def test_the_table_of_the_page_is_what_the_templates_do() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "python -m tests.parts.rollout.family_templates writes it"
