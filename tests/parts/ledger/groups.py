"""Small groups, settings and outcomes for ledger tests."""

from collections.abc import Iterable, Sequence

import numpy as np

from rollbook.contracts.admission import EndOfDataRule, OpenPart, RunId, RunSettings
from rollbook.contracts.freshness import AdmissionShare, BatchPolicy, FreshnessRule
from rollbook.contracts.group import DropReason, GroupOutcome, PromptGroup, group_id
from rollbook.contracts.group_codec import encode_group
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import Draw, TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.ledger.rules.groups import Submission

RUN = RunId("run-1")


def settings(
    *,
    per_step: int = 2,
    in_flight: int = 8,
    staleness_bound: int = 1,
    policy: BatchPolicy = BatchPolicy.WAIT,
    max_steps: int | None = None,
    max_attempts: int = 3,
    deadline_s: float = 100.0,
    ttl_s: float = 10.0,
    end_of_data: EndOfDataRule = EndOfDataRule.SHORT_BATCH,
    keep_payloads: bool = True,
    group_size: int = 1,
    quorum: int | None = None,
    admission_share: AdmissionShare = AdmissionShare.HALF,
) -> RunSettings:
    return RunSettings(
        rule=FreshnessRule(
            groups_per_step=per_step,
            max_in_flight=in_flight,
            max_head_offpolicy_versions=staleness_bound,
            policy=policy,
            max_steps=max_steps,
            samples_per_group=group_size,
            quorum=quorum,
            admission_share=admission_share,
        ),
        group_deadline_s=deadline_s,
        max_attempts=max_attempts,
        owner_ttl_s=ttl_s,
        end_of_data=end_of_data,
        keep_payloads=keep_payloads,
    )


def draws(start: int, count: int) -> list[Draw]:
    return [Draw(task_id=TaskId(f"task{at}"), number=0, position=at) for at in range(start, start + count)]


def token_row(publications: Iterable[int], *, prompt: int = 2) -> TokenRow:
    stamps = list(publications)
    length = prompt + len(stamps)
    return TokenRow.of(
        token_ids=range(10, 10 + length),
        logprobs=[0.0] * prompt + [-0.5] * len(stamps),
        loss_mask=[False] * prompt + [True] * len(stamps),
        versions=[-1] * prompt + stamps,
    )


def group_of(task: str, publications: Iterable[int] = (0,), *, draw: int = 0, samples: int = 2) -> PromptGroup:
    """A group whose samples were sampled by the given publications, one trained token each."""
    stamps = list(publications)
    return PromptGroup(
        id=group_id(TaskId(task), draw),
        task_id=TaskId(task),
        draw=draw,
        samples=tuple(
            RolloutSample(sequences=(token_row(stamps),), sampling=SamplingParams(), reward=float(at))
            for at in range(samples)
        ),
    )


def part_of(
    task: str,
    part: OpenPart,
    stamps: Sequence[Iterable[int]],
    *,
    quorum: int,
    rewards: Sequence[float] | None = None,
) -> PromptGroup:
    """A part with one sample for each of `stamps`, which are the publications of its tokens."""
    rewards = list(rewards) if rewards is not None else [float(at) for at in range(len(stamps))]
    return PromptGroup(
        id=part.group_id,
        task_id=TaskId(task),
        draw=0,
        samples=tuple(
            RolloutSample(sequences=(token_row(publications),), sampling=SamplingParams(), reward=reward)
            for publications, reward in zip(stamps, rewards, strict=True)
        ),
        part=part.number,
        baseline=tuple(rewards[:quorum]) if part.number == 1 else part.baseline,
    )


def big_group(task: str, *, samples: int = 8, tokens: int = 1024, publication: int = 0) -> PromptGroup:
    rng = np.random.default_rng(len(task))
    row = TokenRow(
        token_ids=rng.integers(0, 50_000, tokens).astype(np.int32),
        logprobs=(-rng.random(tokens)).astype(np.float32),
        loss_mask=np.arange(tokens) >= tokens // 2,
        versions=np.where(np.arange(tokens) >= tokens // 2, publication, -1).astype(np.int32),
    )
    sample = RolloutSample(sequences=(row,), sampling=SamplingParams(), reward=1.0)
    return PromptGroup(id=group_id(TaskId(task), 0), task_id=TaskId(task), draw=0, samples=(sample,) * samples)


def outcome_of(group: PromptGroup) -> GroupOutcome:
    return group.outcome(seconds=1.5)


def submission_of(
    group: PromptGroup, *, attempt: int = 1, drop: DropReason | None = None, producer: str | None = None
) -> Submission:
    return Submission.of(encode_group(group, outcome=outcome_of(group), attempt=attempt, drop=drop, producer=producer))
