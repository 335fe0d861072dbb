"""Text around token ids: the tokenizer protocol, names of tokens, tool calls in streams."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from rollbook.contracts.decoding import load_json
from rollbook.contracts.output_formats import OPENING, StopStrings, ToolCall, parse_tool_calls
from rollbook.inference.request import BadRequestError


class TextTokenizer(Protocol):
    """What the server needs of a tokenizer. The caller of `build_app` provides it, so no tokenizer library is imported here."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def vocabulary_digest(self) -> str:
        """Digest of all tokens and their ids."""

    @property
    def special_token_ids(self) -> Sequence[int]:
        """Control tokens, which are no text."""

    def encode_prompt(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """A text prompt, with the special tokens that the model expects at its start; only the first `max_tokens`."""

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Text without added special tokens, which a rendered chat contains; only the first `max_tokens`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be an incomplete character."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat template applied to the messages, with `template` as additional arguments.

        Raises `EpisodeError` if the template rejects them.
        """


TokenName: TypeAlias = Callable[[int], str]
"""How a token is written next to its logprob."""


def token_id_name(token_id: int) -> str:
    """The id in vLLM's format."""
    return f"token_id:{token_id}"


def token_names(tokenizer: TextTokenizer, *, is_id: bool | None) -> TokenName:
    return token_id_name if is_id else lambda token: tokenizer.token_bytes(token).decode(errors="replace")


class ToolCallStream:
    """Passes streamed text on up to the first tool call, and holds the rest until it can be parsed."""

    def __init__(self) -> None:
        self._opening = StopStrings([OPENING])
        self._held = ""

    def feed(self, text: str) -> str:
        if self._opening.matched is not None:
            self._held += text
            return ""
        passed = self._opening.feed(text)
        self._held = self._opening.rest
        return passed

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The held text without its valid calls, and those calls."""
        return parse_tool_calls(self._opening.finish() + self._held)


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them. Raises `BadRequestError`."""
    if not messages:
        raise BadRequestError("messages: is empty; at least one message is required", param="messages")
    return [_template_message(message, at) for at, message in enumerate(messages)]


def _template_message(message: dict[str, Any], at: int) -> dict[str, Any]:
    """A message as templates expect it: content as one text, tool call arguments as objects."""
    if not isinstance(message.get("role"), str):
        raise BadRequestError(f"messages: number {at} has no role", param="messages")
    result = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise BadRequestError(f"messages: number {at} has parts that are not text", param="messages")
        result["content"] = "".join(str(part.get("text", "")) for part in content)
    elif content is None:
        result["content"] = ""
    elif not isinstance(content, str):
        raise BadRequestError(f"messages: the content of number {at} is not text", param="messages")
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise BadRequestError(f"messages: the tool_calls of number {at} are not a list", param="messages")
        result["tool_calls"] = [_template_call(call, at) for call in calls]
    return result


def _template_call(call: Any, at: int) -> dict[str, Any]:
    try:
        function = dict(call["function"])
    except (TypeError, ValueError, KeyError) as error:
        raise BadRequestError(f"messages: a tool call of number {at} has no function", param="messages") from error
    if isinstance(function.get("arguments"), str):
        # A policy may have written arguments that are not JSON. They stay text.
        with suppress(ValueError):
            function["arguments"] = load_json(function["arguments"] or "{}")
    return {**call, "function": function}
