"""Which logprobs of the sampler must have the bits of the trainer, and how they are compared.

Tokens of the newest policy are compared in the pass that trains them. In steps without such tokens, a few rows of the policy before
it are computed once more with its weights, of which the trainer keeps a copy if there is memory for it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import SamplerExactness
from rollbook.numerics.machine import DRIVER, ProbedAnswer, differences
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import Minibatch, plan_minibatch
from rollbook.trainer.data.passes import Microbatch
from rollbook.trainer.data.rows import TrainRow
from rollbook.trainer.distributed.sharding import Ranks
from rollbook.trainer.losses.statistics import TokenStatistics
from rollbook.trainer.model.policy_model import PolicyModel

CHECK_EVERY = 4
"""Steps without tokens of the newest policy that are checked. A check is a pass over few tokens: of a small model, about 10 ms."""
CHECKED_TOKENS = 1024
"""Tokens of the rows that are computed once more, unless the shortest one is longer."""
EARLIER = -1
"""The number of the pass with the weights before the last step."""
MEMORY_FACTOR = 4
"""The copy of the weights is made if this many would fit into the free memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalToken:
    """A token whose logprob has other bits in the trainer."""

    group_id: str
    sample: int
    """Its number in the group; `sequence`: that of its sequence in the sample; `token`: its index in the sequence."""
    sequence: int
    token: int
    publication: int
    lag: int
    sampled: float
    trained: float

    def __str__(self) -> str:
        sequence = f" of sequence {self.sequence}" if self.sequence else ""
        return (
            f"token {self.token}{sequence} of sample {self.sample} of group {self.group_id}, sampled by publication"
            f" {self.publication} (lag {self.lag}): {self.sampled!r} in the engine, {self.trained!r} in the trainer"
        )

    @classmethod
    def of(cls, micro: Microbatch, at: int, *, sampled: float, trained: float) -> "UnequalToken":
        """Target `at` of a pass."""
        source = micro.sources[int(micro.row_of_N[at])]
        return cls(
            group_id=str(source.group_id),
            sample=source.sample,
            sequence=source.sequence,
            token=-1 if micro.index_N is None else int(micro.index_N[at]),
            publication=-1 if micro.publications_N is None else int(micro.publications_N[at]),
            lag=-1 if micro.lags_N is None else int(micro.lags_N[at]),
            sampled=sampled,
            trained=trained,
        )


def why_inexact(
    own: str | None, sampler: SamplerExactness | None, machine: Mapping[str, str], *, is_merged: bool
) -> str | None:
    """Why equal bits are not expected; None if they are.

    `own`: why the passes of the trainer are not exact. `is_merged`: the sampler uses merged adapters.
    """
    if own is not None:
        return f"trainer: {own}"
    if is_merged:
        return "the adapters are merged for the policy servers"
    if sampler is None:
        return "no policy server has said yet that its logprobs are exact"
    if sampler.inexact_because is not None:
        return f"policy server: {sampler.inexact_because}"
    others = differences({name: value for name, value in machine.items() if name != DRIVER}, sampler.machine)
    return f"the policy server has {', '.join(others)}" if others else None


def compare_probe(module: Any, answers: Sequence[ProbedAnswer]) -> str | None:
    """What differs between logprobs that an engine computed with the module, and those of a pass of a trainer. None: nothing, or a
    trainer of this model is not exact either."""
    weight = next(module.parameters())
    config = TrainerConfig(
        device=weight.device.type, compute_dtype="bfloat16" if weight.dtype is torch.bfloat16 else "float32"
    )
    with torch.cuda.device(weight.device) if weight.is_cuda else nullcontext():
        model = PolicyModel.over(module, config)
        return unequal_answers(model, config, answers) if model.inexact_because is None else None


