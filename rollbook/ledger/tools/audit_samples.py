"""The audit's checks of samples, parts, versions and masked tokens. docs/ledger-rules.md, rules 2, 20 and 21.

The law of samples, with policy `parts`: expected = open + stored + missing. It is counted from the run's counters and from the
rows. Each part that was stored incomplete has a next part, which was opened for exactly the samples that were left.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rollbook.contracts.batch import BatchEntry, BatchManifest
from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.group import GroupState, group_id, part_id
from rollbook.contracts.policy import NOT_SAMPLED
from rollbook.ledger.records import GroupRecord, Origin, PublicationRecord, RunRecord
from rollbook.ledger.rules.publications import admission_of
from rollbook.ledger.rules.runs import sample_counts
from rollbook.ledger.store import Transaction

Report = Callable[[str], None]


@dataclass(slots=True)
class SampleTotals:
    """Samples of some groups, only with policy `parts`."""

    expected: int = 0
    stored: int = 0
    missing: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: "SampleTotals") -> "SampleTotals":
        missing = Counter(self.missing) + Counter(other.missing)
        return SampleTotals(self.expected + other.expected, self.stored + other.stored, dict(missing))


@dataclass(slots=True)
class SampleLedger:
    """Samples counted from the rows of one run."""

    run: RunRecord
    queued: int = 0
    external_queued: int = 0
    external_queued_samples: int = 0
    leased: int = 0
    waiting: int = 0
    final: SampleTotals = field(default_factory=SampleTotals)
    """Samples of durable and dropped groups."""
    changing: SampleTotals = field(default_factory=SampleTotals)
    """Samples of all other groups."""
    batches: Counter[int] = field(default_factory=Counter)
    """Samples of each batch."""
    parts: dict[tuple[int, int], GroupRecord] = field(default_factory=dict)
    """Parts by sequence and number, of groups that have more than one."""
    neighbours: dict[tuple[int, int], GroupRecord] = field(default_factory=dict)
    """Parts before and after these that an earlier audit has checked."""

    @property
    def counts_samples(self) -> bool:
        return self.run.settings.rule.policy is BatchPolicy.PARTS

    def add(self, group: GroupRecord, *, is_final: bool) -> None:
        is_stored = group.payload_digest is not None
        if group.state is GroupState.QUEUED:
            self.queued += group.num_samples
            if group.origin is Origin.EXTERNAL:
                self.external_queued += 1
                self.external_queued_samples += group.num_samples
        if group.step is not None:
            self.batches[group.step] += group.num_samples
        if not self.counts_samples:
            return
        totals = self.final if is_final else self.changing
        totals.expected += group.expected_samples if group.part == 1 else 0
        totals.stored += group.num_samples if is_stored else 0
        if group.state is GroupState.DISPATCHED and group.owner is None:
            self.waiting += group.expected_samples
        elif group.state is GroupState.DISPATCHED:
            self.leased += group.expected_samples
        elif not is_stored:
            kind = (group.drop_reason or "").partition(":")[0]  # even of a damaged reason
            totals.missing[kind] = totals.missing.get(kind, 0) + group.expected_samples
        if group.part > 1 or not is_stored or group.num_samples != group.expected_samples:
            self.parts[group.sequence, group.part] = group

    def check(self, tx: Transaction, report: Report) -> None:
        counted = sample_counts(tx, self.run)
        totals = self.final + self.changing
        for what, found, expected in (
            ("queued samples by rows", self.queued, self.run.queued_samples),
            ("queued external groups by rows", self.external_queued, self.run.external_queued),
            (
                "queued external samples by rows",
                self.external_queued_samples,
                self.run.external_queued_samples,
            ),
            ("expected samples by rows", totals.expected, counted.expected),
            ("samples of leased parts by rows", self.leased, self.run.leased_samples),
            ("samples of waiting parts by rows", self.waiting, self.run.waiting_samples),
            ("stored samples by rows", totals.stored, counted.stored),
            ("missing samples by kind", dict(sorted(totals.missing.items())), dict(sorted(counted.missing.items()))),
        ):
            if found != expected:
                report(f"{what}: {found}, expected {expected}")
        total = counted.open + counted.stored + sum(counted.missing.values())
        if total != counted.expected:
            report(f"samples that are open, stored or missing: {total}, expected {counted.expected}")
        for part in self.parts.values():
            self._check_chain(part, report)

    def find_neighbours(self, tx: Transaction) -> None:
        """Read the parts before and after the parts of this audit that an earlier audit has checked."""
        for part in list(self.parts.values()):
            for number in (part.part - 1, part.part + 1):
                if number >= 1 and (part.sequence, number) not in self.parts:
                    name = part_id(group_id(part.task_id, part.draw), number)
                    found = tx.groups.get(self.run.run_id, name)
                    if found is not None:
                        self.neighbours[part.sequence, number] = found

    def check_batch(self, manifest: BatchManifest, report: Report) -> None:
        """With policy `parts`, the size of a batch is its number of samples."""
        size, wanted = self.batches[manifest.step], self.run.settings.rule.batch_size
        if not manifest.is_last and size < wanted:
            report(f"batch {manifest.step} has {size} samples, expected at least {wanted}")
        if manifest.is_last and not 1 <= size < wanted:
            report(f"batch {manifest.step} is the short last one and has {size} samples of {wanted}")

    def _check_chain(self, part: GroupRecord, report: Report) -> None:
        """A part has the id of its number; what it lacks is the size of the next part."""
        name = part.group_id
        if part.part > 1 and name != part_id(group_id(part.task_id, part.draw), part.part):
            report(f"group {name} is part {part.part} of draw {part.draw} of task {part.task_id} and has another id")
        if part.part > 1 and self._part(part.sequence, part.part - 1) is None:
            report(f"group {name} is part {part.part}, and the part before it is missing")
        following = self._part(part.sequence, part.part + 1)
        left = part.expected_samples - part.num_samples if part.payload_digest is not None else 0
        opened = 0 if following is None else following.expected_samples
        if opened != left:
            report(f"group {name} lacks {left} samples, and its next part was opened for {opened}")
        if following is not None and following.baseline != part.baseline:
            report(f"group {name} has the baseline {part.baseline}, and its next part {following.baseline}")

    def _part(self, sequence: int, number: int) -> GroupRecord | None:
        return self.parts.get((sequence, number)) or self.neighbours.get((sequence, number))


Bounds = tuple[int | None, int | None]
"""The lowest and the highest version that the oldest or the newest token of a group may count as."""
VersionBounds = tuple[Bounds, Bounds]
"""The bounds of the oldest and of the newest token."""


def version_bounds(
    numbers: Sequence[int], admission: int | None, publications: Mapping[int, PublicationRecord]
) -> VersionBounds | int:
    """The versions that a group with tokens of these publications may state; a publication that is missing."""
    named = [number for number in numbers if number != NOT_SAMPLED]
    missing = [number for number in named if number not in publications]
    if missing:
        return missing[0]
    known = [publications[number] for number in named]
    has_unknown = NOT_SAMPLED in numbers
    if has_unknown and admission is not None:
        known += [publications[admission]] if admission in publications else []
        has_unknown = False
    if not known:
        return (None, None), (None, None)
    counted, sampled = [record.effective_step for record in known], [record.step for record in known]
    newest = (None, None) if has_unknown else (max(counted), max(sampled))
    return (min(counted), min(sampled)), newest


def wrong_versions(group: GroupRecord, bounds: VersionBounds | int) -> Iterator[str]:
    """The oldest and the newest version are those of the group's publications."""
    if isinstance(bounds, int):
        yield f"has tokens of publication {bounds}, which is missing"
        return
    for name, stated, (lowest, highest) in (
        ("oldest", group.oldest_version, bounds[0]),
        ("newest", group.newest_version, bounds[1]),
    ):
        if group.state is GroupState.QUEUED or stated is None or lowest is None or highest is None:
            if stated != lowest:
                yield f"has the {name} version {stated}, expected {lowest}"
        elif not lowest <= stated <= highest:
            # A publication may have been demoted after the group was batched or dropped.
            yield f"has the {name} version {stated}, which is not between {lowest} and {highest}"


