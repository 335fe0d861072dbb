"""The sequences of a batch with their training targets, and the checks that they fit the model.

A masked token is context, like one of the environment. Losses, sequence-level ratios and length normalisation thus run over the
tokens that are left. Tokens after the last trained token are not computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.contracts.policy import NOT_SAMPLED, Routes, unknown_choice
from rollbook.contracts.trajectory import TokenRow
from rollbook.trainer.advantages.registry import credit
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.metrics import mixed_caches, publication_lags, token_lags


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainRow:
    """One sequence with its training targets. Target i is predicted at input position `predicted_at[i]`."""

    group_id: GroupId
    sample: int
    """Number of the sample in the batch; its sequences share one advantage and stay in one minibatch."""
    inputs: NDArray[np.int32]
    predicted_at: NDArray[np.int64]
    targets: NDArray[np.int32]
    sampled_logprobs: NDArray[np.float32]
    """Logprobs of the sampling distribution; NaN where the producer did not record them."""
    advantage: float
    temperature: float
    token_advantages: NDArray[np.float32] | None = None
    """Advantages of the user's function or of the producer, for each target. They replace `advantage`."""
    token_weights: NDArray[np.float32] | None = None
    """Factor of each target's loss; None: 1."""
    reference_logprobs: NDArray[np.float32] | None = None
    """Logprobs of the reference policy from the producer; None, or NaN: unknown."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """Logprobs of the teacher; None, or NaN: unknown."""
    top_ids: NDArray[np.int32] | None = None
    """For each target: the tokens that the teacher likes best there, -1 where there are fewer. None: not trained."""
    top_logprobs: NDArray[np.float32] | None = None
    """Their logprobs under the teacher; NaN where there is none."""
    place: tuple[int, int] = (0, 0)
    """Number of the sample in its group, and of the sequence in the sample."""
    num_tokens: int = 0
    """Length of the whole sequence."""
    publications: NDArray[np.int32] | None = None
    """For each target: the publication that sampled it, -1 where unknown. None: all unknown."""
    lags: NDArray[np.int8] | None = None
    """For each target: `token_lags`. None: unknown."""
    mixed: NDArray[np.bool_] | None = None
    """For each target: `mixed_caches`. None: none is."""
    is_renormalised: bool = False
    """See `RolloutSample.is_renormalised`."""
    observed_at: NDArray[np.int64] | None = None
    """Input positions that predict the environment's tokens between the turns, if they are trained."""
    observed: NDArray[np.int32] | None = None
    """These tokens."""
    routes: Routes | None = None
    """The experts that the sampler chose for each input, if they are replayed."""
    trained_share: float = 1.0
    """Fraction of the batch's scorable samples that have a row: the others are masked or have no trained token."""

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def num_trained(self) -> int:
        return len(self.targets)

    @property
    def num_observed(self) -> int:
        return 0 if self.observed is None else len(self.observed)


MAX_TEACHER_GAP = 20.0


def teacher_gaps(row: TokenRow) -> NDArray[np.float32]:
    """log teacher - log sampled of each token; 0 where one of them is unknown.

    The mean over the policy's samples is minus the divergence KL(policy || teacher), and as an advantage it has its gradient.
    """
    assert row.teacher_logprobs is not None
    gaps = np.clip(row.teacher_logprobs - row.logprobs, -MAX_TEACHER_GAP, MAX_TEACHER_GAP)
    return np.where(np.isnan(gaps), 0.0, gaps).astype(np.float32)


def distill_weight(config: TrainerConfig, step: int) -> float:
    """`distill_coef` at a step."""
    if config.distill_until is None:
        return config.recipe.distill_coef
    return config.recipe.distill_coef * max(0.0, 1.0 - (step - 1) / config.distill_until)


