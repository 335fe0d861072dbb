"""Selection of the groups of the next batch, and of buffered groups that belong together: pure functions of sizes and order.

A batch has an exact number of sequences and groups are never split. Atropos collects groups of one size into packs as large as the
largest group and takes packs in the order in which they are complete; with minimum allocations it does so for each environment.
Whenever that gives a batch, ours is the same. If it gives none although the sizes add up (3, 5 and 7 never make packs), the oldest
groups that fill the batch exactly are taken, those of environments with a minimum first. If environments have different weights,
the queue is put in an order that respects them; the original documents this and does not do it.
"""

import heapq
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from rollbook.ledger.atropos.records import QueuedGroup

LEAST_WEIGHT = 1e-6
"""An environment of weight 0 fills places that no other environment can fill."""
MOST_SUBSET_BITS = 1 << 28
"""Bounds the memory of an exact fill: number of groups times number of sequences."""


def in_order(queue: Sequence[QueuedGroup], weights: Mapping[int, float], *, seed: int) -> list[QueuedGroup]:
    """The queue in the order in which a batch takes groups.

    If all environments have the same weight: the order of arrival, as in the original. Otherwise environments alternate so that
    each has its share of the sequences: the next group is that of the environment with the least served sequences per weight. The
    start is random, so over many batches even an environment whose share is smaller than one group gets it.
    """
    present = {group.env_id: max(weights.get(group.env_id, 1.0), LEAST_WEIGHT) for group in queue}
    arrived = sorted(queue, key=lambda group: group.place)
    if len(set(present.values())) <= 1:
        return arrived
    rng = random.Random(seed)
    by_env: dict[int, deque[QueuedGroup]] = {env_id: deque() for env_id in sorted(present)}
    for group in arrived:
        by_env[group.env_id].append(group)
    # The time at which an environment has received its share for its next group.
    due = [(rng.random() * groups[0].size / present[env_id], env_id) for env_id, groups in by_env.items()]
    heapq.heapify(due)
    ordered = []
    while due:
        time, env_id = heapq.heappop(due)
        ordered.append(by_env[env_id].popleft())
        if by_env[env_id]:
            heapq.heappush(due, (time + by_env[env_id][0].size / present[env_id], env_id))
    return ordered


def form_batch(
    queue: Sequence[QueuedGroup], *, batch_size: int, largest: int, minimums: Mapping[int, float]
) -> list[QueuedGroup] | None:
    """Groups of exactly `batch_size` sequences out of `queue` (in order), or None.

    `largest` is the size of the largest queued group; `minimums` the minimum part of a batch by environment.
    """
    if sum(group.size for group in queue) < batch_size:
        return None
    if not minimums:
        packed = _packs(queue, largest)
        return _exact_start(packed, batch_size) or fill_exactly(queue, batch_size)
    return _with_minimums(queue, batch_size, largest, minimums)


def find_sum(sizes: Sequence[int], target: int) -> list[int]:
    """Indices of buffered groups that add up to `target`: the first ones that fit one after the other, else any."""
    taken, total = [], 0
    for at, size in enumerate(sizes):
        if total + size <= target:
            taken.append(at)
            total += size
            if total == target:
                return taken
    # Like Atropos, prefer later groups: walk back from the end and take each group that leaves a reachable rest.
    if not 0 <= target <= sum(sizes):
        return []
    mask = (1 << (target + 1)) - 1
    reachable = list(accumulate(sizes, lambda sums, size: (sums | sums << size) & mask, initial=1))
    if not reachable[-1] >> target & 1:
        return []
    chosen, rest = [], target
    for at in range(len(sizes) - 1, -1, -1):
        if rest >= sizes[at] and reachable[at] >> (rest - sizes[at]) & 1:
            chosen.append(at)
            rest -= sizes[at]
    return sorted(chosen)


