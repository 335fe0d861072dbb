"""A rollout function for tasksets of verifiers, which run unchanged in a virtual environment of their own.

    [env]
    name = "verifiers:addition-v1"
    python = ".venvs/verifiers/bin/python"

Each worker starts one service in that environment and sends it episodes by the protocol of remote rollouts. verifiers runs the
harness, its tools and the rewards; its requests to the model arrive at the proxy of the worker, which records the engine's own
tokens. A trace that verifiers marks as trainable is a sample. With `samples_per_episode = n`, one episode has n of them (the
environment compares them, for example), and n samples of a group are one episode.
"""

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

from rollbook.contracts.errors import EpisodeError, RollbookError, RunError, TransientError
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.contract import ChatSession, RolloutFn, RolloutSetup
from rollbook.rollout.groups.failures import UnscorableError
from rollbook.rollout.policy import current_episode
from rollbook.rollout.remote.client import Exchange, request_of
from rollbook.rollout.remote.protocol import BadReplyError, RolloutReply, ServiceConversation
from rollbook.rollout.settings import score_key
from rollbook.rollout.verifiers.process import VerifiersService, require_python


class VerifiersSettings(BaseModel, frozen=True, extra="forbid"):
    """`rollout.settings` of this rollout function. `env.name = "verifiers:NAME"` fills the first three."""

    taskset: str = Field(min_length=1)
    """The id of the installed taskset."""

    python: str = Field(min_length=1)
    """The Python of the virtual environment in which verifiers and the taskset are installed: `env.python`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """The `[env]` block of verifiers: `taskset`, `agent.harness`, `agent.runtime` and others: `env.args`."""

    samples_per_episode: int = Field(default=1, ge=1)
    """Trainable traces of one episode. Each is a sample with a reward of its own; `completions_per_prompt` must be a multiple."""

    assembler: Literal["linear", "branching", "per_turn"] = "branching"
    """How turns become sequences, as in the rollout function `agent`."""

    tool_parser: str = "hermes"
    """Format of tool calls, as in the rollout function `agent`."""


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    settings = setup.read_settings(VerifiersSettings)
    require_python(settings.python)
    service = VerifiersService(
        taskset=settings.taskset,
        python=settings.python,
        args=settings.args,
        limits=setup.limits,
        resources=setup.resources,
    )
    episodes = _Episodes(setup, settings, service)
    return episodes.sample if settings.samples_per_episode > 1 else episodes.only_sample


@dataclass(slots=True)
class _Shared:
    """An episode whose samples belong to several calls of the rollout function."""

    playing: asyncio.Task[list[RolloutSample | RollbookError]]
    taken: int = 0


class _Episodes:
    def __init__(self, setup: RolloutSetup, settings: VerifiersSettings, service: VerifiersService) -> None:
        self._setup = setup
        self._settings = settings
        self._service = service
        self._shared: dict[str, _Shared] = {}
        """The last episode of each group that is being played."""

    async def only_sample(self, row: dict[str, Any]) -> RolloutSample | None:
        return _sample((await self._play(row))[0])

    async def sample(self, row: dict[str, Any]) -> RolloutSample | None:
        """One sample of an episode that other calls for the same group share."""
        episode = current_episode()
        group = "" if episode is None else episode.group_id
        shared = self._shared.get(group)
        if shared is None or shared.taken == self._settings.samples_per_episode or shared.playing.done():
            shared = self._shared[group] = _Shared(asyncio.create_task(self._play(row), name=f"verifiers.{group}"))
        number = shared.taken
        shared.taken += 1
        # The clock of the call that started the episode decides when it has taken too long; those of the others stand still.
        clock = None if episode is None or number == 0 else episode.time
        try:
            with nullcontext() if clock is None else clock.waiting():
                return _sample((await asyncio.shield(shared.playing))[number])
        except asyncio.CancelledError:
            if number > 0 and shared.playing.cancelled():
                raise EpisodeError("the episode was cancelled by the call that started it") from None
            raise
        finally:
            if number == 0:
                shared.playing.cancel()
                if self._shared.get(group) is shared:
                    del self._shared[group]

    async def _play(self, row: dict[str, Any]) -> list[RolloutSample | RollbookError]:
        """The samples of one episode; for one that cannot be built, the error."""
        url = await self._service.url()
        async with self._setup.open_proxy_session(
            assembler=self._settings.assembler, tool_parser=self._settings.tool_parser, has_conversations=True
        ) as session:
            request = request_of(row, self._setup, chat_url=session.base_url)
            try:
                reply = await Exchange(request, url=url, token=self._service.token).run()
            except TransientError as error:
                raise await self._service.failure() or error from error
            await session.settled()
            if session.failure is not None:
                # verifiers may have caught it, and scored what came before it.
                raise session.failure
            if reply is None:
                raise BadReplyError("the service of verifiers returned no result")
            return self._samples(reply, session)

    def _samples(self, reply: RolloutReply, session: ChatSession) -> list[RolloutSample | RollbookError]:
        trained = [found for found in reply.conversations if found.is_trained]
        if not reply.conversations or reply.invalid_cause is not None:
            raise EpisodeError(reply.invalid_cause or "the episode has no trace")
        wanted = self._settings.samples_per_episode
        if len(trained) != wanted:
            # A failed environment may lack some of its traces; a complete one has the wrong number in every episode.
            cause = next((found.invalid_cause for found in trained if found.invalid_cause), None)
            if cause is not None:
                raise EpisodeError(f"the episode has {len(trained)} of {wanted} trainable traces: {cause}")
            raise RunError(
                f"rollout.settings.samples_per_episode is {wanted}, and an episode of verifiers:{self._settings.taskset} has "
                f"{len(trained)} trainable traces ({', '.join(found.agent for found in trained)}): set it to {len(trained)}"
            )
        return [_built(found, session, has_siblings=wanted > 1) for found in trained]


def _built(result: ServiceConversation, session: ChatSession, *, has_siblings: bool) -> RolloutSample | RollbookError:
    assert session.conversations is not None
    played = session.conversations.get(result.session)
    if result.is_scoring_error:
        return UnscorableError(result.invalid_cause)
    if played is None or played.num_turns == 0:
        return EpisodeError(result.invalid_cause or "the harness ended without a request to the policy")
    scores = {score_key(name): value for name, value in result.scores.items()}
    return played.build(
        reward=result.reward,
        invalid_cause=None if result.reward is not None else result.invalid_cause or "verifiers gave no reward",
        metrics={**scores, **result.metrics},
        facts={"trace": result.session, "agent": result.agent} if has_siblings else {"trace": result.session},
        finish_reason=result.finish_reason,
    )


def _sample(found: RolloutSample | RollbookError) -> RolloutSample:
    if isinstance(found, RollbookError):
        raise found
    return found
