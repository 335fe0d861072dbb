"""Messages of `POST /v1/completions` in the format of OpenAI and vLLM, with a few extensions.

Extensions of requests: `min_publication` requires weights at least that new, `seeds` sets one seed per prompt, `detokenize: false`
omits all text. Extension of responses: `weight_versions` names the publication that sampled each span of tokens. A client that
accepts `application/msgpack` receives `TokenReply` instead of JSON: raw arrays, which need no conversion on either side.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.decoding import json_decoder
from rollbook.contracts.output_formats import checked_stops, choice_grammar, json_grammar
from rollbook.contracts.policy import MAX_TOP_LOGPROBS, Completion, FinishReason, Routes, SamplingParams, TopLogprobs

STALE_WEIGHTS = "stale_weights"
QUEUE_FULL = "queue_full"
GENERATION_FAILED = "generation_failed"
OUTDATED_UPDATE = "outdated_update"

MSGPACK = "application/msgpack"
MAX_CHOICES = 1024
"""The maximum number of completions per request: prompts times n."""
MAX_STOP_TOKENS = 1024
"""Each sampled token is compared with all of them."""
_MASK_63 = (1 << 63) - 1


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The required form of a completion, with the names of vLLM. Exactly one field is set."""

    json: dict[str, Any] | str | None = None
    """A JSON schema."""
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Lark, in the dialect of llguidance."""

    def to_grammar(self) -> str:
        """Raises `ValueError`."""
        if sum(getattr(self, name) not in (None, False) for name in self.__struct_fields__) != 1:
            raise ValueError(f"structured_outputs: set exactly one of {', '.join(self.__struct_fields__)}")
        if self.json is not None:
            return json_grammar(_schema(self.json))
        if self.regex is not None:
            # A slash ends the regex in Lark. One that is escaped already stays as it is.
            escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], self.regex)
            return f"start: /{escaped}/\n"
        if self.choice is not None:
            return choice_grammar(self.choice)
        return json_grammar() if self.grammar is None else self.grammar


def _schema(schema: dict[str, Any] | str) -> dict[str, Any]:
    """Raises `ValueError` for a text that is not a JSON object."""
    if isinstance(schema, dict):
        return schema
    try:
        decoded: dict[str, Any] = json_decoder(dict[str, Any]).decode(schema)
    except msgspec.MsgspecError as error:
        raise ValueError(f"structured_outputs: json is not a JSON schema: {error}") from error
    return decoded


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The fields common to completions and chat. Unsupported fields are accepted with a neutral value only."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    min_publication: int = 0
    request_id: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_p: float | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool | None = None
    """Default: true. Special tokens are not part of the text."""
    return_tokens_as_token_ids: bool | None = None
    """Write `token_id:5` instead of its text next to logprobs."""
    add_special_tokens: bool | None = None
    """Default: true for a prompt. A rendered chat contains its own."""
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    spaces_between_special_tokens: bool | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    priority: int | None = None

    def grammar(self) -> tuple[str, str] | None:
        """The grammar of the completions, and the field that requires it. Raises `ValueError`."""
        if self.structured_outputs is None:
            return None
        return self.structured_outputs.to_grammar(), "structured_outputs"

    @property
    def count(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def has_usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def stops(self) -> tuple[str, ...]:
        """Raises `ValueError` for an empty stop string, which would match everywhere, and for too many."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(stops):
            raise ValueError("stop: an empty string would stop before the first token")
        return checked_stops(stops)

    def samplings(
        self, seeds: Sequence[int | None], *, max_model_len: int, eos_token_ids: tuple[int, ...]
    ) -> list[SamplingParams]:
        """The parameters of `n` completions for each prompt. `seeds` has one item per prompt.

        Raises `ValueError` naming the invalid field.
        """
        for name, values in self.neutral_values().items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: not supported by this server; remove it")
        if len(self.stop_token_ids or ()) > MAX_STOP_TOKENS:
            raise ValueError(f"stop_token_ids: at most {MAX_STOP_TOKENS} are allowed")
        limit = self.token_limit()
        all_seeds = derived_seeds(seeds, self.count)
        # A completion that follows a grammar ends with an end token.
        has_eos = not self.ignore_eos or self.grammar() is not None
        stop_ids = dict.fromkeys([*(self.stop_token_ids or ()), *(eos_token_ids if has_eos else ())])
        by_seed = {
            seed: SamplingParams(
                max_tokens=max_model_len if limit is None else limit,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                # vLLM uses -1 for "no truncation", Rollbook uses 0.
                top_k=0 if self.top_k in (None, -1) else self.top_k,
                stop_token_ids=tuple(stop_ids),
                seed=seed,
                top_logprobs=self.num_top_logprobs(),
            )
            for seed in set(all_seeds)
        }
        return [by_seed[seed] for seed in all_seeds]

    def token_limit(self) -> int | None:
        """The maximum number of tokens to sample. None: up to the model's length."""
        raise NotImplementedError

    def num_top_logprobs(self) -> int:
        """The number of alternatives to report for each token."""
        raise NotImplementedError

    def neutral_values(self) -> dict[str, tuple[object, ...]]:
        """The unsupported fields, and the values that leave the sampling unchanged."""
        return {
            "presence_penalty": (None, 0),
            "frequency_penalty": (None, 0),
            "repetition_penalty": (None, 1),
            "logit_bias": (None, {}),
            "min_p": (None, 0),
            "min_tokens": (None, 0),
            "include_stop_str_in_output": (None, False),
            "bad_words": (None, []),
            "allowed_token_ids": (None,),
            "prompt_logprobs": (None,),
            "truncate_prompt_tokens": (None,),
            "use_beam_search": (None, False),
            "length_penalty": (None, 1),
            "priority": (None, 0),
        }