def fill_exactly(queue: Sequence[QueuedGroup], target: int) -> list[QueuedGroup] | None:
    """The first groups, in order, whose sizes add up to `target`: a group is taken if the rest can still be filled."""
    queue = [group for group in queue if group.size <= target][: max(1, MOST_SUBSET_BITS // max(1, target))]
    mask = (1 << (target + 1)) - 1
    sums = list(
        accumulate((g.size for g in reversed(queue)), lambda seen, size: (seen | seen << size) & mask, initial=1)
    )
    if not sums[-1] >> target & 1:
        return None
    chosen, rest = [], target
    for at, group in enumerate(queue):
        behind = sums[len(queue) - at - 1]
        if group.size <= rest and behind >> (rest - group.size) & 1:
            chosen.append(group)
            rest -= group.size
    return chosen


def _packs(queue: Iterable[QueuedGroup], largest: int) -> list[QueuedGroup]:
    """Packs of groups of one size that are as large as the largest group, in the order in which they are complete."""
    packed: list[QueuedGroup] = []
    open_packs: dict[int, list[QueuedGroup]] = {}
    for group in queue:
        pack = open_packs.setdefault(group.size, [])
        pack.append(group)
        if len(pack) * group.size == largest:
            packed += open_packs.pop(group.size)
    return packed


def _exact_start(packed: Iterable[QueuedGroup], batch_size: int) -> list[QueuedGroup] | None:
    chosen, total = [], 0
    for group in packed:
        chosen.append(group)
        total += group.size
        if total >= batch_size:
            return chosen if total == batch_size else None
    return None


def _with_minimums(
    queue: Sequence[QueuedGroup], batch_size: int, largest: int, minimums: Mapping[int, float]
) -> list[QueuedGroup] | None:
    by_env: dict[int, list[QueuedGroup]] = {}
    for group in queue:
        by_env.setdefault(group.env_id, []).append(group)
    wanted = {env_id: int(batch_size * part) for env_id, part in minimums.items() if int(batch_size * part) > 0}
    if not wanted.keys() <= by_env.keys():
        return None  # an environment with a minimum has no groups yet: wait for it
    return _from_packs(queue, by_env, wanted, batch_size, largest) or _from_groups(queue, by_env, wanted, batch_size)


def _from_packs(
    queue: Sequence[QueuedGroup],
    by_env: Mapping[int, Sequence[QueuedGroup]],
    wanted: Mapping[int, int],
    batch_size: int,
    largest: int,
) -> list[QueuedGroup] | None:
    """The batch of the original: the first packs of each environment up to its minimum, then other packed groups that fit."""
    packs = {env_id: _packs(groups, largest) for env_id, groups in by_env.items()}
    if not all(packs[env_id] for env_id in wanted):
        return None
    chosen = _least_first(packs, wanted, batch_size)
    total = _total(chosen)
    left = {group.group_id for pack in packs.values() for group in pack} - {group.group_id for group in chosen}
    for group in queue:
        if group.group_id in left and total + group.size <= batch_size:
            chosen.append(group)
            total += group.size
    return chosen if total == batch_size else None


def _from_groups(
    queue: Sequence[QueuedGroup],
    by_env: Mapping[int, Sequence[QueuedGroup]],
    wanted: Mapping[int, int],
    batch_size: int,
) -> list[QueuedGroup] | None:
    """The first groups of each environment up to its minimum, then the oldest others that fill the batch exactly."""
    least = _least_first(by_env, wanted, batch_size)
    taken = {group.group_id for group in least}
    others = fill_exactly([group for group in queue if group.group_id not in taken], batch_size - _total(least))
    filled = None if others is None else least + others
    due = {env_id: min(num, _total(by_env[env_id])) for env_id, num in _scaled(by_env, wanted, batch_size).items()}
    if filled is not None and _gives(filled, due):
        return filled
    # The first groups of one environment left too few places for another.
    return _fill_by_env(by_env, due, batch_size) or filled


def _gives(groups: Sequence[QueuedGroup], due: Mapping[int, int]) -> bool:
    """Whether each environment has at least what it is due."""
    return all(_total(group for group in groups if group.env_id == env_id) >= num for env_id, num in due.items())


def _total(groups: Iterable[QueuedGroup]) -> int:
    return sum(group.size for group in groups)


def _fill_by_env(
    by_env: Mapping[int, Sequence[QueuedGroup]], due: Mapping[int, int], batch_size: int
) -> list[QueuedGroup] | None:
    """Groups that fill the batch exactly and give each environment its due, with the least excess; None if impossible."""
    mask = (1 << (batch_size + 1)) - 1
    free = [group for env_id, groups in by_env.items() if env_id not in due for group in groups]
    fills = {env_id: _sums(by_env[env_id], mask) >> num << num for env_id, num in due.items()}
    # The sums that the environments from each one on can reach, together with the groups without a due.
    behind = list(
        accumulate(reversed(fills.values()), lambda sums, own: _added(sums, own, mask), initial=_sums(free, mask))
    )
    if not behind.pop() >> batch_size & 1:
        return None
    chosen, rest = [], batch_size
    for env_id, own in fills.items():
        sums = behind.pop()
        num = next(num for num in range(rest + 1) if own >> num & 1 and sums >> (rest - num) & 1)
        chosen += fill_exactly(by_env[env_id], num) or []
        rest -= num
    return chosen + (fill_exactly(free, rest) or [])


def _sums(groups: Iterable[QueuedGroup], mask: int) -> int:
    """The sums that subsets of these groups can reach, as a bit set."""
    sums = 1
    for group in groups:
        sums |= sums << group.size & mask
    return sums


def _added(sums: int, others: int, mask: int) -> int:
    """All sums of a member of `sums` and a member of `others`."""
    added = 0
    while others:
        lowest = others & -others
        added |= sums * lowest & mask
        others ^= lowest
    return added


def _least_first(
    by_env: Mapping[int, Sequence[QueuedGroup]], wanted: Mapping[int, int], batch_size: int
) -> list[QueuedGroup]:
    """For each environment with a minimum, its first groups up to the minimum."""
    chosen: list[QueuedGroup] = []
    total = 0
    for env_id, least in _scaled(by_env, wanted, batch_size).items():
        taken = 0
        for group in by_env[env_id]:
            if taken >= least:
                break
            if total + group.size <= batch_size:
                chosen.append(group)
                taken += group.size
                total += group.size
    return chosen


def _scaled(
    by_env: Mapping[int, Sequence[QueuedGroup]], wanted: Mapping[int, int], batch_size: int
) -> Mapping[int, int]:
    """Scale the minimums down if they exceed the batch together."""
    total_wanted = sum(wanted.values())
    if total_wanted <= batch_size:
        return wanted
    scale = batch_size / total_wanted
    return {
        env_id: max(min(group.size for group in by_env[env_id]), int(least * scale)) for env_id, least in wanted.items()
    }
