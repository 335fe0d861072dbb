"""One episode of an agent that calls OpenAI's or Anthropic's API: each request is a turn, recorded token by token.

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
from rollbook.contracts.trajectory import CHAT_FACT, EndReason, RolloutSample
from rollbook.rollout.agents.history import ChatHistory, PlayedTurn, Prompt
from rollbook.rollout.agents.lineage import LINEAGE_FACT, Lineage, RequestOrigin, SequenceRole, TrainOnly
from rollbook.rollout.agents.messages import BadChatError, normalised
from rollbook.rollout.agents.streaming import OnPart, TurnStream
from rollbook.rollout.agents.tool_calls import PROMPT_END_CHARS, ParsedText, ToolParser
from rollbook.rollout.assemblers.chat import chat_fact
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler, build_assembler
from rollbook.rollout.contract import Message, Tokenizer
from rollbook.rollout.policy import EpisodePolicy, EpisodeTimeUpError, current_episode, enter_episode
from rollbook.rollout.settings import EpisodeLimits

INLINE_CHARS = 1 << 14
INLINE_MESSAGES = 64
RESERVED_PART, MAX_RESERVE_S = 0.05, 10.0
"""Part of the episode's time, and seconds, in which an agent that did not end is ended and scored."""


class EpisodeOverError(EpisodeError):
    """The episode reached a limit or was closed, so no more turns are sampled."""


