"""A small environment (guess a digit) with a scripted policy, a real tokenizer and a real chat template."""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from rollbook.contracts.policy import Completion, FinishReason, OnTokens, SamplingParams
from rollbook.contracts.task import Observation
from rollbook.inference.client.client import open_policy_client
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.rollout.contract import RolloutSetup
from rollbook.rollout.policy import EpisodePolicy
from rollbook.rollout.settings import EpisodeLimits
from rollbook.telemetry.events import EventLog

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,!?<>/_\n"
SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}...{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that rewrites history, like those that drop earlier reasoning."""


def letter_tokenizer(template: str = CHATML) -> ModelTokenizer:
    """One token per character, and three special tokens."""
    fast = fast_letters()
    return ModelTokenizer(fast, chat_template=template, eos_token_ids=[SPECIAL.index("<|im_end|>")])


def fast_letters() -> FastTokenizer:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    fast = FastTokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = Split("", behavior="isolated")
    fast.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    fast.decoder = Fuse()
    return fast


class ScriptedPolicy:
    """Guesses digits at random and records its requests and completions."""

    def __init__(self, tokenizer: ModelTokenizer, *, seed: int = 0, delay_s: float = 0.0, publication: int = 7) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._delay_s = delay_s
        self._publication = publication
        self.requests: list[tuple[list[int], list[int], int]] = []

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        min_publication: int = 0,
        timeout_s: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        await asyncio.sleep(self._delay_s)
        ids = self._tokenizer.encode(str(self._rng.randrange(10)) + "<|im_end|>")[: sampling.max_tokens]
        self.requests.append((list(prompt_ids), ids, min_publication))
        return completion(ids, version=max(self._publication, min_publication), is_truncated=len(ids) < 2)


def completion(ids: Sequence[int], *, version: int = 7, is_truncated: bool = False) -> Completion:
    return Completion(
        token_ids=np.asarray(ids, dtype=np.int32),
        logprobs=np.full(len(ids), -0.5, dtype=np.float32),
        versions=np.full(len(ids), version, dtype=np.int32),
        finish_reason=FinishReason.LENGTH if is_truncated else FinishReason.STOP,
    )


class GuessingEnvironment:
    def __init__(self) -> None:
        self._secret = 0
        self._hangs_at: int | None = None
        self._turns = 0

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        self._secret = int(task["secret"])
        self._hangs_at = task.get("hangs_at")
        return Observation(text="guess a digit")

    async def step(self, action: str) -> Observation:
        self._turns += 1
        if self._turns == self._hangs_at:
            await asyncio.sleep(3600)
        guess = int(action)
        if guess == self._secret:
            return Observation(
                text="yes", reward=1.0 / self._turns, done=True, solved=True, facts={"turns": self._turns}
            )
        return Observation(text="higher" if guess < self._secret else "lower", solved=False)

    async def close(self) -> None:
        pass


@asynccontextmanager
async def open_guessing() -> AsyncIterator[GuessingEnvironment]:
    yield GuessingEnvironment()


def setup_of(
    *,
    settings: Mapping[str, Any] | None = None,
    template: str = CHATML,
    limits: EpisodeLimits | None = None,
    **policy: Any,
) -> tuple[RolloutSetup, ScriptedPolicy]:
    tokenizer = letter_tokenizer(template)
    sampling = SamplingParams(max_tokens=4)
    scripted = ScriptedPolicy(tokenizer, **policy)
    setup = RolloutSetup(
        policy=EpisodePolicy(scripted, sampling),
        tokenizer=tokenizer,
        sampling=sampling,
        limits=limits or EpisodeLimits(max_turns=4),
        open_environment=open_guessing,
        log=EventLog("test"),
        settings=settings or {},
    )
    return setup, scripted


@asynccontextmanager
async def open_never() -> AsyncIterator[GuessingEnvironment]:
    """A sandbox that never becomes ready."""
    await asyncio.sleep(3600)
    yield GuessingEnvironment()


@asynccontextmanager
async def build(settings: dict[str, Any]) -> AsyncIterator[RolloutSetup]:
    """The builder of workers under test: `tests.parts.rollout.guessing:build`."""
    if cause := settings.get("fail_setup"):
        raise RuntimeError(cause)
    setup, _ = setup_of(
        settings=settings.get("user"),
        delay_s=settings.get("delay_s", 0.0),
        seed=settings.get("seed", 0),
        publication=settings.get("publication", 7),
    )
    if settings.get("sandbox") == "never_ready":
        setup = dataclasses.replace(setup, open_environment=open_never)
    if url := settings.get("policy_url"):
        async with open_policy_client(url, request_s=settings["request_s"]) as client:
            yield dataclasses.replace(
                setup, policy=EpisodePolicy(client, setup.sampling, request_s=settings["request_s"])
            )
        return
    yield setup
