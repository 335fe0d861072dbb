"""Messages of `POST /v1/chat/completions` in OpenAI's format, whole and streamed."""

from typing import Any, Literal

import msgspec

from rollbook.contracts.output_formats import check_chat_size, forced_tools, response_format_grammar, tool_call_grammar
from rollbook.inference.wire.completions import SamplingBody, Usage, VersionSpan, checked_top_logprobs


class ChatBody(SamplingBody, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    """Additional arguments of the chat template, such as `enable_thinking`."""
    reasoning_effort: str | None = None
    """Passed to the chat template."""
    continue_final_message: bool | None = None
    chat_template: str | None = None
    documents: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    verbosity: str | None = None
    store: bool | None = None
    service_tier: str | None = None

    def __post_init__(self) -> None:
        check_chat_size(self.messages, self.tools)

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_top_logprobs(self) -> int:
        count = checked_top_logprobs("top_logprobs", self.top_logprobs)
        if count and not self.logprobs:
            raise ValueError("top_logprobs: requires logprobs = true")
        return count

    def template_arguments(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    def rendered_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    def grammar(self) -> tuple[str, str] | None:
        """`tool_choice` decides before `response_format`: a forced call has no content."""
        if forced := forced_tools(self.tools, self.tool_choice):
            is_single = self.parallel_tool_calls is False or self.tool_choice != "required"
            return tool_call_grammar(forced, is_single=is_single), "tool_choice"
        if (grammar := response_format_grammar(self.response_format)) is not None:
            return grammar, "response_format"
        return super().grammar()

    def neutral_values(self) -> dict[str, tuple[object, ...]]:
        own: dict[str, tuple[object, ...]] = {
            "store": (None, False),
            "continue_final_message": (None, False),
            "chat_template": (None,),
            "documents": (None, []),
            "modalities": (None, ["text"]),
            "verbosity": (None, "medium"),
        }
        return {**super().neutral_values(), **own}


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCallPart(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | msgspec.UnsetType = msgspec.UNSET
    """Set in streams only."""


class AssistantMessage(msgspec.Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    tool_calls: list[ToolCallPart] | None = None
    refusal: None = None


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    finish_reason: str
    weight_versions: list[VersionSpan]
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None
    raw_text: str | None = None
    """The complete text, set if tool calls were removed from the content."""
    stop_reason: str | int | None = None


class ChatReply(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | None = None
    kv_after_update: str | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None
    weight_versions: list[VersionSpan] | None = None
    stop_reason: str | int | None = None


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
