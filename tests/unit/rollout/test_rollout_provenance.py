"""The author of each token: the policy, a message, or the template."""

from pathlib import Path

from openai import AsyncOpenAI

from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
from rollbook.rollout.chat.provenance import spans_of
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from tests.parts.rollout.agents import agent_setup, in_order, word_tokenizer
from tests.parts.rollout.guessing import completion
from tests.services.test_rollout_agents_server import CALL, WEATHER


def authors_of(sample: RolloutSample, sequence: int, tokenizer: ModelTokenizer) -> list[tuple[str, str]]:
    row = sample.sequences[sequence]
    turns = [turn for turn in sample.turns if turn.sequence == sequence]
    spans = spans_of(row, turns, sample.messages, tokenizer)
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])], "every token has one author"
    assert spans[-1].end == len(row)
    return [
        (span.author, tokenizer.decode(row.token_ids[span.start : span.end].tolist(), skip_special_tokens=False))
        for span in spans
    ]


async def test_every_span_of_a_tool_calling_episode_names_its_author(tmp_path: Path) -> None:
    async with agent_setup(tmp_path, in_order(CALL, "It is sunny.<|im_end|>")) as (setup, _):
        async with setup.open_proxy_session() as session, AsyncOpenAI(base_url=session.base_url, api_key="x") as client:
            first = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Paris?"}], tools=[WEATHER]
            )
            message = first.choices[0].message
            assert message.tool_calls
            await client.chat.completions.create(
                model="m",
                messages=[
                    {"role": "user", "content": "Paris?"},
                    message.model_dump(exclude_none=True),
                    {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"},
                ],
                tools=[WEATHER],
            )
        sample = session.build(reward=1.0)
    spans = authors_of(sample, 0, word_tokenizer())
    assert [author for author, _ in spans] == [
        "template",
        "user",
        "template",
        "policy",
        "template",
        "tool",
        "template",
        "policy",
    ]
    texts = dict(spans[1:6])
    assert texts["user"] == "Paris?"
    assert texts["tool"] == "21 degrees"
    assert [text for author, text in spans if author == "policy"] == [CALL, "It is sunny.<|im_end|>"]


def test_an_episode_without_messages_has_policy_and_context_only() -> None:
    assembler = TrajectoryAssembler(SamplingParams())
    assembler.add_prompt([5, 6])
    assembler.add_completion(completion([7]))
    assembler.add_observation([8])
    assembler.add_completion(completion([9]))
    spans = authors_of(assembler.build(reward=1.0), 0, word_tokenizer())
    assert [author for author, _ in spans] == ["context", "policy", "context", "policy"]