@torch.no_grad()
def unequal_answers(model: PolicyModel, config: TrainerConfig, answers: Sequence[ProbedAnswer]) -> str | None:
    """Answers whose logprobs have other bits in a pass over all of them, or in one over each."""
    rows = [row_of_answer(number, answer) for number, answer in enumerate(answers)]
    one_pass = config.model_copy(update={"max_tokens_per_microbatch": max(1, sum(map(len, rows)))})
    unequal: list[tuple[ProbedAnswer, int, float, float]] = []
    compared = Counter[str]()
    for part in (rows, *([row] for row in rows)):
        for micro in plan_minibatch(part, one_pass, is_packed=model.is_packed).microbatches:
            trained_N = model.token_logprobs(micro)[0].float().cpu().numpy()
            assert micro.index_N is not None
            for n, (sampled, trained) in enumerate(zip(micro.sampled_logprobs_N, trained_N, strict=True)):
                answer = answers[micro.sources[int(micro.row_of_N[n])].sample]
                compared[answer.how] += 1
                if sampled != trained:
                    token = int(micro.index_N[n]) - len(answer.prompt)
                    unequal.append((answer, token, float(sampled), float(trained)))
    if not unequal:
        return None
    counts = Counter(answer.how for answer, *_ in unequal)
    answer, token, sampled, trained = max(unequal, key=lambda found: abs(found[2] - found[3]))
    shares = ", ".join(f"{how}: {counts[how]} of {number}" for how, number in sorted(compared.items()))
    return (
        f"{len(unequal)} of {compared.total()} logprobs of the check at the start have other bits than in a pass of the trainer"
        f" (sampled {shares}). The largest difference: token {token} after a prompt of {len(answer.prompt)}, sampled {answer.how}:"
        f" {sampled!r} in the engine, {trained!r} in the trainer"
    )


def row_of_answer(number: int, answer: ProbedAnswer) -> TrainRow:
    start, count = len(answer.prompt), len(answer.tokens)
    return TrainRow(
        group_id=GroupId("probe"),
        sample=number,
        place=(number, 0),
        inputs=np.concatenate([answer.prompt, answer.tokens[:-1]]).astype(np.int32),
        predicted_at=np.arange(start - 1, start - 1 + count),
        targets=answer.tokens,
        sampled_logprobs=answer.logprobs,
        advantage=0.0,
        temperature=answer.temperature,
    )


def is_comparable(micro: Microbatch, lag: int) -> NDArray[np.bool_]:
    """The targets of this lag whose logprobs are those of one forward: neither with keys of several policies, nor renormalised."""
    if micro.lags_N is None:
        return np.zeros(micro.num_trained, dtype=np.bool_)
    found: NDArray[np.bool_] = (micro.lags_N == lag) & ~np.isnan(micro.sampled_logprobs_N)
    for left_out in (micro.mixed_N, micro.renormalised_N):
        found = found if left_out is None else found & ~left_out
    return found


class EarlierWeights:
    """A copy of the weights before the last step, in the type of the passes."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        self._copies: list[Tensor] | None = None
        self._is_refused = False
        self.version = -1
        """The policy version of the copy; -1: there is none."""

    @torch.no_grad()
    def keep(self, *, version: int) -> None:
        """Copy the weights, which are of this version, if there is memory."""
        if not self._weights:
            return
        if self._copies is None and not self._is_refused:
            self._is_refused = not _has_room(self._weights)
            self._copies = None if self._is_refused else [torch.empty_like(weight) for weight in self._weights]
        if self._copies is not None:
            torch._foreach_copy_(self._copies, self._weights)
            self.version = version

    def drop(self) -> None:
        """Free the memory for good."""
        self._copies, self._is_refused, self.version = None, True, -1

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The model has these weights while the context lasts."""
        assert self._copies is not None, "the version says whether there are copies"
        for weight, copy in zip(self._weights, self._copies, strict=True):
            weight.data, copy.data = copy.data, weight.data
        try:
            yield
        finally:
            for weight, copy in zip(self._weights, self._copies, strict=True):
                weight.data, copy.data = copy.data, weight.data


def _has_room(weights: Sequence[Tensor]) -> bool:
    if not weights or weights[0].device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(weights[0].device)
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return free + unused >= MEMORY_FACTOR * sum(weight.numel() * weight.element_size() for weight in weights)