class CompletionBody(SamplingBody, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = 16
    seeds: list[int | None] | None = None
    """One seed per prompt."""
    logprobs: int | None = None
    detokenize: bool = True
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def is_score_only(self) -> bool:
        """Whether the prompt is scored and nothing is sampled."""
        return bool(self.echo) and self.max_tokens == 0

    def token_limit(self) -> int | None:
        return self.max_tokens

    def num_top_logprobs(self) -> int:
        return checked_top_logprobs("logprobs", self.logprobs)

    def prompts(self) -> list[str] | list[list[int]]:
        """One string or one list of token ids per prompt. Raises `ValueError` for a mixture."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ValueError("prompt: is empty; at least one token is required")
        kinds = {type(part) for part in self.prompt}
        if len(kinds) > 1:
            raise ValueError("prompt: mixes strings, token ids and lists of token ids")
        if kinds == {int}:
            return [[part for part in self.prompt if isinstance(part, int)]]
        if kinds == {str}:
            return [part for part in self.prompt if isinstance(part, str)]
        return [part for part in self.prompt if isinstance(part, list)]

    def neutral_values(self) -> dict[str, tuple[object, ...]]:
        own: dict[str, tuple[object, ...]] = {
            "best_of": (None, 1, self.count),
            "suffix": (None, ""),
        }
        return {**super().neutral_values(), **own}


class VersionSpan(msgspec.Struct):
    """Tokens `start` to `end` (exclusive) were sampled from publication `version`."""

    version: int | str
    start: int
    end: int


class LogprobsBlock(msgspec.Struct, omit_defaults=True):
    token_logprobs: list[float | None]
    """None for the first token of an echoed prompt, which has no logprob."""
    tokens: list[str] | None = None
    text_offset: list[int] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    prompt_version: int | None = None
    """The publication whose weights scored an echoed prompt."""


class Choice(msgspec.Struct):
    index: int
    finish_reason: str | None
    weight_versions: list[VersionSpan]
    token_ids: list[int] | None = None
    logprobs: LogprobsBlock | None = None
    text: str = ""
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | None = None
    generation_s: float | None = None
    """Seconds from the first token to the last, without the time in the queue."""


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    """Prompt tokens computed by an earlier request under the same weights."""


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None

    @classmethod
    def of(cls, prompt_tokens: int, completions: Sequence[Completion], *, n: int = 1) -> "Usage":
        """The usage of `n` completions per prompt, in order. Prompt tokens and cached tokens count once per prompt."""
        sampled = sum(len(completion.token_ids) for completion in completions)
        cached = sum(completion.cached_tokens for completion in completions[::n])
        return cls(prompt_tokens, sampled, prompt_tokens + sampled, PromptTokensDetails(cached))


class CompletionReply(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    object: Literal["text_completion"] = "text_completion"
    kv_after_update: str | None = None
    """Set if a completion spans several publications: whether its KV cache was kept or recomputed."""


class TokenCompletion(msgspec.Struct, array_like=True):
    """One completion as the bytes of its arrays: int32 ids, float32 logprobs, int32 versions."""

    token_ids: memoryview
    logprobs: memoryview
    versions: memoryview
    finish_reason: FinishReason
    generation_s: float | None = None
    top_tokens: memoryview | None = None
    """The likeliest tokens, one row per position, and their logprobs, if they were requested."""
    top_logprobs: memoryview | None = None
    routes: memoryview | None = None
    """Chosen experts, uint8 or uint16, and their shape: tokens, layers, choices. Not compressed: that would take longer than the
    transfer within a machine."""
    routes_shape: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, completion: Completion, *, start: int = 0) -> "TokenCompletion":
        """`start`: the first token that is included."""
        tops, routes = completion.tops, completion.routes
        return cls(
            _bytes(completion.token_ids[start:], np.int32),
            _bytes(completion.logprobs[start:], np.float32),
            _bytes(completion.versions[start:], np.int32),
            completion.finish_reason,
            completion.generation_s,
            None if tops is None else _bytes(tops.token_ids[start:], np.int32),
            None if tops is None else _bytes(tops.logprobs[start:], np.float32),
            None if routes is None else np.ascontiguousarray(routes).reshape(-1).view(np.uint8).data,
            None if routes is None else (routes.shape[0], routes.shape[1], routes.shape[2]),
        )

    def to_contract(self) -> Completion:
        """Raises `ValueError` when the lengths of the arrays differ.

        The arrays are copies: a view would keep the whole response, with all completions in it, as long as one of them is used.
        """
        token_ids = np.frombuffer(self.token_ids, dtype=np.int32).copy()
        tops = None
        if self.top_tokens is not None and self.top_logprobs is not None and len(token_ids):
            shape = (len(token_ids), -1)
            tops = TopLogprobs(
                token_ids=np.frombuffer(self.top_tokens, dtype=np.int32).reshape(shape).copy(),
                logprobs=np.frombuffer(self.top_logprobs, dtype=np.float32).reshape(shape).copy(),
            )
        return Completion(
            token_ids=token_ids,
            logprobs=np.frombuffer(self.logprobs, dtype=np.float32).copy(),
            versions=np.frombuffer(self.versions, dtype=np.int32).copy(),
            finish_reason=self.finish_reason,
            generation_s=self.generation_s,
            tops=tops,
            routes=self._routes(),
        )

    def _routes(self) -> Routes | None:
        if self.routes is None or self.routes_shape is None:
            return None
        dtype = np.uint8 if len(self.routes) == math.prod(self.routes_shape) else np.uint16
        return np.frombuffer(self.routes, dtype=dtype).reshape(self.routes_shape).copy()


def _bytes(values: NDArray[Any], dtype: type) -> memoryview:
    return np.ascontiguousarray(values, dtype=dtype).data


class TokenReply(msgspec.Struct):
    completions: list[TokenCompletion]


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    code: int | str | None = None
    param: str | None = None


class OpenAiError(msgspec.Struct):
    error: ErrorDetail


class EngineHealth(msgspec.Struct):
    status: str
    publication: int | None
    step: int | None
    epoch: int | None
    digest: str | None
    running: int
    queued: int
    is_paused: bool
    is_draining: bool = False


def checked_top_logprobs(field: str, count: int | None) -> int:
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise ValueError(f"{field}: {count} is out of range 0 to {MAX_TOP_LOGPROBS}")
    return count or 0


def derived_seeds(seeds: Sequence[int | None], n: int) -> list[int | None]:
    """The seeds of `n` completions for each prompt. The first completion uses the seed itself. Raises `ValueError`."""
    if n < 1 or n * len(seeds) > MAX_CHOICES:
        raise ValueError(f"n: {n} for {len(seeds)} prompts; a request may have 1 to {MAX_CHOICES} completions")
    return [
        seed if seed is None or index == 0 else (seed ^ (index * 0x9E3779B97F4A7C15)) & _MASK_63
        for seed in seeds
        for index in range(n)
    ]


def version_spans(versions: NDArray[np.int32], *, offset: int = 0) -> list[VersionSpan]:
    """Runs of equal versions, usually one. `offset` is the position of the first token."""
    if not len(versions):
        return []
    if (versions == versions[0]).all():  # several times faster than what follows
        return [VersionSpan(version=int(versions[0]), start=offset, end=offset + len(versions))]
    ends = [*(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    starts = [0, *ends[:-1]]
    return [
        VersionSpan(version=int(versions[start]), start=start + offset, end=end + offset)
        for start, end in zip(starts, ends, strict=True)
    ]


def token_versions(spans: Sequence[VersionSpan], length: int) -> NDArray[np.int32]:
    """One version per token. Raises `ValueError` unless the spans cover all tokens in order."""
    versions = np.empty(length, dtype=np.int32)
    at = 0
    for span in spans:
        if span.start != at or not at < span.end <= length:
            raise ValueError(f"span {span.start} to {span.end} does not continue at token {at} of {length}")
        versions[at : span.end] = int(span.version)
        at = span.end
    if at != length:
        raise ValueError(f"the version spans end at token {at} of {length}")
    return versions
