"""The rollout contract: the function that a user writes, its arguments, and how it is loaded.

    async def rollout_fn(row: dict) -> RolloutSample | None

Each call plays one episode; None drops the sample. `rollout.function` names a `make_rollout(setup) -> rollout_fn`, or the async
function itself: `rollout_fn(row)`, or `rollout_fn(row, setup)` if it needs the policy.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollbook.contracts.errors import EpisodeError, RollbookError, RunError
from rollbook.contracts.plugin import PluginError, load_plugin
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.ports import Environment
from rollbook.contracts.trajectory import EndReason, RolloutSample
from rollbook.contracts.user_errors import describe_error, did_you_mean
from rollbook.rollout.policy import EpisodePolicy
from rollbook.rollout.settings import ROLLOUTS, EpisodeLimits, rollout_name
from rollbook.telemetry.events import EventLog

SettingsModel = TypeVar("SettingsModel", bound=BaseModel)
RolloutFn: TypeAlias = Callable[[dict[str, Any]], Awaitable[RolloutSample | None]]
Message: TypeAlias = Mapping[str, Any]
"""A chat message: `role`, `content` and other fields that the model's template reads."""


class RenderError(EpisodeError):
    """The chat template rejected these messages."""


class Tokenizer(Protocol):
    """Converts text to tokens and back, and renders messages with the chat template. See `chat.tokenizer.ModelTokenizer`."""

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`. Special tokens in the text are recognised; none are added."""

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens of a text at the start of a sequence, with the model's start token if it has one."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be an incomplete character."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of the messages. `template` are further arguments of the chat template."""

    @property
    def identity(self) -> str:
        """Digest of vocabulary, merges, special tokens and template."""

    @property
    def vocabulary_digest(self) -> str:
        """Digest of all tokens and their ids."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""


class ChatSession(Protocol):
    """One episode of an agent that speaks OpenAI's or Anthropic's API to `base_url`. `agents.session.ProxySession` is one."""

    @property
    def id(self) -> str:
        """The server accepts it as an API key too, for agents that send all sessions to one base URL."""

    @property
    def base_url(self) -> str: ...

    @property
    def num_turns(self) -> int: ...

    @property
    def end_reason(self) -> EndReason | None:
        """The limit that ended the episode, or None."""

    @property
    def failure(self) -> RollbookError | None:
        """The error that a policy request raised, even if the agent ignored it."""

    @property
    def messages(self) -> Sequence[Message]: ...

    @property
    def last_text(self) -> str: ...

    @property
    def conversations(self) -> Mapping[str, "ChatSession"] | None:
        """By id, in a session that was opened with `has_conversations`."""

    async def out_of_time(self) -> None:
        """Wait until the agent must end, shortly before the episode's time is over."""

    async def settled(self) -> None:
        """Wait for the turns in progress, before `build`. An agent may end without reading all of its last stream."""

    def build(
        self,
        *,
        reward: float | None,
        invalid_cause: str | None = None,
        solved: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        facts: Mapping[str, Any] | None = None,
        finish_reason: EndReason | None = None,
    ) -> RolloutSample: ...


class OpenChatSession(Protocol):
    def __call__(
        self,
        *,
        assembler: str = "branching",
        tool_parser: str = "hermes",
        train_only: str = "all",
        has_conversations: bool = False,
    ) -> AbstractAsyncContextManager[ChatSession]: ...


def _no_proxy(
    *,
    assembler: str = "branching",
    tool_parser: str = "hermes",
    train_only: str = "all",
    has_conversations: bool = False,
) -> AbstractAsyncContextManager[ChatSession]:
    raise RunError(f"this worker was set up without a proxy, so no {assembler} session can be opened in it")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSetup:
    """The argument of `make_rollout`. It lives as long as the worker process."""

    policy: EpisodePolicy
    tokenizer: Tokenizer
    sampling: SamplingParams
    limits: EpisodeLimits
    open_environment: Callable[[], AbstractAsyncContextManager[Environment]]
    """Opens the environment of one episode: `async with setup.open_environment() as env: ...`."""
    log: EventLog
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The table `rollout.settings` of the config."""
    policy_url: str = ""
    """URL of the policy server, for agents that run elsewhere."""
    policy_token: str | None = None
    """The token that the policy server requires."""
    open_proxy_session: OpenChatSession = _no_proxy
    """An endpoint for an agent: `async with setup.open_proxy_session() as session: run_agent(session.base_url)`."""
    resources: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Closed with the worker: for what a rollout function opens once for all its episodes."""

    def read_settings(self, model: type[SettingsModel]) -> SettingsModel:
        """`settings` as this model. Raises `RunError` with every fault."""
        try:
            return model.model_validate(dict(self.settings))
        except ValidationError as error:
            faults = [(".".join(map(str, e["loc"])), _message(e, model)) for e in error.errors()]
            joined = "; ".join(f"{at}: {message}" if at else message for at, message in faults)
            raise RunError(f"rollout.settings: {joined}") from error


def _message(error: ErrorDetails, model: type[BaseModel]) -> str:
    if error["type"] != "extra_forbidden" or len(error["loc"]) != 1:
        return error["msg"].removeprefix("Value error, ")
    fields = model.model_fields
    known = f"; the fields are {', '.join(fields)}"
    return f"unknown field{did_you_mean(str(error['loc'][0]), fields) or known}"


MakeRollout: TypeAlias = Callable[[RolloutSetup], RolloutFn]


def load_rollout(path: str) -> MakeRollout:
    """Load a built-in rollout function by its short name, or a user's from `module` or `module:attribute`."""
    found: Any = load_plugin(rollout_name(path), setting="rollout.function", default="make_rollout", builtin=ROLLOUTS)
    return _factory_of(found, path) if _is_async(found) else found


def _is_async(function: Any) -> bool:
    """Whether it is an async function, or an object with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _factory_of(rollout: Callable[..., Awaitable[RolloutSample | None]], path: str) -> MakeRollout:
    """A `make_rollout` for a rollout function that is named itself. It takes a row, or a row and the setup."""
    signature = inspect.signature(rollout)
    required = [
        one.name
        for one in signature.parameters.values()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if required == ["setup"]:
        raise PluginError(
            f"rollout.function = {path!r}: make_rollout is async; it must be a plain function that returns the async one"
        )
    try:
        signature.bind(*range(max(1, len(required))))
        if len(required) > 2:
            raise TypeError("too many parameters")
    except TypeError:
        raise PluginError(
            f"rollout.function = {path!r}: an async rollout function takes (row) or (row, setup); this one takes {signature}"
        ) from None
    if len(required) == 2:
        return lambda setup: functools.partial(_with_setup, rollout, setup)
    return lambda _: rollout


async def _with_setup(
    rollout: Callable[..., Awaitable[RolloutSample | None]], setup: RolloutSetup, row: dict[str, Any]
) -> RolloutSample | None:
    return await rollout(row, setup)


def build_rollout(make: MakeRollout, setup: RolloutSetup, *, path: str) -> RolloutFn:
    """Call `make_rollout` and check its return value."""
    try:
        rollout = make(setup)
    except RunError:
        raise  # the message names the setting
    except Exception as error:
        raise PluginError(f"rollout.function = {path!r}: make_rollout raised {describe_error(error)}") from error
    if not _is_async(rollout):
        raise PluginError(
            f"rollout.function = {path!r}: make_rollout returned a {type(rollout).__name__}; it must return an async function "
            f"that takes a row and returns a RolloutSample or None"
        )
    return rollout
