"""What crosses between the policy server and its clients for completions: JSON as OpenAI and vLLM shape it, with a few extensions.

The extensions: `min_publication`, a request is answered only from weights at least that new; `seeds`, one seed a prompt;
`detokenize`, false leaves all text out. In answers `weight_versions` tells which publication sampled which span of the tokens.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.policy import MAX_TOP_LOGPROBS, Completion, FinishReason, SamplingParams

STALE_WEIGHTS = "stale_weights"
QUEUE_FULL = "queue_full"
GENERATION_FAILED = "generation_failed"
OUTDATED_UPDATE = "outdated_update"

_MASK_63 = (1 << 63) - 1


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What completions and chat have in common. A field that would change what is sampled and is not offered is refused."""

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

    @property
    def count(self) -> int:
        return 1 if self.n is None else self.n

    def stops(self) -> tuple[str, ...]:
        """Raises `ValueError` for one that is empty: it would match everywhere."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(stops):
            raise ValueError("stop: an empty string would stop before the first token")
        return stops

    def refused_field(self) -> str | None:
        """A field that was set to something this server does not do."""
        return next((name for name, values in self._neutral().items() if getattr(self, name) not in values), None)

    def _neutral(self) -> dict[str, tuple[object, ...]]:
        return {
            "presence_penalty": (None, 0),
            "frequency_penalty": (None, 0),
            "repetition_penalty": (None, 1),
            "logit_bias": (None, {}),
            "min_p": (None, 0),
        }

    def sampling(self, seed: int | None, *, max_tokens: int, eos_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        """Raises `ValueError` naming the field at fault."""
        stop_ids = dict.fromkeys([*(self.stop_token_ids or ()), *(() if self.ignore_eos else eos_token_ids)])
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            # vLLM says -1 for "no truncation", we say 0.
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            stop_token_ids=tuple(stop_ids),
            seed=seed,
            top_logprobs=self.num_tops(),
        )

    def num_tops(self) -> int:
        """How many alternatives are told beside each token."""
        return 0


class CompletionBody(SamplingBody, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = 16
    seeds: list[int | None] | None = None
    """One seed a prompt, where several prompts come in one request."""
    logprobs: int | None = None
    detokenize: bool = True
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def num_tops(self) -> int:
        """Raises `ValueError` for more than are told."""
        return checked_tops("logprobs", self.logprobs)

    def prompts(self) -> list[str] | list[list[int]]:
        """One text or one list of token ids a prompt. Raises `ValueError` for a mixture."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ValueError("prompt: it is empty; at least one token is needed")
        kinds = {type(part) for part in self.prompt}
        if len(kinds) > 1:
            raise ValueError("prompt: it mixes texts, token ids and lists of them")
        if kinds == {int}:
            return [[part for part in self.prompt if isinstance(part, int)]]
        if kinds == {str}:
            return [part for part in self.prompt if isinstance(part, str)]
        return [part for part in self.prompt if isinstance(part, list)]

    def _neutral(self) -> dict[str, tuple[object, ...]]:
        own: dict[str, tuple[object, ...]] = {
            "echo": (None, False),
            "best_of": (None, 1, self.count),
            "suffix": (None, ""),
        }
        return {**super()._neutral(), **own}


class VersionSpan(msgspec.Struct):
    """Tokens `start` to `end` (exclusive) were sampled from publication `version`."""

    version: int | str
    start: int
    end: int


class LogprobsBlock(msgspec.Struct, omit_defaults=True):
    token_logprobs: list[float]
    tokens: list[str] | None = None
    text_offset: list[int] | None = None
    top_logprobs: list[dict[str, float]] | None = None


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
    """From the first token to the last: without the time in the queue."""

    def to_contract(self) -> Completion:
        """Raises `ValueError` when the pieces do not fit together."""
        if self.token_ids is None or self.logprobs is None:
            raise ValueError("the answer carries no token ids or no logprobs")
        return Completion(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs.token_logprobs, dtype=np.float32),
            versions=stamps(self.weight_versions, len(self.token_ids)),
            finish_reason=FinishReason(str(self.finish_reason)),
            generation_s=self.generation_s,
        )


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    """Computed before, by an earlier request under the same weights."""


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None

    @classmethod
    def of(cls, prompt_tokens: int, completions: Sequence[Completion], *, n: int = 1) -> "Usage":
        """`n` completions of each prompt, in order. A prompt counts once, and so does what was cached of it."""
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
    """Sent where an answer spans several publications: what became of its cache in between."""


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    code: int | str | None = None
    param: str | None = None


class ErrorReply(msgspec.Struct):
    error: ErrorDetail


class Health(msgspec.Struct):
    status: str
    publication: int | None
    step: int | None
    epoch: int | None
    digest: str | None
    running: int
    queued: int
    is_paused: bool
    is_draining: bool = False


def checked_tops(field: str, asked: int | None) -> int:
    if asked is not None and not 0 <= asked <= MAX_TOP_LOGPROBS:
        raise ValueError(f"{field}: {asked}; 0 to {MAX_TOP_LOGPROBS} are possible")
    return asked or 0


def derived_seed(seed: int | None, index: int) -> int | None:
    """The seed of the `index`-th of several completions of one request. The first keeps the seed itself."""
    if seed is None or index == 0:
        return seed
    return (seed ^ (index * 0x9E3779B97F4A7C15)) & _MASK_63


def spans(versions: list[int]) -> list[VersionSpan]:
    """Runs of equal stamps. Usually one."""
    found: list[VersionSpan] = []
    for at, version in enumerate(versions):
        if found and found[-1].version == version:
            found[-1].end = at + 1
        else:
            found.append(VersionSpan(version=version, start=at, end=at + 1))
    return found


def stamps(version_spans: list[VersionSpan], length: int) -> NDArray[np.int32]:
    """One stamp a token. Raises `ValueError` unless the spans cover all tokens, in order."""
    versions = np.empty(length, dtype=np.int32)
    at = 0
    for span in version_spans:
        if span.start != at or not at < span.end <= length:
            raise ValueError(f"span {span.start} to {span.end} does not continue at token {at} of {length}")
        versions[at : span.end] = int(span.version)
        at = span.end
    if at != length:
        raise ValueError(f"the versions end at token {at} of {length}")
    return versions
