"""What crosses between the policy server and its clients: JSON as OpenAI and vLLM shape it, with two extensions.

The extensions: `min_publication`, a request is answered only from weights at least that new; `seeds`, one seed a prompt. In answers
`weight_versions` tells which publication sampled which span of the tokens.
"""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.policy import Completion, FinishReason, Publication, PublicationId, SamplingParams

STALE_WEIGHTS = "stale_weights"
QUEUE_FULL = "queue_full"
GENERATION_FAILED = "generation_failed"
OUTDATED_UPDATE = "outdated_update"
UNPUBLISHED = "default"
"""What vLLM calls weights that nobody has named."""


class CompletionBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """POST /v1/completions. Fields of OpenAI's that would change what is sampled and are not offered are refused, never ignored."""

    prompt: list[int | list[int]] | str
    model: str | None = None
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    seeds: list[int | None] | None = None
    """One seed a prompt, where several prompts come in one request."""
    stop_token_ids: list[int] = []
    n: int = 1
    return_token_ids: bool = False
    logprobs: int | None = None
    min_publication: int = 0
    user: str | None = None
    stream: bool | None = None
    echo: bool | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    suffix: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def prompts(self) -> list[list[int]]:
        """One list of token ids a prompt. Raises `ValueError` for text or a mixture."""
        if isinstance(self.prompt, str):
            raise ValueError("prompt: this server takes token ids, not text")
        if not self.prompt:
            raise ValueError("prompt: it is empty; at least one token is needed")
        several = [part for part in self.prompt if isinstance(part, list)]
        if not several:
            return [[part for part in self.prompt if isinstance(part, int)]]
        if len(several) != len(self.prompt):
            raise ValueError("prompt: it mixes token ids and lists of them")
        return several

    def refused_field(self) -> str | None:
        """A field that was set to something this server does not do."""
        neutral: dict[str, tuple[object, ...]] = {
            "stream": (None, False),
            "echo": (None, False),
            "best_of": (None, 1, self.n),
            "stop": (None, []),
            "suffix": (None, ""),
            "presence_penalty": (None, 0),
            "frequency_penalty": (None, 0),
            "logit_bias": (None, {}),
        }
        return next((name for name, values in neutral.items() if getattr(self, name) not in values), None)

    def sampling(self, seed: int | None) -> SamplingParams:
        """Raises `ValueError` naming the field at fault."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            # vLLM says -1 for "no truncation", we say 0.
            top_k=0 if self.top_k == -1 else self.top_k,
            stop_token_ids=tuple(self.stop_token_ids),
            seed=seed,
        )


class VersionSpan(msgspec.Struct):
    """Tokens `start` to `end` (exclusive) were sampled from publication `version`."""

    version: int | str
    start: int
    end: int


class LogprobsBlock(msgspec.Struct):
    token_logprobs: list[float]


class Choice(msgspec.Struct):
    index: int
    finish_reason: str
    weight_versions: list[VersionSpan]
    token_ids: list[int] | None = None
    logprobs: LogprobsBlock | None = None
    text: str = ""
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
            finish_reason=FinishReason(self.finish_reason),
            generation_s=self.generation_s,
        )


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionReply(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: str = "text_completion"


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    code: int
    param: str | None = None


class ErrorReply(msgspec.Struct):
    error: ErrorDetail


class UpdateInfo(msgspec.Struct, forbid_unknown_fields=True):
    """Which weights, and where they lie. `directory`: a safetensors file both sides can see."""

    path: str
    publication: int
    step: int
    epoch: int
    digest: str
    backend: Literal["directory"] = "directory"

    def to_contract(self) -> Publication:
        return Publication(id=PublicationId(self.publication), epoch=self.epoch, step=self.step, digest=self.digest)


class UpdateBody(msgspec.Struct, forbid_unknown_fields=True):
    update_info: UpdateInfo


class WeightInfo(msgspec.Struct):
    weight_version: str = UNPUBLISHED
    publication: int | None = None
    step: int | None = None
    epoch: int | None = None
    digest: str | None = None

    @classmethod
    def of(cls, publication: Publication | None) -> "WeightInfo":
        if publication is None:
            return cls()
        return cls(
            weight_version=str(publication.id),
            publication=publication.id,
            step=publication.step,
            epoch=publication.epoch,
            digest=publication.digest,
        )

    def to_contract(self) -> Publication | None:
        if self.publication is None or self.step is None or self.epoch is None or self.digest is None:
            return None
        return Publication(id=PublicationId(self.publication), epoch=self.epoch, step=self.step, digest=self.digest)


class Health(msgspec.Struct):
    status: str
    publication: int | None
    step: int | None
    epoch: int | None
    digest: str | None
    running: int
    queued: int
    is_paused: bool


def choice_of(completion: Completion, index: int, *, with_ids: bool, with_logprobs: bool) -> Choice:
    return Choice(
        index=index,
        finish_reason=completion.finish_reason.value,
        weight_versions=spans(completion.versions.tolist()),
        token_ids=completion.token_ids.tolist() if with_ids else None,
        logprobs=LogprobsBlock(token_logprobs=completion.logprobs.tolist()) if with_logprobs else None,
        generation_s=None if completion.generation_s is None else round(completion.generation_s, 4),
    )


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
