"""The protocol of a remote rollout service, and the checks of its responses.

The service gets a row, the URL of the policy server and the sampling parameters. It returns turns, each with the exact tokens that
the engine consumed and produced, and a reward. Both sides send the identity of their tokenizer, because token ids of another
tokenizer would train nonsense.
"""

import math
from typing import Any, Protocol

import msgspec
import numpy as np

from rollbook.contracts.decoding import MAX_DEPTH, recordable
from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.policy import Completion, FinishReason, SamplingParams
from rollbook.contracts.trajectory import EndReason, RolloutSample, TurnMark
from rollbook.rollout.assemblers.assembler import AssemblyError, require_same_sampling
from rollbook.rollout.assemblers.tokens import build_assembler
from rollbook.rollout.settings import EpisodeLimits

TOKENIZER_MISMATCH = "tokenizer_mismatch"


RECORD_DEPTH = MAX_DEPTH - 4
"""Of messages and facts, which the JSON of a reply surrounds."""


class TokenizerMismatchError(RunError):
    """Service and run use different tokenizers. Retries do not help."""


class BadReplyError(EpisodeError):
    """The response of a service is not a valid trajectory."""


class RolloutRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /rollouts."""

    request_id: str
    """Identifies the episode: a repeated request joins it."""
    row: dict[str, Any]
    policy_url: str
    """Offers `/v1/completions` with token ids; its responses contain logprobs and versions."""
    tokenizer_id: str
    sampling: SamplingParams
    limits: EpisodeLimits
    deadline_s: float
    min_publication: int = 0
    """Must be sent with every policy request, so that weights older than the group's admission do not sample for it."""
    chat_url: str | None = None
    """Base URL of an OpenAI-compatible endpoint of this episode. The run records the tokens of requests to it, each under the
    conversation that the header `X-Session-ID` names; the reply has `conversations` instead of `turns`."""


class ServiceTurn(msgspec.Struct, frozen=True, kw_only=True):
    prompt_ids: list[int]
    """All tokens that the engine consumed for this turn."""
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    """Publication of each token, as reported by the policy server."""
    finish_reason: FinishReason = FinishReason.STOP
    seconds: float = 0.0
    reward: float | None = None
    """For advantages of turns. If a turn has one, turns without one have 0."""
    state: str | None = None
    """A key of the state in which the turn was sampled, for `gigpo`. Either all turns have one, or none."""


