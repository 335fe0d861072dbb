"""One episode of an agent that calls OpenAI's API: each request is a turn, recorded token by token.

A session is opened inside its episode, so it knows the group's minimum publication and the time left. The HTTP requests do not.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from rollbook.contracts.errors import EpisodeError, RollbookError
from rollbook.contracts.output_formats import (
    IncrementalDecoder,
    StopStrings,
    check_chat_size,
    forced_tools,
    response_format_grammar,
    tool_call_grammar,
)
from rollbook.contracts.policy import Completion, FinishReason, SamplingParams, first_tokens, is_cut
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.rollout.agents.history import ChatHistory, PlayedTurn, Prompt
from rollbook.rollout.agents.messages import BadChatError, normalised
from rollbook.rollout.agents.streaming import OnPart, TurnStream
from rollbook.rollout.agents.tool_calls import PARSERS, ParsedText, ToolParser
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler, build_assembler
from rollbook.rollout.contract import Message, Tokenizer
from rollbook.rollout.policy import EpisodePolicy, EpisodeTimeUpError, current_episode, enter_episode
from rollbook.rollout.settings import EpisodeLimits

INLINE_CHARS = 1 << 14
INLINE_MESSAGES = 64


class EpisodeOverError(EpisodeError):
    """The episode reached a limit or was closed, so no more turns are sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request of either API."""

    messages: Sequence[Any]
    tools: Sequence[Mapping[str, Any]] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    """Sampling fields that the agent set and the run overrides."""
    tool_choice: Any = None
    """auto, none, required, or one function (OpenAI's API)."""
    is_single_call: bool = False
    response_format: Any = None
    top_logprobs: int = 0
    template: Mapping[str, Any] | None = None
    """More arguments of the chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    parsed: ParsedText
    finish_reason: str
    """stop, length or tool_calls (OpenAI's API)."""
    num_prompt_tokens: int
    completion: Completion
    messages: Sequence[Message]
    """Those of the request, and the reply."""


class ProxySession:
    """Opened by `ProxyServer.session`. The agent needs only its `base_url`."""

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
        """Conversation up to each response of the Responses API, for `previous_response_id`."""
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
        self._is_cut = False
        """The last turn was cut at a limit of tokens. One with a complete tool call is not."""
        self._constrained_turns: list[int] = []
        self._in_progress = 0
        """Requests in progress. Limits count them as turns."""
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    @property
    def num_turns(self) -> int:
        return self._assembler.num_turns

    @property
    def end_reason(self) -> EndReason | None:
        """The limit that ended the episode, if any."""
        return self._end

    @property
    def failure(self) -> RollbookError | None:
        """The error of a failed policy request, if any. The agent may have caught it; what it did afterwards must not be scored."""
        return self._failure

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation up to the last reply."""
        return self._messages

    @property
    def last_text(self) -> str:
        return str(self._messages[-1]["content"]) if self._messages else ""

    def close(self) -> None:
        """Refuse more requests: an agent that outlives its episode cannot add to it."""
        self._is_closed = True

    async def settled(self) -> None:
        """Wait for the turns in progress. An agent may end while it has not read the whole stream of its last turn."""
        await self._is_idle.wait()

    async def complete(self, request: ChatRequest, on_part: OnPart | None = None) -> ChatTurn:
        """Play one turn. Raises `EpisodeOverError` at a limit, `BadChatError` for a bad request; other errors end the episode.

        `on_part` receives the first parts of the turn while the rest is sampled.
        """
        if self._is_closed:
            raise EpisodeOverError("this episode is closed")
        if self._end is not None:
            raise EpisodeOverError(f"this episode is over: {self._end}")
        if self._episode is not None:
            enter_episode(self._episode)
        try:
            check_chat_size(request.messages, request.tools)
        except ValueError as error:
            raise BadChatError(str(error), str(error).partition(":")[0]) from error
        messages, grammar = normalised(request.messages), self._grammar(request)
        self._in_progress += 1
        self._is_idle.clear()
        try:
            return await self._turn(request, messages, grammar, on_part)
        except (EpisodeOverError, asyncio.CancelledError):
            raise
        except RollbookError as error:
            self._failure = error
            raise
        finally:
            self._in_progress -= 1
            if not self._in_progress:
                self._is_idle.set()

    async def _turn(
        self, request: ChatRequest, messages: Sequence[Message], grammar: str | None, on_part: OnPart | None
    ) -> ChatTurn:
        began = time.monotonic()
        # A long chat takes long to render and to encode: not in the event loop, which serves all episodes of the worker.
        size = sum(len(message["content"]) for message in messages)
        is_long = size > INLINE_CHARS or len(messages) > INLINE_MESSAGES
        make_prompt = partial(self._history.prompt, messages, request.tools, request.template)
        prompt = await asyncio.to_thread(make_prompt) if is_long else make_prompt()
        num_prompt = len(prompt.token_ids)
        if isinstance(self._assembler, TrajectoryAssembler):
            self._assembler.expect_prefix(prompt.token_ids)
        self._check_limits(num_prompt)
        max_tokens = min(self._sampling.max_tokens, self._limits.tokens_left(num_prompt), request.max_tokens or 2**31)
        parser = self._parser if request.tools else None
        stream = None
        if on_part is not None:
            stream = TurnStream(self._tokenizer, stops=request.stop, parser=parser, on_part=on_part)
        try:
            sampled = await self._policy.complete(
                prompt.token_ids,
                max_tokens=max_tokens,
                sampling=msgspec.structs.replace(self._sampling, grammar=grammar, top_logprobs=request.top_logprobs)
                if grammar is not None or request.top_logprobs
                else None,
                on_tokens=None if stream is None else stream.feed,
            )
        except EpisodeTimeUpError as error:
            if self.num_turns == 0:
                raise  # not as another error, which would be retried until a turn is fast enough
            self._end = EndReason.TIME
            raise EpisodeOverError(str(error)) from error
        except asyncio.CancelledError:
            # The agent stopped reading its stream. Its turn ends with the tokens so far.
            if stream is not None and stream.received and not self._is_closed:
                self._record(request, messages, prompt, stream.completion(), seconds=time.monotonic() - began)
            raise
        if sampled.finish_reason is FinishReason.ABORT:
            raise EpisodeError(f"the policy server aborted turn {self.num_turns + 1}")
        if self._is_closed:
            raise EpisodeOverError("this episode was closed during the policy request")
        turn = self._record(request, messages, prompt, sampled, seconds=time.monotonic() - began)
        if grammar is not None:
            self._constrained_turns.append(self.num_turns)
        return turn

    def _record(
        self, request: ChatRequest, messages: Sequence[Message], prompt: Prompt, sampled: Completion, *, seconds: float
    ) -> ChatTurn:
        text, completion, end_text = self._apply_stop(sampled, request.stop)
        self._assembler.add_turn(prompt.token_ids, completion, seconds=seconds)
        if prompt.rewrite is not None:
            self._rewrites.append(f"before turn {self.num_turns}: {prompt.rewrite}")
        self._overridden.update(request.overridden)
        parsed = (self._parser if request.tools else ParsedText)(text)
        self._messages = (*messages, parsed.to_message())
        self._history.add(
            normalised(self._messages),
            request.tools,
            PlayedTurn(
                tokens=prompt.token_ids + completion.token_ids.tolist(),
                rendered=prompt.rendered,
                reply=text,
                end_text=end_text,
            ),
        )
        self._is_cut = not parsed.calls and is_cut(completion, self._sampling)
        self._cut_turns += self._is_cut
        return ChatTurn(
            parsed=parsed,
            finish_reason="tool_calls" if parsed.calls else "length" if self._is_cut else "stop",
            num_prompt_tokens=len(prompt.token_ids),
            completion=completion,
            messages=self._messages,
        )

    def _grammar(self, request: ChatRequest) -> str | None:
        """The grammar of a required tool call or response format."""
        form = next((name for name, parser in PARSERS.items() if parser is self._parser), "of a plug-in")
        try:
            if forced := forced_tools(request.tools, request.tool_choice):
                is_single = request.is_single_call or request.tool_choice != "required"
                return tool_call_grammar(forced, form=form, is_single=is_single)
            return response_format_grammar(request.response_format)
        except ValueError as error:
            field = str(error).partition(":")[0]
            raise BadChatError(str(error), field if field in ("tool_choice", "response_format") else None) from error

    def _check_limits(self, num_prompt: int) -> None:
        # The stopwatch of the episode excludes waits for a queue or a sandbox.
        stopwatch = None if self._episode is None else self._episode.time
        seconds = time.monotonic() - self._began if stopwatch is None else stopwatch.used_s
        turns = self.num_turns + self._in_progress - 1
        end = self._limits.before_turn(turns=turns, num_tokens=num_prompt, seconds=seconds)
        if end is None:
            return
        if turns == 0:
            raise EpisodeError(f"no turn was played: {end} with a first prompt of {num_prompt} tokens ({self._limits})")
        self._end = end
        raise EpisodeOverError(f"this episode is over: {end} ({self._limits})")

    def _apply_stop(self, sampled: Completion, stops: Sequence[str]) -> tuple[str, Completion, str]:
        """The text before the first stop string, the tokens up to and including it, and the text of a sampled end token.

        Tokens after a stop string do not influence those before it, so leaving them out is exact.
        """
        ids = sampled.token_ids.tolist()
        end_text = ""
        if ids and ids[-1] in self._tokenizer.eos_token_ids:
            end_text = self._tokenizer.decode([ids[-1]], skip_special_tokens=False)
        text = self._tokenizer.decode(ids)
        if not any(stop and stop in text for stop in stops):
            return text, sampled, end_text
        decoder, search, before, kept = IncrementalDecoder(self._tokenizer.decode), StopStrings(stops), "", 0
        while search.matched is None and kept < len(ids):
            kept += 1
            before += search.feed(decoder.feed(ids[kept - 1 : kept]))
        before += search.feed(decoder.finish())
        return before, msgspec.structs.replace(first_tokens(sampled, kept), finish_reason=FinishReason.STOP), ""

    def build(
        self,
        *,
        reward: float | None,
        invalid_cause: str | None = None,
        solved: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> RolloutSample:
        """The sample of the episode."""
        all_facts: dict[str, Any] = dict(facts or {})
        if self._rewrites:
            all_facts["rewrites"] = list(self._rewrites)
        if self._overridden:
            all_facts["overridden_sampling"] = sorted(self._overridden)
        if self._constrained_turns:
            # Their logprobs are those of the tokens that the grammar allowed, renormalised.
            all_facts["constrained_turns"] = list(self._constrained_turns)
        return self._assembler.build(
            reward=reward,
            finish_reason=self._end or (EndReason.MAX_TOKENS if self._is_cut else EndReason.DONE),
            invalid_cause=invalid_cause,
            solved=solved,
            messages=self._messages,
            metrics={
                "cut_turns": float(self._cut_turns),
                "forks": float(self._assembler.num_forks),
                "seconds": time.monotonic() - self._began,
                **(metrics or {}),
            },
            facts=all_facts,
        )
