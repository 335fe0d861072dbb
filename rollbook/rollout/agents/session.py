"""One episode of an agent that speaks OpenAI's API: each request is a turn, recorded token by token.

The session knows how old weights may be for its group and when its episode is over, because it was opened inside that episode;
requests come in on connections that know neither.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollbook.contracts.errors import EpisodeError, RollbookError
from rollbook.contracts.policy import Completion, FinishReason, SamplingParams
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.agents.history import Answered, ChatHistory
from rollbook.rollout.agents.messages import normalised
from rollbook.rollout.agents.tool_calls import ParsedText, ToolParser
from rollbook.rollout.assemblers.linear import TrajectoryAssembler
from rollbook.rollout.assemblers.registry import build_assembler
from rollbook.rollout.contract import Message, Tokenizer
from rollbook.rollout.episodes.policy import EpisodePolicy, EpisodeTimeUpError, current_episode, enter_episode
from rollbook.rollout.settings.limits import EpisodeLimits


class EpisodeOverError(EpisodeError):
    """The episode reached a limit, or was closed: no further turn is sampled for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What an agent asks for, in either dialect."""

    messages: Sequence[Any]
    tools: Sequence[Mapping[str, Any]] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    """Sampling fields that the agent set and the run decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    said: ParsedText
    text: str
    """As sampled, tool calls included."""
    finish_reason: str
    """As OpenAI names it: stop, length, tool_calls."""
    num_prompt_tokens: int
    completion: Completion
    messages: Sequence[Message]
    """The request's, and the answer."""