class ServiceConversation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a conversation that was played at `chat_url`."""

    session: str
    """Its `X-Session-ID`."""
    agent: str = "agent"
    is_trained: bool = True
    """False: played by the policy, and not a sample: a simulated user, a judge."""
    reward: float | None = None
    invalid_cause: str | None = None
    is_scoring_error: bool = False
    """The cause is an error of a reward function: the episode is not played again."""
    finish_reason: EndReason | None = None
    scores: dict[str, float] = {}
    """Value of each reward function, without its weight."""
    metrics: dict[str, float] = {}


class RolloutReply(msgspec.Struct, frozen=True, kw_only=True):
    tokenizer_id: str
    sampling: SamplingParams
    turns: list[ServiceTurn]
    reward: float | None = None
    invalid_cause: str | None = None
    finish_reason: EndReason | None = None
    """None: `max_tokens` if the last turn was cut (`length`), otherwise `done`."""
    solved: bool | None = None
    messages: list[dict[str, Any]] | None = None
    metrics: dict[str, float] = {}
    facts: dict[str, Any] = {}
    conversations: list[ServiceConversation] = []


class RolloutService(Protocol):
    """Plays episodes, usually in another process."""

    @property
    def tokenizer_id(self) -> str: ...

    async def play(self, request: RolloutRequest) -> RolloutReply | None:
        """None drops the sample. Cancelled together with the episode."""


def require_same_tokenizer(ours: str, theirs: str, *, where: str) -> None:
    if ours != theirs:
        raise TokenizerMismatchError(
            f"{where} uses tokenizer {theirs}, this run {ours}: token ids have different meanings. Give both the same "
            "model directory (tokenizer.json, special tokens and chat template)"
        )


def sample_of(reply: RolloutReply, request: RolloutRequest, *, assembler: str, where: str) -> RolloutSample:
    """The sample of a reply. Raises an error that says which check failed."""
    require_same_tokenizer(request.tokenizer_id, reply.tokenizer_id, where=where)
    rows = build_assembler(assembler, request.sampling)
    try:
        require_same_sampling(request.sampling, reply.sampling)
        for number, turn in enumerate(reply.turns, start=1):
            rows.add_turn(turn.prompt_ids, _completion(turn, number, request, where), seconds=turn.seconds)
    except AssemblyError as error:
        raise BadReplyError(f"{where}: its turns do not chain: {error}") from error
    is_scored = reply.reward is not None and math.isfinite(reply.reward)
    cause = None if is_scored else reply.invalid_cause or f"could not be scored: {reply.reward}"
    rewards = [turn.reward for turn in reply.turns]
    states = [turn.state for turn in reply.turns if turn.state is not None]
    try:
        sample = rows.build(
            reward=reply.reward if is_scored else None,
            invalid_cause=cause,
            finish_reason=reply.finish_reason,
            solved=reply.solved,
            messages=reply.messages,
            metrics=reply.metrics,
            facts=reply.facts,
        )
        return sample.with_turns(
            rewards=None if all(reward is None for reward in rewards) else [reward or 0.0 for reward in rewards],
            states=states or None,
        )
    except (ValueError, AssemblyError) as error:
        raise BadReplyError(f"{where}: its reply is not a valid sample: {error}") from error


def _completion(turn: ServiceTurn, number: int, request: RolloutRequest, where: str) -> Completion:
    if not len(turn.token_ids) == len(turn.logprobs) == len(turn.versions):
        raise BadReplyError(
            f"{where}: turn {number} has {len(turn.token_ids)} tokens, {len(turn.logprobs)} logprobs and "
            f"{len(turn.versions)} versions; each token must have one of each"
        )
    if turn.versions and min(turn.versions) < request.min_publication:
        raise BadReplyError(
            f"{where}: turn {number} was sampled from publication {min(turn.versions)}, but the group was admitted at "
            f"{request.min_publication}; send min_publication with every policy request"
        )
    return Completion(
        token_ids=np.array(turn.token_ids, dtype=np.int32),
        logprobs=np.array(turn.logprobs, dtype=np.float32),
        versions=np.array(turn.versions, dtype=np.int32),
        finish_reason=turn.finish_reason,
    )


def reply_of(sample: RolloutSample, *, tokenizer_id: str) -> RolloutReply:
    """The reply for a sample of a rollout function."""
    nothing = [None] * len(sample.turns)
    rewards = nothing if (found := sample.turn_rewards) is None else found.tolist()
    states = nothing if (numbers := sample.turn_states) is None else [str(number) for number in numbers]
    return RolloutReply(
        tokenizer_id=tokenizer_id,
        sampling=sample.sampling,
        turns=[
            _turn(sample, turn, reward=reward, state=state)
            for turn, reward, state in zip(sample.turns, rewards, states, strict=True)
        ],
        reward=sample.reward,
        invalid_cause=sample.invalid_cause,
        finish_reason=sample.finish_reason,
        solved=sample.solved,
        messages=None if sample.messages is None else recordable(sample.messages, RECORD_DEPTH),
        metrics=dict(sample.metrics),
        facts=recordable(sample.facts, RECORD_DEPTH),
    )


def _turn(sample: RolloutSample, turn: TurnMark, *, reward: float | None, state: str | None) -> ServiceTurn:
    row, tokens = sample.sequences[turn.sequence], slice(turn.start, turn.end)
    return ServiceTurn(
        prompt_ids=row.token_ids[: turn.start].tolist(),
        token_ids=row.token_ids[tokens].tolist(),
        logprobs=row.logprobs[tokens].tolist(),
        versions=row.versions[tokens].tolist(),
        seconds=turn.seconds,
        reward=reward,
        state=state,
    )