def flatten(batch: TrainingBatch, config: TrainerConfig) -> list[TrainRow]:
    """The sequences of scorable samples that have trained tokens which are not masked, in the batch's order."""
    found = credit(batch, config)
    rows: list[TrainRow] = []
    number = -1
    lags = publication_lags(batch)
    distill_coef = distill_weight(config, batch.step)
    has_tops = distill_coef > 0 and config.distill_kl != "sampled"
    if distill_coef:
        _check_scores(batch, config)
    if config.router_replay and not any(
        row.routes is not None for group in batch.groups for s in group.scorable for row in s.sequences
    ):
        raise RunError(
            f"batch {batch.step} has no routes of the sampler, and trainer.router_replay is true: the policy servers do not record"
            " them. Start those at inference.urls with inference.record_routes = true"
        )
    num_scorable = sum(len(group.scorable) for group in batch.groups)
    for entry, group in batch.entries():
        for in_group, sample in enumerate(group.samples):
            number += 1
            if not sample.is_scorable or (config.mask_truncated and sample.finish_reason.is_truncated):
                continue
            for sequence, row in enumerate(sample.sequences):
                trained = np.flatnonzero(row.loss_mask & ~entry.is_masked(row))
                if len(trained) == 0:
                    continue
                observed = None
                if config.observation_coef:
                    between = slice(trained[0] + 1, trained[-1])
                    is_observed = (row.versions == NOT_SAMPLED) & ~sample.written_mask(sequence)
                    observed = trained[0] + 1 + np.flatnonzero(is_observed[between])
                by_token = found.by_token.get((number, sequence))
                if distill_coef and not has_tops and row.teacher_logprobs is not None:
                    base = np.float32(found.by_sample[number]) if by_token is None else by_token
                    by_token = base + distill_coef * teacher_gaps(row)
                rows.append(
                    TrainRow(
                        group_id=group.id,
                        sample=number,
                        inputs=row.token_ids[: trained[-1]],
                        predicted_at=trained - 1,
                        targets=row.token_ids[trained],
                        sampled_logprobs=row.logprobs[trained],
                        advantage=float(found.by_sample[number]),
                        temperature=sample.sampling.temperature,
                        place=(in_group, sequence),
                        num_tokens=len(row),
                        publications=row.versions[trained],
                        lags=token_lags(row.versions[trained], lags),
                        mixed=mixed_caches(row.versions)[trained],
                        is_renormalised=sample.is_renormalised,
                        token_advantages=None if by_token is None else by_token[trained],
                        token_weights=None if row.weights is None else row.weights[trained],
                        reference_logprobs=None if row.reference_logprobs is None else row.reference_logprobs[trained],
                        teacher_logprobs=None if row.teacher_logprobs is None else row.teacher_logprobs[trained],
                        top_ids=row.teacher_top_ids[trained] if has_tops and row.teacher_top_ids is not None else None,
                        top_logprobs=row.teacher_top_logprobs[trained].astype(np.float32)
                        if has_tops and row.teacher_top_logprobs is not None
                        else None,
                        observed_at=None if observed is None else observed - 1,
                        observed=None if observed is None else row.token_ids[observed],
                        routes=row.routes[: trained[-1]] if config.router_replay and row.routes is not None else None,
                    )
                )
    num_samples = len({row.sample for row in rows})
    if num_samples == num_scorable:
        return rows
    return [replace(row, trained_share=num_samples / num_scorable) for row in rows]


def _check_scores(batch: TrainingBatch, config: TrainerConfig) -> None:
    """Raises `RunError` if the batch has no scores of a teacher and nothing else to learn from, or no likeliest tokens.

    Beside rewards, a batch may consist of tasks without a teacher.
    """
    rows = [row for group in batch.groups for sample in group.scorable for row in sample.sequences]
    is_taught = any(row.teacher_logprobs is not None or row.teacher_top_ids is not None for row in rows)
    if not is_taught and config.recipe.advantage == "none":
        raise RunError(
            f"batch {batch.step} has no scores of a teacher, and trainer.distill_coef is {config.recipe.distill_coef:g}: set"
            " [rollout.teacher]"
        )
    if is_taught and config.distill_kl != "sampled" and all(row.teacher_top_ids is None for row in rows):
        raise RunError(
            f"batch {batch.step} has the teacher's scores of the sampled tokens only, and trainer.distill_kl is"
            f' "{config.distill_kl}": set rollout.teacher.top_k, or distill_kl = "sampled"'
        )


def check_vocabulary(rows: Sequence[TrainRow], size: int, *, step: int) -> None:
    """Before the step changes anything. The ledger refuses such groups if it knows the vocabulary of the run's model."""
    for row in rows:
        highest = max(int(row.inputs.max(initial=0)), int(row.targets.max(initial=0)))
        if row.top_ids is not None:
            highest = max(highest, int(row.top_ids.max(initial=0)))
        if highest >= size:
            raise RunError(
                f"batch {step}: {row.group_id} has token id {highest}, but the vocabulary has {size} tokens. Data and trainer must"
                " use the same model and tokenizer."
            )


def check_routes(rows: Sequence[TrainRow], shape: tuple[int, int], *, step: int) -> None:
    """Before the step changes anything: a GPU would read outside of its memory."""
    layers, experts = shape
    first: Routes | None = None
    for row in rows:
        if (routes := row.routes) is None:
            continue
        first = routes if first is None else first
        choices = routes[routes != unknown_choice(routes.dtype)]
        if routes.shape[1] != layers or int(choices.max(initial=0)) >= experts:
            raise RunError(
                f"batch {step}: {row.group_id} has routes of {routes.shape[1]} layers and experts up to"
                f" {choices.max(initial=0)}, but the model has {layers} layers of {experts} experts. Sampler and trainer must use"
                " the same model."
            )
        if routes.shape[1:] != first.shape[1:] or routes.dtype != first.dtype:
            raise RunError(
                f"batch {step}: {row.group_id} has routes of shape {routes.shape[1:]} ({routes.dtype}), other groups of"
                f" {first.shape[1:]} ({first.dtype}). All samplers must use the same model."
            )
