"""Converts a batch of the ledger into rows for TRL's `AsyncGRPOTrainer`. Pure.

A step of TRL has a fixed number of rows. A batch with fewer rows (a sample failed) is filled with rows without a gradient. A batch
with more rows (a history forked) raises an error. With batch policy `parts` a step has room for the largest batch.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.contracts.batch import BatchEntry, TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import PromptGroup
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.trainer.advantages.episodes import advantages
from rollbook.trainer.advantages.registry import compared_rewards

FILLER = "rollbook/filler"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlRow:
    """Has the fields of TRL's `RolloutSample`."""

    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]
    input_ids: NDArray[np.int64]
    completion_mask: NDArray[np.int64]
    old_log_probs: NDArray[np.float32]
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = field(default_factory=time.time)


def batch_rows(batch: TrainingBatch, *, rows_per_step: int, restored_step: int) -> list[TrlRow]:
    """TRL counts versions from 1, beginning with its initial weights, which are those of step `restored_step`."""
    rows: list[TrlRow] = []
    found = iter(_advantages(batch))
    for entry, group in batch.entries():
        shared = [next(found) for _ in group.samples]
        rows += _group_rows(entry, group, shared, step=batch.step, restored_step=restored_step)
    if len(rows) > rows_per_step:
        forked = [group.id for group in batch.groups if any(len(sample.sequences) > 1 for sample in group.samples)]
        raise RunError(
            f"batch {batch.step} has {len(rows)} rows, but a step of TRL takes {rows_per_step}: the histories of "
            f"{', '.join(forked[:3]) or 'some groups'} forked. Use a rollout function whose samples have one sequence"
        )
    fillers = rows_per_step - len(rows)
    sources = [_filler(row) for row in rows] or [_empty_row(batch.step - restored_step)]
    return rows + [sources[number % len(sources)] for number in range(fillers)]


def _advantages(batch: TrainingBatch) -> list[float]:
    """The advantage of every sample of the batch, in order."""
    samples = [(number, sample.reward) for number, group in enumerate(batch.groups) for sample in group.samples]
    rewards = np.array([math.nan if reward is None else reward for _, reward in samples], dtype=np.float64)
    group_of = np.array([number for number, _ in samples], dtype=np.int64)
    found: list[float] = advantages(rewards, group_of, kind="group", compared=compared_rewards(batch.groups)).tolist()
    return found


def _group_rows(
    entry: BatchEntry, group: PromptGroup, shared: Sequence[float], *, step: int, restored_step: int
) -> list[TrlRow]:
    rewards = np.array([math.nan if s.reward is None else s.reward for s in group.samples], dtype=np.float64)
    scored = rewards[~np.isnan(rewards)]
    std = float(scored.std(ddof=1)) if len(scored) > 1 else math.nan
    version = step - 1 if entry.oldest_version is None else entry.oldest_version
    rows: list[TrlRow] = []
    for sample, reward, advantage in zip(group.samples, rewards.tolist(), shared, strict=True):
        if not sample.is_scorable:
            # TRL divides the loss by the trained tokens of all rows.
            continue
        metrics = {"reward": reward, "reward_std": std, "rollbook/lag": float(step - 1 - version)}
        prompt, completion = _split(sample)
        rows += [
            _row(
                tokens,
                mask,
                prompt=prompt,
                completion=completion,
                advantage=advantage,
                model_version=version - restored_step + 1,
                group_id=entry.sequence,
                metrics=metrics,
            )
            for tokens in sample.sequences
            if (mask := tokens.loss_mask & ~entry.is_masked(tokens)).any()
        ]
    return rows


def _row(tokens: TokenRow, mask: NDArray[np.bool_], **fields: Any) -> TrlRow:
    if not tokens.has_logprobs:
        raise RunError("TRL needs the sampling logprob of every trained token; this group was submitted without them")
    if tokens.columns:
        raise RunError(
            f"TRL has one advantage for a sequence; this group was submitted with the columns {', '.join(tokens.columns)}"
        )
    return TrlRow(
        input_ids=tokens.token_ids.astype(np.int64),
        completion_mask=mask.astype(np.int64),
        old_log_probs=np.where(mask, tokens.logprobs, np.float32(0)).astype(np.float32),
        **fields,
    )


def _split(sample: RolloutSample) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages before the first of the policy, and the rest."""
    messages: Sequence[Mapping[str, Any]] = sample.messages or ()
    first = next((at for at, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    return [dict(m) for m in messages[:first]], [dict(m) for m in messages[first:]]


def _empty_row(model_version: int) -> TrlRow:
    """For a batch without a usable group: two tokens without a gradient."""
    return TrlRow(
        prompt=[],
        completion=[],
        input_ids=np.zeros(2, dtype=np.int64),
        completion_mask=np.array([0, 1], dtype=np.int64),
        old_log_probs=np.zeros(2, dtype=np.float32),
        advantage=0.0,
        model_version=model_version,
        group_id=0,
        metrics={FILLER: 1.0},
    )


def _filler(row: TrlRow) -> TrlRow:
    """A row with advantage 0 and one trained token, so that it hardly changes TRL's mean over tokens."""
    mask = np.zeros_like(row.completion_mask)
    mask[int(row.completion_mask.argmax())] = 1
    return replace(row, completion_mask=mask, advantage=0.0, metrics={FILLER: 1.0})
