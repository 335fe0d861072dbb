"""The rollout function of the demo with a scripted policy: it records exactly the sampled and observed tokens."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rollbook.contracts.policy import Completion, FinishReason, OnTokens, SamplingParams
from rollbook.contracts.trajectory import EndReason
from rollbook.envs.catalog import EnvironmentSource
from rollbook.envs.config import EnvConfig
from rollbook.rollout.contract import Message, RolloutSetup
from rollbook.rollout.policy import EpisodePolicy
from rollbook.rollout.settings import EpisodeLimits
from rollbook.telemetry.events import EventLog

WORDS = ["<bos>", *map(str, range(16)), "higher", "lower", "correct", "invalid"]
EXAMPLE = Path(__file__).parents[3] / "rollbook" / "demo" / "number_guessing.py"


class WordTokenizer:
    """One token for each word, like the tokenizer that the run builds."""

    def encode(self, text: str) -> list[int]:
        return [WORDS.index(word) for word in text.split()]

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(WORDS[token] for token in token_ids if token or not skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return WORDS[token_id].encode()

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> str:
        raise NotImplementedError("the token-native example renders no messages")

    @property
    def identity(self) -> str:
        return "words"

    @property
    def vocabulary_digest(self) -> str:
        return "words"

    @property
    def vocab_size(self) -> int:
        return len(WORDS)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return ()


class ScriptedGuesses:
    """A policy that samples these words, one in each turn."""

    def __init__(self, *words: str) -> None:
        self.words = list(words)
        self.prompts = list[list[int]]()

    async def complete(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        min_publication: int = 0,
        timeout_s: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        assert sampling.max_tokens == 1
        self.prompts.append(list(prompt_ids))
        return Completion(
            token_ids=np.array([WORDS.index(self.words.pop(0))], np.int32),
            logprobs=np.array([-2.0], np.float32),
            versions=np.array([4], np.int32),
            finish_reason=FinishReason.LENGTH,
        )


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_number_guessing", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def setup(policy: ScriptedGuesses, **limits: Any) -> RolloutSetup:
    sampling = SamplingParams(max_tokens=1)
    return RolloutSetup(
        policy=EpisodePolicy(policy, sampling),
        tokenizer=WordTokenizer(),
        sampling=sampling,
        limits=EpisodeLimits(**limits),
        open_environment=EnvironmentSource(EnvConfig()).open,
        log=EventLog("test"),
    )


async def test_a_game_is_recorded_token_by_token(example: ModuleType) -> None:
    policy = ScriptedGuesses("7", "11", "9")
    sample = await example.make_rollout(setup(policy))({"secret": 9, "low": 0, "high": 15})
    (row,) = sample.sequences
    assert [WORDS[token] for token in row.token_ids] == ["<bos>", "7", "higher", "11", "lower", "9"]
    assert row.loss_mask.tolist() == [False, True, False, True, False, True]
    assert row.versions.tolist() == [-1, 4, -1, 4, -1, 4]
    assert [len(prompt) for prompt in policy.prompts] == [1, 3, 5]
    assert (sample.solved, sample.finish_reason) == (True, EndReason.DONE)
    assert sample.reward == pytest.approx(1 - 0.4 * 2 / 5)
    assert sample.facts == {"secret": 9, "guesses": [7, 11, 9]}


async def test_an_unsolved_game_earns_nothing(example: ModuleType) -> None:
    policy = ScriptedGuesses("1", "invalid", "higher", "<bos>", "1", "1")
    sample = await example.make_rollout(setup(policy))({"secret": 9, "low": 0, "high": 15})
    assert (sample.reward, sample.solved, sample.num_trained) == (0.0, False, 6)
    assert sample.facts["guesses"] == [1, None, None, None, 1, 1]


async def test_a_limit_of_the_run_ends_the_game_and_is_the_finish_reason(example: ModuleType) -> None:
    policy = ScriptedGuesses("1", "2")
    sample = await example.make_rollout(setup(policy, max_turns=2))({"secret": 9, "low": 0, "high": 15})
    assert (sample.reward, sample.finish_reason) == (0.0, EndReason.MAX_TURNS)


def test_the_tasks_are_rows_with_ids(example: ModuleType) -> None:
    assert [row["secret"] for row in example.tasks()] == list(range(16))
