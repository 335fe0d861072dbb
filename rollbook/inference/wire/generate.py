"""Messages of `POST /inference/v1/generate` in vLLM's format: token ids in, token ids with logprobs and version spans out."""

import msgspec
import numpy as np

from rollbook.contracts.policy import Completion, FinishReason, SamplingParams
from rollbook.inference.wire.completions import StructuredOutputs, VersionSpan, derived_seeds, token_versions


class GenerateParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    n: int = 1
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None

    @classmethod
    def of(cls, sampling: SamplingParams) -> "GenerateParams":
        """The caller alone decides what ends a turn, and reads tokens instead of text."""
        return cls(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            seed=sampling.seed,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            structured_outputs=None if sampling.grammar is None else StructuredOutputs(grammar=sampling.grammar),
        )

    def samplings(self, eos_token_ids: tuple[int, ...]) -> list[SamplingParams]:
        """The parameters of `n` completions. Raises `ValueError` naming the invalid field."""
        has_eos = not self.ignore_eos or self.structured_outputs is not None
        stop_ids = dict.fromkeys([*self.stop_token_ids, *(eos_token_ids if has_eos else ())])
        return [
            SamplingParams(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=0 if self.top_k == -1 else self.top_k,
                stop_token_ids=tuple(stop_ids),
                seed=seed,
            )
            for seed in derived_seeds([self.seed], self.n)
        ]


class GenerateBody(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    token_ids: list[int]
    sampling_params: GenerateParams
    model: str | None = None
    request_id: str | None = None
    min_publication: int = 0
    """An extension. vLLM has no minimum, so its clients check the versions of the response."""
    stream: bool = False


class TokenScore(msgspec.Struct):
    token_id: int
    logprob: float


class GenerateLogprobs(msgspec.Struct):
    content: list[TokenScore]


class GenerateChoice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str | None
    logprobs: GenerateLogprobs | None = None
    weight_versions: list[VersionSpan] | None = None

    def to_contract(self) -> Completion:
        """Raises `ValueError` when the fields are inconsistent."""
        if self.logprobs is None or self.weight_versions is None:
            raise ValueError("the response has no logprobs or no weight versions")
        if [score.token_id for score in self.logprobs.content] != self.token_ids:
            raise ValueError("the logprobs belong to other tokens")
        return Completion(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array([score.logprob for score in self.logprobs.content], dtype=np.float32),
            versions=token_versions(self.weight_versions, len(self.token_ids)),
            finish_reason=FinishReason(str(self.finish_reason)),
        )


class GenerateReply(msgspec.Struct):
    request_id: str
    choices: list[GenerateChoice]