def wrong_mask(
    group: GroupRecord, entry: BatchEntry, cut: int | None, publications: Mapping[int, PublicationRecord]
) -> str | None:
    """What is wrong with the masked publications of a batch entry, in words.

    A publication may have been demoted after the batch was decided. So one that counts as fresh today was fresh then, and one that
    was stale without a demotion was masked; between the two, both are right.
    """
    if cut is None and not entry.masked:
        return None
    strangers = sorted(set(entry.masked) - set(group.publications))
    if strangers:
        return f"tokens of publication {strangers[0]} are masked, and it has none"
    if cut is None:
        return "tokens are masked, and the policy masks none"
    unmasked: list[PublicationRecord] = []
    for number in group.publications:
        record = _sampled_by(group, number, publications)
        if number in entry.masked:
            if record is None or record.effective_step >= cut:
                return f"tokens of publication {number} are masked, and they were not older than the cut {cut}"
        elif record is not None:
            if record.step < cut:
                return f"tokens of publication {number} (version {record.step}) are below the cut {cut} and not masked"
            unmasked.append(record)
    return _wrong_oldest(entry.oldest_version, unmasked)


def _sampled_by(
    group: GroupRecord, number: int, publications: Mapping[int, PublicationRecord]
) -> PublicationRecord | None:
    """The weights that tokens of publication `number` count as: without a publication, those of the group's admission."""
    sampled_by = admission_of(group) if number == NOT_SAMPLED else number
    return None if sampled_by is None else publications.get(int(sampled_by))


def _wrong_oldest(stated: int | None, unmasked: Sequence[PublicationRecord]) -> str | None:
    """The oldest version of a batch entry is that of its oldest publication that is not masked."""
    if not unmasked or stated is None:
        lowest = min((record.effective_step for record in unmasked), default=None)
        return None if stated is lowest else f"the oldest version that is not masked is {lowest}, not {stated}"
    lowest, highest = min(record.effective_step for record in unmasked), min(record.step for record in unmasked)
    if not lowest <= stated <= highest:
        return f"the oldest version that is not masked is between {lowest} and {highest}, not {stated}"
    return None
