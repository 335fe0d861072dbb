"""Text around token ids: the tokenizer protocol, names of tokens, tool calls in streams."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from rollbook.contracts.output_formats import OPENING, StopStrings, ToolCall, parse_tool_calls


class TextTokenizer(Protocol):
    """What the server needs of a tokenizer. The caller of `build_app` provides it, so no tokenizer library is imported here."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def special_token_ids(self) -> Sequence[int]:
        """Control tokens, which are no text."""

    def encode_prompt(self, text: str) -> list[int]:
        """A text prompt, with the special tokens that the model expects at its start."""

    def encode(self, text: str) -> list[int]:
        """Text without added special tokens. A rendered chat contains its own."""

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
