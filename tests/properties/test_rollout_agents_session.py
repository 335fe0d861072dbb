"""With any rewriting of history, the sample contains exactly the tokens that the engine consumed and produced."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.agents.session import ChatRequest, ProxySession
from rollbook.rollout.agents.tool_calls import parse_hermes
from rollbook.rollout.policy import EpisodePolicy
from rollbook.rollout.settings import EpisodeLimits
from tests.parts.rollout.agents import FORGETS_THINKING, TOOLS_TEMPLATE, byte_by_byte, word_tokenizer
from tests.parts.rollout.guessing import completion

TOKENIZERS = {"keeps": word_tokenizer(TOOLS_TEMPLATE), "forgets": word_tokenizer(FORGETS_THINKING)}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
REPLIES = st.sampled_from(
    [
        "yes",
        "",
        "  spaced \n",
        "hm</think>no",
        'so<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>',
        "<tool_call>{broken",
        "日本 é",
        "It is sunny in Paris today.",
    ]
)
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["continue", "continue", "cut", "edit", "restart"]), REPLIES, st.text("ab 日", max_size=3)
    ),
    min_size=1,
    max_size=6,
)


class RecordingPolicy:
    """Records what the engine consumes and produces."""

    def __init__(self) -> None:
        self.reply = ""
        self.turns: list[tuple[list[int], list[int]]] = []

    async def complete(self, prompt_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Completion:
        ids = byte_by_byte(TOKENIZERS["keeps"], f"{self.reply}<|im_end|>")
        self.turns.append((list(prompt_ids), ids))
        return completion(ids, version=len(self.turns))


async def play(template: str, moves: list[tuple[str, str, str]]) -> tuple[RolloutSample, RecordingPolicy]:
    policy, sampling = RecordingPolicy(), SamplingParams(max_tokens=500)
    session = ProxySession(
        policy=EpisodePolicy(policy, sampling),
        tokenizer=TOKENIZERS[template],
        sampling=sampling,
        limits=EpisodeLimits(max_turns=20, max_total_tokens=100_000),
        parser=parse_hermes,
        assembler="branching",
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
    for move, reply, remark in moves:
        match move:
            case "cut" if len(messages) > 2:
                messages = messages[:-2]
            case "edit":
                messages[0] = {"role": "user", "content": f"begin {remark}!"}
            case "restart":
                messages = [{"role": "user", "content": remark or "?"}]
        policy.reply = reply
        turn = await session.complete(ChatRequest(messages=messages, tools=TOOLS))
        calls = [call.to_openai() for call in turn.parsed.calls]
        message: dict[str, Any] = {"role": "assistant", "content": turn.parsed.content or None}
        messages.append({**message, "tool_calls": calls} if calls else message)
        if calls:
            messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": remark})
        else:
            messages.append({"role": "user", "content": remark})
    return session.build(reward=1.0), policy


@settings(max_examples=60)
@given(moves=MOVES, template=st.sampled_from(["keeps", "forgets"]))
def test_with_any_rewriting_of_history_the_sample_matches_the_engine(
    moves: list[tuple[str, str, str]], template: str
) -> None:
    sample, policy = asyncio.run(play(template, moves))
    assert len(sample.turns) == len(policy.turns)
    for number, (turn, (consumed, produced)) in enumerate(zip(sample.turns, policy.turns, strict=True), start=1):
        row = sample.sequences[turn.sequence]
        assert row.token_ids[: turn.start].tolist() == consumed
        assert row.token_ids[turn.start : turn.end].tolist() == produced
        assert np.all(row.versions[turn.start : turn.end] == number)
    assert sample.num_trained == sum(len(produced) for _, produced in policy.turns)
    if template == "keeps" and all(move == "continue" for move, _, _ in moves):
        assert len(sample.sequences) == 1, sample.facts