class ProxySession:
    """Made by `ProxyServer.session`. `base_url` is all that an agent needs."""

    def __init__(
        self,
        *,
        policy: EpisodePolicy,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        limits: EpisodeLimits,
        parser: ToolParser,
        assembler: str,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.base_url = ""
        self.responses: dict[str, Sequence[Message]] = {}
        """What each answer of the Responses API continued, for `previous_response_id`."""
        self._policy = policy
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._limits = limits
        self._parser = parser
        self._history = ChatHistory(tokenizer, parser)
        self._assembler = build_assembler(assembler, sampling)
        self._episode = current_episode()
        self._began = time.monotonic()
        self._end: EndReason | None = None
        self._failure: RollbookError | None = None
        self._is_closed = False
        self._messages: Sequence[Message] = ()
        self._rewrites: list[str] = []
        self._overridden: set[str] = set()
        self._cut_turns = 0
        self._asking = 0
        """Requests that are being answered. They are turns already, as far as limits go."""

    @property
    def num_turns(self) -> int:
        return self._assembler.num_turns

    @property
    def end_reason(self) -> EndReason | None:
        """The limit that ended the episode; None while none did."""
        return self._end

    @property
    def failure(self) -> RollbookError | None:
        """What kept the policy from answering. An agent may have swallowed it: what it did afterwards is not the policy's doing."""
        return self._failure

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation up to the last answer."""
        return self._messages

    @property
    def last_text(self) -> str:
        return str(self._messages[-1]["content"]) if self._messages else ""

    def close(self) -> None:
        """No request is answered from now on: a program that outlives its episode cannot add to it."""
        self._is_closed = True

    async def complete(self, request: ChatRequest) -> ChatAnswer:
        """Play one turn. Raises `EpisodeOverError` at a limit, `BadChatError` for the agent to mend; others end the episode."""
        if self._is_closed:
            raise EpisodeOverError("this episode is closed")
        if self._end is not None:
            raise EpisodeOverError(f"this episode is over: {self._end}")
        if self._episode is not None:
            enter_episode(self._episode)
        messages = normalised(request.messages)
        self._asking += 1
        try:
            return await self._turn(request, messages)
        except (EpisodeOverError, asyncio.CancelledError):
            raise
        except RollbookError as error:
            self._failure = error
            raise
        finally:
            self._asking -= 1

    async def _turn(self, request: ChatRequest, messages: Sequence[Message]) -> ChatAnswer:
        began = time.monotonic()
        prompt = self._history.prompt(messages, request.tools)
        num_prompt = len(prompt.token_ids)
        if isinstance(self._assembler, TrajectoryAssembler):
            self._assembler.expect_prefix(prompt.token_ids)
        self._require_room(num_prompt, self._seconds())
        most = min(self._sampling.max_tokens, self._limits.tokens_left(num_prompt), request.max_tokens or 2**31)
        try:
            sampled = await self._policy.complete(prompt.token_ids, max_tokens=most)
        except EpisodeTimeUpError as error:
            if self.num_turns == 0:
                raise EpisodeError(f"no turn was played: {error}") from error
            self._end = EndReason.TIME
            raise EpisodeOverError(str(error)) from error
        if sampled.finish_reason is FinishReason.ABORT:
            raise EpisodeError(f"the policy server aborted turn {self.num_turns + 1}")
        if self._is_closed:
            raise EpisodeOverError("this episode was closed while the policy answered")
        text, completion, end_text = self._stopped(sampled, request.stop)
        self._assembler.add_turn(prompt.token_ids, completion, seconds=time.monotonic() - began)
        if prompt.rewrite is not None:
            self._rewrites.append(f"before turn {self.num_turns}: {prompt.rewrite}")
        self._overridden.update(request.overridden)
        said = (self._parser if request.tools else ParsedText)(text)
        self._messages = (*messages, _as_message(said))
        self._history.add(
            normalised(self._messages),
            request.tools,
            Answered(
                tokens=prompt.token_ids + completion.token_ids.tolist(),
                rendered=prompt.rendered,
                said=text,
                end_text=end_text,
            ),
        )
        return ChatAnswer(
            said=said,
            text=text,
            finish_reason=self._finish(completion, said),
            num_prompt_tokens=num_prompt,
            completion=completion,
            messages=self._messages,
        )

    def _seconds(self) -> float:
        """The episode's own: waits for a queue or a sandbox are not."""
        if self._episode is not None and self._episode.time is not None:
            return self._episode.time.used_s
        return time.monotonic() - self._began

    def _require_room(self, num_prompt: int, seconds: float) -> None:
        turns = self.num_turns + self._asking - 1
        end = self._limits.before_turn(turns=turns, num_tokens=num_prompt, seconds=seconds)
        if end is None:
            return
        if turns == 0:
            raise EpisodeError(f"no turn was played: {end} with a first prompt of {num_prompt} tokens ({self._limits})")
        self._end = end
        raise EpisodeOverError(f"this episode is over: {end} ({self._limits})")

    def _stopped(self, sampled: Completion, stops: Sequence[str]) -> tuple[str, Completion, str]:
        """The text, the tokens up to the first stop text, the text of the end token.

        Sampling goes from left to right, so tokens after a stop text are as if they had never been sampled: they are left out.
        """
        ids = sampled.token_ids.tolist()
        end_text = ""
        if ids and ids[-1] in self._tokenizer.eos_token_ids:
            end_text = self._tokenizer.decode([ids[-1]], skip_special_tokens=False)
        text = self._tokenizer.decode(ids)
        places = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
        if not places:
            return text, sampled, end_text
        kept = next(n for n in range(1, len(ids) + 1) if any(s and s in self._tokenizer.decode(ids[:n]) for s in stops))
        cut = Completion(
            token_ids=sampled.token_ids[:kept],
            logprobs=sampled.logprobs[:kept],
            versions=sampled.versions[:kept],
            finish_reason=FinishReason.STOP,
        )
        return text[: min(places)], cut, ""

    def _finish(self, completion: Completion, said: ParsedText) -> str:
        if said.calls:
            return "tool_calls"
        if completion.finish_reason is FinishReason.LENGTH:
            self._cut_turns += 1
            return "length"
        return "stop"

    def build(
        self,
        *,
        reward: float | None,
        invalid_cause: str | None = None,
        solved: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> RolloutSample:
        """The record of the episode, with what happened to its history on the way."""
        told: dict[str, Any] = dict(facts or {})
        if self._rewrites:
            told["rewrites"] = list(self._rewrites)
        if self._overridden:
            told["overridden_sampling"] = sorted(self._overridden)
        return self._assembler.build(
            reward=reward,
            finish_reason=self._end or EndReason.DONE,
            invalid_cause=invalid_cause,
            solved=solved,
            messages=self._messages,
            metrics={
                "cut_turns": float(self._cut_turns),
                "forks": float(self._assembler.num_forks),
                "seconds": time.monotonic() - self._began,
                **(metrics or {}),
            },
            facts=told,
        )


def _as_message(said: ParsedText) -> Message:
    """The answer as agents send it back."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.calls:
        message["tool_calls"] = [call.to_openai() for call in said.calls]
    return message
