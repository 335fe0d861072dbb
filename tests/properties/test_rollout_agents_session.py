"""Whatever an agent does with its history, the sample holds exactly what the engine consumed and produced."""

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
SAID = st.sampled_from(
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
    st.tuples(st.sampled_from(["go on", "go on", "cut", "edit", "begin anew"]), SAID, st.text("ab 日", max_size=3)),
    min_size=1,
    max_size=6,
)


class RecordingPolicy:
    """The engine's side of the story."""

    def __init__(self) -> None:
        self.says = ""
        self.turns: list[tuple[list[int], list[int]]] = []

    async def complete(self, prompt_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Completion:
        ids = byte_by_byte(TOKENIZERS["keeps"], f"{self.says}<|im_end|>")
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
    for move, says, remark in moves:
        match move:
            case "cut" if len(messages) > 2:
                messages = messages[:-2]
            case "edit":
                messages[0] = {"role": "user", "content": f"begin {remark}!"}
            case "begin anew":
                messages = [{"role": "user", "content": remark or "?"}]
        policy.says = says
        answer = await session.complete(ChatRequest(messages=messages, tools=TOOLS))
        calls = [call.to_openai() for call in answer.parsed.calls]
        reply: dict[str, Any] = {"role": "assistant", "content": answer.parsed.content or None}
        messages.append({**reply, "tool_calls": calls} if calls else reply)
        if calls:
            messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": remark})
        else:
            messages.append({"role": "user", "content": remark})
    return session.build(reward=1.0), policy


@settings(max_examples=60, deadline=None)
@given(moves=MOVES, template=st.sampled_from(["keeps", "forgets"]))
def test_whatever_an_agent_does_with_its_history_the_sample_is_the_engines_own_record(
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
    if template == "keeps" and all(move == "go on" for move, _, _ in moves):
        assert len(sample.sequences) == 1, sample.facts