class LogprobComparison:
    """Compares the logprobs of a step at one rank."""

    def __init__(self, model: PolicyModel, config: TrainerConfig) -> None:
        self.is_promised = True
        """Whether the sampler says that its logprobs have the bits of an exact trainer."""
        self._model = model
        self._config = config
        self._earlier = EarlierWeights(model.computing_weights() if config.ranks == 1 else [])
        self._checked: Microbatch | None = None
        """The pass of this step with the weights before the last step."""

    @property
    def is_on(self) -> bool:
        return self.is_promised and self._model.inexact_because is None

    @torch.no_grad()
    def check_earlier(self, minibatches: Sequence[Minibatch], statistics: TokenStatistics, *, step: int) -> None:
        """In a step without tokens of the newest policy, compare a few of the policy before. Call it before the weights change."""
        self._checked = None
        if self.is_on and self._earlier.version == step - 2 and step % CHECK_EVERY == 0:
            self._checked = pass_to_check(minibatches, self._config, lag=1)
        if self._checked is not None:
            with self._earlier.in_use():
                trained_N = self._model.token_logprobs(self._checked)[0]
            sampled_N = self._model.tensor(self._checked.sampled_logprobs_N)
            is_compared_N = torch.ones_like(trained_N, dtype=torch.bool)
            statistics.compare(trained_N, sampled_N, is_compared_N, pass_number=EARLIER)
        if self.is_on:
            self._earlier.keep(version=step - 1)

    def free_memory(self) -> None:
        """Tokens of the policy before the newest one are not compared from now on."""
        self._earlier.drop()

    def unequal_token(self, minibatches: Sequence[Minibatch], statistics: TokenStatistics) -> UnequalToken | None:
        """The token whose logprobs differ most; None: all are equal. `statistics`: those of all ranks."""
        found = statistics.largest_difference()
        if found is None or not self.is_on:
            return None
        number, at, trained, sampled = found
        ranks = Ranks(rank=statistics.largest_rank, size=self._config.ranks)
        passes = [micro for part in minibatches for micro, _ in ranks.own_passes(part.microbatches)]
        micro = self._checked if number == EARLIER else passes[number]
        assert micro is not None
        return UnequalToken.of(micro, at, sampled=sampled, trained=trained)


def pass_to_check(minibatches: Sequence[Minibatch], config: TrainerConfig, *, lag: int) -> Microbatch | None:
    """One pass over the shortest rows with comparable tokens of this lag, and only these tokens.

    None: there are none, or tokens of the newest policy are compared anyway.
    """
    passes = [micro for part in minibatches for micro in part.microbatches if micro.sequences is not None]
    if any(is_comparable(micro, 0).any() for micro in passes):
        return None
    found = [
        (int(micro.index_N[at[-1]]), micro, at)
        for micro in passes
        if micro.index_N is not None
        for at in _by_row(micro, np.flatnonzero(is_comparable(micro, lag)))
    ]
    if not found:
        return None
    found.sort(key=lambda row: row[0])
    counts = np.cumsum([length for length, _, _ in found])
    rows = [_row(micro, at) for _, micro, at in found[: max(1, int((counts <= CHECKED_TOKENS).sum()))]]
    one_pass = config.model_copy(update={"max_tokens_per_microbatch": sum(map(len, rows))})
    return plan_minibatch(rows, one_pass, is_packed=True).microbatches[0]


def _by_row(micro: Microbatch, at: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Targets of a pass, divided by row."""
    return np.split(at, np.flatnonzero(np.diff(micro.row_of_N[at])) + 1) if len(at) else []


def _row(micro: Microbatch, at: NDArray[np.int64]) -> TrainRow:
    """A row of a packed pass with some of its targets."""
    assert micro.sequences is not None
    assert micro.index_N is not None
    length, last = int(micro.index_N[at[-1]]), micro.predicted_at_N[at[-1]]
    sequences = np.split(micro.sequences.sources_F, np.cumsum(micro.sequences.lengths)[:-1])
    # The tokens of a pass form a tree: the last one tells those before it.
    inputs = next(part[:length] for part in sequences if len(part) >= length and part[length - 1] == last)
    source = micro.sources[int(micro.row_of_N[at[0]])]
    return TrainRow(
        group_id=source.group_id,
        sample=0,
        place=(source.sample, source.sequence),
        inputs=micro.inputs_BT[0, inputs].astype(np.int32),
        predicted_at=micro.index_N[at].astype(np.int64) - 1,
        targets=micro.targets_N[at].astype(np.int32),
        sampled_logprobs=micro.sampled_logprobs_N[at],
        advantage=0.0,
        temperature=float(micro.temperatures_N[at[0]]),
        publications=None if micro.publications_N is None else micro.publications_N[at],
        lags=None if micro.lags_N is None else micro.lags_N[at],
    )
