"""`rollbook inspect`: a run as text. The overview, the list of groups, and one group token by token."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray

from rollbook.commands.arguments import Argument, Option
from rollbook.commands.output import result
from rollbook.contracts.batch import BatchEntry
from rollbook.contracts.errors import RunError
from rollbook.contracts.freshness import lag
from rollbook.contracts.group import GroupId, GroupState, PromptGroup
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.contracts.user_errors import visible
from rollbook.dashboard.run_files import summarise
from rollbook.dashboard.source import GroupRow
from rollbook.rollout.chat.provenance import Pieces, TokenSpan, spans_of
from rollbook.rollout.contract import Tokenizer
from rollbook.rollout.dispatch.selection_bias import (
    MaskedSample,
    PlayedGroup,
    compare,
    compare_masked,
    masked_by_length,
    masked_by_position,
)
from rollbook.run.reader import RecordedRun, open_run


class _Tokenizer(Tokenizer, Pieces, Protocol):
    """Implemented by `ModelTokenizer`, which needs the extra `rollout`; only the view of one group needs it."""


BIAS_WINDOW_GROUPS = 2000
"""The newest groups that the check for selection bias covers."""
MASK_WINDOW_STEPS = 20
"""The newest steps that are read to see what was masked and which tasks have the largest lag."""
MOST_TASKS = 3


def overview_lines(run: RecordedRun) -> Iterator[str]:
    status, figures = run.status(), summarise(run.directory.path)
    yield f"run         {run.run_id} in {run.directory.path}"
    yield f"steps       {status.acknowledged_step} trained, {status.durable_step} durable, trainer epoch {status.epoch}"
    yield f"policy      version {status.version}, publication {status.publication}"
    yield f"gate        {status.gate}, capacity {status.capacity}"
    yield "groups      " + ", ".join(f"{count} {state}" for state, count in status.by_state.items())
    if status.dropped:
        yield "dropped     " + ", ".join(f"{count} {kind}" for kind, count in status.dropped.items())
    if figures.steps:
        yield f"reward      {_number(figures.reward.first)} → {_number(figures.reward.last)}"
        if figures.solved.last is not None:
            yield f"solved      {_number(figures.solved.first)} → {_number(figures.solved.last)}"
        bound = run.config.gate.max_head_offpolicy_versions
        yield f"lag         at most {figures.max_lag} of {bound} allowed{_oldest_tasks(run)}"
    yield "bias        " + _selection_bias(run)
    if run.config.gate.batch_policy.masks_tokens:
        yield "masked      " + _masked_tokens(run)
    yield "end         " + ("finished" if status.ended else "not finished: `rollbook train` on this directory resumes")


def _selection_bias(run: RecordedRun) -> str:
    """Whether the trained groups differ from all dispatched groups, over the newest groups."""
    first = max(0, run.status().opened - BIAS_WINDOW_GROUPS)
    rows = run.groups(start=first, limit=BIAS_WINDOW_GROUPS)
    report = compare(
        PlayedGroup.from_ledger(
            json.loads(row.outcome_json) if row.outcome_json else {},
            state=GroupState(row.state),
            drop_reason=row.drop_reason,
        )
        for row in rows
    )
    if not report.biases:
        return "too few trained groups"
    if report.warnings:
        return "; ".join(str(bias) for bias in report.warnings)
    distances = ", ".join(f"{bias.measure} {bias.distance:.2f}" for bias in report.biases)
    return f"trained groups are like the dispatched ones (distance: {distances}; {report.left_out_share:.0%} left out)"


def _oldest_tasks(run: RecordedRun) -> str:
    """The tasks whose groups had the largest mean lag in the newest batches."""
    last = run.status().acknowledged_step
    lags: dict[str, list[int]] = {}
    for step in range(max(1, last - MASK_WINDOW_STEPS + 1), last + 1):
        for entry in run.manifest(step).entries:
            if entry.oldest_version is not None:
                # The id of a group is task@draw.
                task = entry.group_id.rpartition("@")[0] or entry.group_id
                lags.setdefault(task, []).append(lag(step=step, oldest_version=entry.oldest_version))
    means = {task: sum(found) / len(found) for task, found in lags.items()}
    oldest = sorted((task for task in means if means[task]), key=lambda task: (-means[task], task))[:MOST_TASKS]
    if not oldest:
        return ""
    shown = ", ".join(f"{visible(task)} {means[task]:.1f}" for task in oldest)
    return f"; largest means of the last {min(last, MASK_WINDOW_STEPS)} steps by task: {shown}"


def _percentages(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.0%}" for share in shares)


def _masked_tokens(run: RecordedRun) -> str:
    """How much of the newest batches was masked, and whether that changes what is trained."""
    last = run.status().acknowledged_step
    samples = [
        MaskedSample(
            trainable=len(masked_at),
            trained=int((~masked_at).sum()),
            seconds=sample.ended_at - sample.started_at if sample.ended_at and sample.started_at else None,
            reward=sample.reward,
            masked_at=masked_at,
        )
        for batch in run.batches(last, first=max(1, last - MASK_WINDOW_STEPS + 1))
        for entry, group in batch.entries()
        for sample in group.scorable
        for masked_at in [entry.masked_tokens(sample)]
    ]
    trainable = sum(sample.trainable for sample in samples)
    if not trainable:
        return "nothing is trained yet"
    masked = trainable - sum(sample.trained for sample in samples)
    share = f"{masked / trainable:.1%} of {trainable} tokens of the last {min(last, MASK_WINDOW_STEPS)} steps"
    if masked:
        share += (
            f" (from the first to the last quarter of a sample: {_percentages(masked_by_position(samples))};"
            f" from the shortest to the longest quarter of the samples: {_percentages(masked_by_length(samples))})"
        )
    biases = compare_masked(samples)
    warnings = [
        f"{b.measure} {b.dispatched_mean:.4g} before, {b.trained_mean:.4g} after" for b in biases if b.is_biased
    ]
    if warnings:
        return f"{share}; this changes what is trained (means over tokens): {'; '.join(warnings)}"
    distances = ", ".join(f"{bias.measure} {bias.distance:.2f}" for bias in biases)
    return f"{share}; the trained tokens are like all tokens (distance: {distances})" if biases else share


def groups_lines(run: RecordedRun, *, state: str | None, limit: int, start: int) -> Iterator[str]:
    if state is not None and state not in list(GroupState):
        raise RunError(f"unknown state {state!r}; the states of a group are {', '.join(GroupState)}")
    wanted = None if state is None else GroupState(state)
    yield f"{'sequence':>8}  {'group':<28} {'state':<10} {'step':>5} {'tries':>5}  {'reward':>7}  note"
    for group in run.groups(state=wanted, start=start, limit=limit):
        reward = None if group.outcome is None else group.outcome.reward_mean
        step = "" if group.step is None else str(group.step)
        yield (
            f"{group.sequence:>8}  {visible(group.group_id):<28} {group.state:<10} {step:>5} {group.attempt:>5}  "
            f"{_number(reward):>7}  {visible(group.drop_reason or '')}"
        )


def group_lines(run: RecordedRun, group_id: str) -> Iterator[str]:
    explained, group = run.explain(GroupId(group_id)), run.samples(GroupId(group_id))
    row = explained.group
    yield from _life(row)
    for move in explained.moves:
        when = time.strftime("%H:%M:%S", time.localtime(move.at))
        yield f"  {when}  {move.from_state or '–'} → {move.to_state}  {visible(move.note)}  (by {visible(move.by)})"
    if group is None:
        yield "its payload was deleted" if row.payload_bytes else "it was never submitted"
        return
    tokenizers = load_on_demand("rollbook.rollout.chat.tokenizer:ModelTokenizer")
    entries = () if row.step is None else run.manifest(row.step).entries
    entry = next((entry for entry in entries if entry.group_id == row.group_id), None)
    yield from _samples(group, tokenizers.from_directory(run.directory.initial_model), entry)


def _life(row: GroupRow) -> Iterator[str]:
    ids = f"group {visible(row.group_id)}: task {visible(row.task_id)}"
    yield f"{ids}, draw {row.draw}, {row.origin}, now {row.state}"
    if row.drop_reason:
        yield f"  dropped: {row.drop_reason}"
    yield (
        f"  admitted at version {row.admission_version}, attempt {row.attempt}, "
        f"oldest trained version {row.oldest_version}"
    )


def _samples(group: PromptGroup, tokenizer: _Tokenizer, entry: BatchEntry | None) -> Iterator[str]:
    if group.baseline is not None:
        quorum = ", ".join(f"{reward:.4g}" for reward in group.baseline)
        yield f"  part {group.part}; its baseline are the rewards of the quorum: {quorum or 'none could be scored'}"
    for number, sample in enumerate(group.samples):
        yield ""
        yield f"sample {number}: {_result(sample)}"
        rewards = {name: value for name, value in sample.metrics.items() if name.startswith("reward/")}
        if rewards:
            yield "  rewards " + ", ".join(
                f"{name.removeprefix('reward/')} {value:.4g}" for name, value in rewards.items()
            )
        if sample.facts:
            yield f"  facts {json.dumps(dict(sample.facts), default=str)}"
        for index, row in enumerate(sample.sequences):
            if len(sample.sequences) > 1:
                yield f"  sequence {index}"
            turns = [turn for turn in sample.turns if turn.sequence == index]
            masked = np.zeros(len(row), dtype=np.bool_) if entry is None else entry.is_masked(row)
            yield from _tokens(row, masked, spans_of(row, turns, sample.messages, tokenizer), tokenizer)


def _result(sample: RolloutSample) -> str:
    scored = f"reward {_number(sample.reward)}" if sample.reward is not None else f"unscorable ({sample.invalid_cause})"
    solved = "" if sample.solved is None else (", solved" if sample.solved else ", not solved")
    return f"{scored}{solved}, ended {sample.finish_reason}, {len(sample.turns)} turns, {sample.num_trained} trained tokens"


def _tokens(
    row: TokenRow, masked: NDArray[np.bool_], spans: Sequence[TokenSpan], tokenizer: _Tokenizer
) -> Iterator[str]:
    """Token by token: its author, and for trained tokens the logprob and the version that sampled it."""
    yield f"  {'at':>4} {'id':>7}  {'token':<20} {'author':<10} {'logprob':>9} {'version':>7} trained"
    for span in spans:
        for at in range(span.start, span.end):
            text = repr(tokenizer.decode([int(row.token_ids[at])], skip_special_tokens=False))
            trained = bool(row.loss_mask[at])
            logprob = f"{row.logprobs[at]:.4f}" if trained else ""
            version = str(row.versions[at]) if row.versions[at] >= 0 else ""
            author = span.author if at == span.start else "·"
            line = f"  {at:>4} {int(row.token_ids[at]):>7}  {text:<20} {author:<10} {logprob:>9} {version:>7}"
            yield f"{line} {('masked' if masked[at] else 'yes') if trained else ''}".rstrip()


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def inspect_command(  # noqa: PLR0917 - a command line is a list of flags
    run: Annotated[Path, Argument(help="The run directory.")],
    group: Annotated[str | None, Argument(help="A group id: shows its history and its samples.")] = None,
    groups: Annotated[bool, Option("--groups", help="List groups.")] = False,
    state: Annotated[str | None, Option("--state", help="With --groups: only those in this state.")] = None,
    limit: Annotated[int, Option("--limit", min=1, help="With --groups: how many.")] = 40,
    start: Annotated[int, Option("--from", min=0, help="With --groups: the first sequence number.")] = 0,
) -> None:
    """Show a run, its groups, or one group with every token, logprob and version."""
    with open_run(run) as record:
        if group is not None:
            lines = group_lines(record, group)
        elif groups or state is not None:
            lines = groups_lines(record, state=state, limit=limit, start=start)
        else:
            lines = overview_lines(record)
        for line in lines:
            result(line)