class ContextFullError(EpisodeOverError):
    """A conversation of an environment is as long as an episode may be. Harnesses end on it as at the end of a model's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request of any of the APIs."""

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
    left_out: tuple[str, ...] = ()
    """What the agent offered or requested and a policy in training cannot have: built-in tools, services of a provider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    parsed: ParsedText
    finish_reason: str
    """stop, length or tool_calls (OpenAI's API)."""
    num_prompt_tokens: int
    completion: Completion
    messages: Sequence[Message]
    """Those of the request, and the reply."""
    stopped_by: str | None = None
    """The stop string that ended it."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The state of one sequence after its last turn."""

    messages: Sequence[Message]
    is_cut: bool
    """The turn was cut at a limit of tokens. One with a complete tool call is not."""
    number: int
    """Of the turn."""
    chat: Mapping[str, Any]
    """`chat_fact` of its last request."""


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
        train_only: str = TrainOnly.ALL,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.base_url = ""
        self.conversations: dict[str, ProxySession] | None = None
        """By id, if an environment has several conversations in this episode, each with limits and a reward of its own."""
        self._is_conversation = False
        self._open_conversation = partial(
            ProxySession,
            policy=policy,
            tokenizer=tokenizer,
            sampling=sampling,
            limits=limits,
            parser=parser,
            assembler=assembler,
            train_only=train_only,
        )
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
        self._lineage = Lineage()
        self._train_only = TrainOnly(train_only)
        self._conversations: dict[int, Conversation] = {}
        """By sequence."""
        self._rewrites: list[str] = []
        self._overridden: set[str] = set()
        self._left_out: set[str] = set()
        self._cut_turns = 0
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
        within = (found.failure for found in (self.conversations or {}).values())
        return self._failure or next((failure for failure in within if failure is not None), None)

    def conversation(self, name: str) -> "ProxySession":
        """The conversation with this id, which begins with its first request."""
        assert self.conversations is not None
        if name not in self.conversations:
            found = self.conversations[name] = self._open_conversation()
            found._is_conversation, found._is_closed = True, self._is_closed
            # The request is not made in the context of the episode.
            found._episode, found._began = self._episode, self._began
        return self.conversations[name]

    @property
    def messages(self) -> Sequence[Message]:
        """The main conversation up to its last reply."""
        found = self._main()
        return () if found is None else found.messages

    @property
    def last_text(self) -> str:
        return str(self.messages[-1]["content"]) if self.messages else ""

    def _main(self) -> Conversation | None:
        origins = self._lineage.origins()
        mine = [found for at, found in self._conversations.items() if origins[at].owner is SequenceRole.MAIN]
        return max(mine, key=lambda found: found.number, default=None)

    def close(self) -> None:
        """Refuse more requests: an agent that outlives its episode cannot add to it."""
        self._is_closed = True
        for found in (self.conversations or {}).values():
            found.close()

    async def settled(self) -> None:
        """Wait for the turns in progress. An agent may end while it has not read the whole stream of its last turn."""
        await self._is_idle.wait()
        for found in list((self.conversations or {}).values()):
            await found.settled()

    async def out_of_time(self) -> None:
        """Wait until the agent must end, so that its episode can be scored within its time. The episode is then over."""
        reserve_s = min(MAX_RESERVE_S, RESERVED_PART * self._limits.max_seconds)
        while (left_s := self._limits.max_seconds - self._used_s() - reserve_s) > 0:  # noqa: ASYNC110 - not a poll
            # The stopwatch may have been stopped meanwhile, so this may repeat.
            await asyncio.sleep(left_s)
        self._end = self._end or EndReason.TIME

    def _used_s(self) -> float:
        """The stopwatch of the episode excludes waits for a queue or a sandbox."""
        stopwatch = None if self._episode is None else self._episode.time
        return time.monotonic() - self._began if stopwatch is None else stopwatch.used_s

    async def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt that this request would have."""
        messages = self._checked(request)
        prompt = await asyncio.to_thread(self._history.prompt, messages, request.tools, request.template)
        return len(prompt.token_ids)

    def _checked(self, request: ChatRequest) -> list[Message]:
        try:
            check_chat_size(request.messages, request.tools)
        except ValueError as error:
            raise BadChatError(str(error), str(error).partition(":")[0]) from error
        return normalised(request.messages)

    async def complete(
        self, request: ChatRequest, on_part: OnPart | None = None, *, origin: RequestOrigin | None = None
    ) -> ChatTurn:
        """Play one turn. Raises `EpisodeOverError` at a limit, `BadChatError` for a bad request; other errors end the episode.

        `on_part` receives the first parts of the turn while the rest is sampled. `origin`: which agent sent the request.
        """
        if self._is_closed:
            raise EpisodeOverError("this episode is closed")
        if self._end is not None:
            raise EpisodeOverError(f"this episode is over: {self._end}")
        if self._episode is not None:
            enter_episode(self._episode)
        messages, grammar = self._checked(request), self._grammar(request)
        self._in_progress += 1
        self._is_idle.clear()
        try:
            return await self._turn(request, messages, grammar, on_part, origin or RequestOrigin())
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
        self,
        request: ChatRequest,
        messages: Sequence[Message],
        grammar: str | None,
        on_part: OnPart | None,
        origin: RequestOrigin,
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
                self._record(
                    request,
                    messages,
                    prompt,
                    stream.completion(),
                    origin=origin,
                    is_constrained=grammar is not None,
                    seconds=time.monotonic() - began,
                )
            raise
        if sampled.finish_reason is FinishReason.ABORT:
            raise EpisodeError(f"the policy server aborted turn {self.num_turns + 1}")
        if self._is_closed:
            raise EpisodeOverError("this episode was closed during the policy request")
        turn = self._record(
            request,
            messages,
            prompt,
            sampled,
            origin=origin,
            is_constrained=grammar is not None,
            seconds=time.monotonic() - began,
        )
        if grammar is not None:
            self._constrained_turns.append(self.num_turns)
        return turn

    def _record(
        self,
        request: ChatRequest,
        messages: Sequence[Message],
        prompt: Prompt,
        sampled: Completion,
        *,
        origin: RequestOrigin,
        is_constrained: bool,
        seconds: float,
    ) -> ChatTurn:
        text, completion, end_text, stopped_by = self._apply_stop(sampled, request.stop)
        mark = self._assembler.add_turn(prompt.token_ids, completion, seconds=seconds)
        if prompt.rewrite is not None:
            self._rewrites.append(f"before turn {self.num_turns}: {prompt.rewrite}")
        self._overridden.update(request.overridden)
        self._left_out.update(request.left_out)
        # A grammar leaves no room for a thought, even if the prompt begins one.
        follows = "" if is_constrained else prompt.rendered[-PROMPT_END_CHARS:]
        parsed = self._parser(text, request.tools, follows) if request.tools else ParsedText(text)
        self._lineage.add(
            mark.sequence,
            messages,
            parsed,
            origin=origin,
            has_tools=bool(request.tools),
            rendered=prompt.rendered,
            is_continued=prompt.is_continued,
        )
        played = (*messages, parsed.to_message())
        self._history.add(
            normalised(played),
            request.tools,
            PlayedTurn(
                tokens=prompt.token_ids + completion.token_ids.tolist(),
                rendered=prompt.rendered,
                reply=text,
                end_text=end_text,
                prompt=follows,
            ),
        )
        is_turn_cut = not parsed.calls and is_cut(completion, self._sampling)
        self._conversations[mark.sequence] = Conversation(
            played, is_turn_cut, self.num_turns, chat_fact(request.tools, request.template)
        )
        self._cut_turns += is_turn_cut
        return ChatTurn(
            parsed=parsed,
            finish_reason="tool_calls" if parsed.calls else "length" if is_turn_cut else "stop",
            num_prompt_tokens=len(prompt.token_ids),
            completion=completion,
            messages=played,
            stopped_by=stopped_by,
        )

    def _grammar(self, request: ChatRequest) -> str | None:
        """The grammar of a required tool call or response format."""
        form = getattr(self._parser, "name", "of a plug-in")
        try:
            if forced := forced_tools(request.tools, request.tool_choice):
                is_single = request.is_single_call or request.tool_choice != "required"
                return tool_call_grammar(forced, form=form, is_single=is_single)
            return response_format_grammar(request.response_format)
        except ValueError as error:
            field = str(error).partition(":")[0]
            raise BadChatError(str(error), field if field in ("tool_choice", "response_format") else None) from error

    def _check_limits(self, num_prompt: int) -> None:
        turns = self.num_turns + self._in_progress - 1
        end = self._limits.before_turn(turns=turns, num_tokens=num_prompt, seconds=self._used_s())
        if end is None:
            return
        if turns == 0:
            raise EpisodeError(f"no turn was played: {end} with a first prompt of {num_prompt} tokens ({self._limits})")
        self._end = end
        if self._is_conversation and end is EndReason.MAX_TOKENS:
            raise ContextFullError(f"the maximum context length is exceeded: {num_prompt} tokens ({self._limits})")
        raise EpisodeOverError(f"this episode is over: {end} ({self._limits})")

    def _apply_stop(self, sampled: Completion, stops: Sequence[str]) -> tuple[str, Completion, str, str | None]:
        """The text before the first stop string, the tokens up to and including it, the text of a sampled end token, the string.

        Tokens after a stop string do not influence those before it, so leaving them out is exact.
        """
        ids = sampled.token_ids.tolist()
        end_text = ""
        if ids and ids[-1] in self._tokenizer.eos_token_ids:
            end_text = self._tokenizer.decode([ids[-1]], skip_special_tokens=False)
        text = self._tokenizer.decode(ids)
        if not any(stop and stop in text for stop in stops):
            return text, sampled, end_text, None
        decoder, search, before, kept = IncrementalDecoder(self._tokenizer.decode), StopStrings(stops), "", 0
        while search.matched is None and kept < len(ids):
            kept += 1
            before += search.feed(decoder.feed(ids[kept - 1 : kept]))
        before += search.feed(decoder.finish())
        stopped = msgspec.structs.replace(first_tokens(sampled, kept), finish_reason=FinishReason.STOP)
        return before, stopped, "", search.matched

    def build(
        self,
        *,
        reward: float | None,
        invalid_cause: str | None = None,
        solved: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        facts: Mapping[str, Any] | None = None,
        finish_reason: EndReason | None = None,
    ) -> RolloutSample:
        """The sample of the episode. `finish_reason`: the limit that ended the agent, where this session does not know it."""
        all_facts: dict[str, Any] = dict(facts or {})
        if self._rewrites:
            all_facts["rewrites"] = list(self._rewrites)
        if self._overridden:
            all_facts["overridden_sampling"] = sorted(self._overridden)
        if self._constrained_turns:
            # Their logprobs are those of the tokens that the grammar allowed, renormalised.
            all_facts["constrained_turns"] = list(self._constrained_turns)
        if self._left_out:
            all_facts["left_out"] = sorted(self._left_out)
        origins = self._lineage.origins(self._train_only)
        if len(origins) > 1:
            all_facts[LINEAGE_FACT] = [origin.to_fact(at) for at, origin in enumerate(origins)]
        self._assembler.untrained = {at for at, origin in enumerate(origins) if origin.left_out is not None}
        main = self._main()
        is_answer_cut = main is not None and main.is_cut
        if main is not None and main.chat:
            all_facts[CHAT_FACT] = main.chat
        return self._assembler.build(
            reward=reward,
            finish_reason=self._end or finish_reason or (EndReason.MAX_TOKENS if is_answer_cut else EndReason.DONE),
            invalid_cause=invalid_cause,
            solved=solved,
            messages=self.messages,
            metrics={
                "cut_turns": float(self._cut_turns),
                "forks": float(self._assembler.num_forks),
                "seconds": time.monotonic() - self._began,
                **(metrics or {}),
            },
            facts=all_facts,
        )
