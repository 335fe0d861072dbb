"""A real policy server whose scripted engine records its tokens, a real tokenizer, and the agents' server in front of it.

Replies are sampled one byte per token, while the tokenizer merges bytes into words: tokenising a reply again would be detected.
"""

import sys
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from rollbook.concurrency.clock import Clock
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.trajectory import RolloutSample
from rollbook.inference.client.client import open_policy_client
from rollbook.inference.config import InferenceConfig, ScriptedConfig
from rollbook.inference.engines.scripted import open_engine
from rollbook.inference.server.app import build_app, serve
from rollbook.rollout.agents.server import open_proxy_sessions
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.rollout.contract import RolloutSetup
from rollbook.rollout.policy import EpisodePolicy
from rollbook.rollout.settings import EpisodeLimits
from rollbook.telemetry.events import EventLog
from tests.parts.inference.models import publish
from tests.parts.rollout.guessing import open_guessing

SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>")
CORPUS = [
    "system user assistant tool You are a helpful assistant. What is the weather in Paris today? It is sunny.",
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call> <tool_response> 21 degrees',
    "# Tools You may call one or more functions to assist with the user query. <tools> </tools> type function",
]

TOOLS_TEMPLATE = (
    (
        "{%- if tools %}<|im_start|>system\n"
        "{%- if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}# Tools\n"
        "{%- for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
        "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{%- endif %}"
        "{%- for m in messages %}"
        "{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        "{%- elif m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{%- for call in m.tool_calls or [] %}{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
        "<|im_end|>\n{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    .replace("%}\n", "%}{{ '\\n' }}")
    .replace("<|im_end|>\n", "<|im_end|>{{ '\\n' }}")
)
"""ChatML with tools, as used by Qwen."""

FORGETS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops the text before </think> in earlier turns, as templates of many reasoning models do."""
THINKS_ON_REQUEST = "{% if enable_thinking %}Think. {% endif %}" + FORGETS_THINKING


def bpe_vocabulary() -> Tokenizer:
    """Byte pairs learned from a few lines: any text can be encoded, words of the corpus in few tokens."""
    fast = Tokenizer(BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    fast.train_from_iterator(CORPUS, trainer)
    fast.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return fast


def word_tokenizer(template: str = TOOLS_TEMPLATE) -> ModelTokenizer:
    fast = bpe_vocabulary()
    return ModelTokenizer(fast, chat_template=template, eos_token_ids=fast.encode("<|im_end|>").ids)


def byte_by_byte(tokenizer: ModelTokenizer, text: str) -> list[int]:
    """Tokens of `text` that differ from those the tokenizer would choose."""
    ids: list[int] = []
    for part in text.split("<|im_end|>"):
        ids += [token for letter in part for token in tokenizer.encode(letter)]
        ids += tokenizer.eos_token_ids
    return ids[:-1]


Reply = Callable[[str], str]
"""Maps the text of a prompt to the reply of the policy."""


@dataclass
class EngineRecord:
    """The tokens that the engine consumed and produced, recorded by the engine."""

    tokenizer: ModelTokenizer
    reply: Reply
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    url: str = ""
    """Of the policy server."""

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        text = self.tokenizer.decode(list(prompt), skip_special_tokens=False)
        produced = byte_by_byte(self.tokenizer, self.reply(text))
        self.turns.append((list(prompt), produced))
        return produced


def in_order(*replies: str) -> Reply:
    """These replies, one after the other."""
    left = iter(replies)
    return lambda _prompt: next(left)


@asynccontextmanager
async def agent_setup(
    tmp_path: Path,
    reply: Reply,
    *,
    template: str = TOOLS_TEMPLATE,
    limits: EpisodeLimits | None = None,
    settings: dict[str, Any] | None = None,
    max_tokens: int = 200,
    publication: int = 3,
    clock: Clock | None = None,
    max_model_len: int = 8192,
) -> AsyncIterator[tuple[RolloutSetup, EngineRecord]]:
    """A rollout setup with a policy server over HTTP, and the record of its engine. `clock` paces the engine's steps."""
    tokenizer = word_tokenizer(template)
    record = EngineRecord(tokenizer, reply)
    config = InferenceConfig(
        engine="scripted", scripted=ScriptedConfig(vocab_size=tokenizer.vocab_size, max_model_len=max_model_len)
    )
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=tokenizer.eos_token_ids)
    allowed = limits or EpisodeLimits(max_turns=12, max_total_tokens=max_model_len, max_seconds=60)
    async with open_engine(config, script=record, clock=clock) as engine:
        weights = tmp_path / "weights.safetensors"
        await engine.load_weights(publish(weights, torch.nn.Linear(1, 1), publication), weights)
        async with (
            serve(build_app(engine, config, tokenizer=tokenizer)) as url,
            open_policy_client(url, request_s=30) as client,
        ):
            record.url = url
            policy = EpisodePolicy(client, sampling)
            async with (
                open_proxy_sessions(policy, tokenizer, sampling, allowed) as open_proxy_session,
                AsyncExitStack() as resources,
            ):
                yield (
                    RolloutSetup(
                        policy=policy,
                        tokenizer=tokenizer,
                        sampling=sampling,
                        limits=allowed,
                        open_environment=open_guessing,
                        log=EventLog("test"),
                        settings=settings or {},
                        open_proxy_session=open_proxy_session,
                        resources=resources,
                    ),
                    record,
                )


SCRIPTED_AGENT = """#!/usr/bin/env python3
import os, urllib.request, json

request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps({"model": "policy", "messages": [{"role": "user", "content": "?"}]}).encode(),
    headers={"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
urllib.request.urlopen(request, timeout=60).read()
open("late.txt", "w").close()
os.system(%r)
"""


def scripted_agent(directory: Path, command: str) -> dict[str, Any]:
    """Settings of a program in this directory that asks the policy once and then runs a shell command."""
    program = directory / "mini"
    directory.mkdir(exist_ok=True)
    program.write_text(SCRIPTED_AGENT % command)
    program.chmod(0o755)
    path = f"{directory}:{Path(sys.executable).resolve().parent}:/usr/bin:/bin"
    return {"agent": "mini-swe-agent", "environment": {"PATH": path}}


def assert_matches_engine(
    sample: RolloutSample, record: EngineRecord, *, publication: int = 3, untrained: Collection[int] = ()
) -> None:
    """The sample contains every recorded turn exactly, and trains nothing else.

    Agents with several threads may end turns in another order than they began. `untrained`: sequences that a setting leaves out.
    """
    turns = [(turn, sample.sequences[turn.sequence]) for turn in sample.turns]
    assert len(turns) == len(record.turns)
    left = list(record.turns)
    for turn, row in turns:
        consumed = row.token_ids[: turn.start].tolist()
        kept = turn.end - turn.start
        produced = row.token_ids[turn.start : turn.end].tolist()
        found = next((one for one in left if one[0] == consumed and one[1][:kept] == produced), None)
        assert found is not None, "the engine did not consume and produce these tokens"
        left.remove(found)
        assert row.versions[turn.start : turn.end].tolist() == [publication] * kept
        assert row.loss_mask[turn.start : turn.end].all() != (turn.sequence in untrained)
    trained = [turn.end - turn.start for turn, _ in turns if turn.sequence not in untrained]
    assert sample.num_trained == sum(trained)
