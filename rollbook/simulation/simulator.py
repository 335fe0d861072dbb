"""Simulates the loop of a run on an event heap: gate, episodes, policy servers, batches, training, publications.

What is decided comes from the real rules (`ledger.py`); how long it takes comes from a trace (`durations.py`). The trainer follows
`trainer/loop.py`: it fetches batch s+1 while it trains batch s, and settles step s while it trains batch s+1.
"""

import heapq
import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.contracts.errors import UsageError
from rollbook.contracts.freshness import SAME_MOMENT_S, BatchPolicy, Candidate, is_part_complete, lag
from rollbook.simulation.durations import Durations, Episode, EpisodeSource
from rollbook.simulation.engine import SimulatedReplica, SlowedClock
from rollbook.simulation.ledger import SimulatedBatch, SimulatedLedger
from rollbook.simulation.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    step: int
    ended_at: float
    waited_s: float
    trained_s: float
    samples: int
    tokens: int
    """Trainable tokens, masked ones included."""
    masked_tokens: float
    lags: tuple[int, ...]
    """The lag of the oldest trained token of each group or part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    setting: Setting
    steps: tuple[SimulatedStep, ...]
    seconds: float
    idle_engine_share: float
    max_load: int
    """Most concurrent requests of one replica."""
    opened: int
    """In units of the gate, like the next four."""
    open: int
    queued: int
    batched: int
    dropped: dict[str, int]


@dataclass(slots=True, eq=False)
class _Running:
    """An episode that is played."""

    group: "_Group"
    episode: Episode
    replica: int
    turn: int = 0
    turn_began: float = 0.0
    sampled: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each policy request."""

    def first_token_at(self) -> float:
        began, ended = self.sampled[0]
        return began + (ended - began) * len(self.episode.turns) / max(len(self.episode.turns), self.episode.tokens)

    def masked_tokens(self, cut_at: float) -> float:
        """Tokens sampled before `cut_at`, if tokens are spread evenly over the requests."""
        shares = (min(1.0, max(0.0, (cut_at - s) / (e - s))) if e > s else float(e < cut_at) for s, e in self.sampled)
        return self.episode.tokens * sum(shares) / max(1, len(self.sampled))


@dataclass(slots=True, eq=False)
class _Group:
    sequence: int
    drop: str | None
    running: int
    part: int = 1
    finished: list[_Running] = field(default_factory=list)
    is_flushing: bool = False


@dataclass(slots=True, kw_only=True)
class _BatchInTraining:
    batch: SimulatedBatch
    began_at: float
    waited_s: float
    samples: int = 0
    tokens: int = 0
    computed_samples: int = 0
    """Those with a token that is not masked: the trainer leaves out the others."""
    computed_tokens: int = 0
    masked_tokens: float = 0.0
    lags: list[int] = field(default_factory=list)

    def add(self, candidate: Candidate, episodes: Sequence[_Running], cut_at: float) -> None:
        self.samples += len(episodes)
        self.tokens += sum(one.episode.tokens for one in episodes)
        computed = [one for one in episodes if one.sampled[-1][1] > cut_at]
        self.computed_samples += len(computed)
        self.computed_tokens += sum(one.episode.tokens for one in computed)
        self.masked_tokens += sum(one.masked_tokens(cut_at) for one in episodes)
        # The oldest token that is not masked.
        oldest = max(candidate.oldest_version or 0, self.batch.cut or 0)
        self.lags.append(lag(step=self.batch.step, oldest_version=oldest))

    def trained(self, now: float) -> SimulatedStep:
        return SimulatedStep(
            step=self.batch.step,
            ended_at=now,
            waited_s=self.waited_s,
            trained_s=now - self.began_at,
            samples=self.samples,
            tokens=self.tokens,
            masked_tokens=self.masked_tokens,
            lags=tuple(self.lags),
        )


class Simulation:
    """One simulated run. The same seed gives the same run."""

    def __init__(self, setting: Setting, durations: Durations, *, seed: int = 0) -> None:
        self._setting = setting
        self._durations = durations
        self._source = EpisodeSource(durations, random.Random(seed))
        self._ledger = SimulatedLedger(setting.rule)
        request = durations.request
        self._replicas: list[SimulatedReplica[_Running]] = [
            SimulatedReplica(
                base_s=request.base_s,
                per_request_s=request.slope(
                    replicas=setting.replicas, per_device=setting.replicas_per_device, workers=setting.workers
                ),
            )
            for _ in range(setting.replicas)
        ]
        self._request_clock = SlowedClock()
        self._training_clock = SlowedClock()
        self._request_ends = [math.inf] * setting.replicas
        """When the next request of each replica is finished, by the clock of requests."""
        self._training_end = math.inf
        """By the clock of training."""
        self._loads = [0] * setting.replicas
        self._busy_replicas = 0
        self._rate = 0.0
        """Requests per second of all replicas, if nothing slowed them."""
        self._slowness = 1.0
        """How much longer everything takes at the moment because the cores are shared."""
        self._idle_since = [0.0] * setting.replicas
        self._idle_s = 0.0
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._published_at = [0.0]
        self._stored: dict[tuple[int, int], list[_Running]] = {}
        """The episodes of queued groups, by sequence and part."""
        self._limit = min(setting.slots, setting.rule.max_in_flight) * setting.rule.unit
        self._wanted_step = 0
        """The batch that the trainer has requested and not received; 0: none."""
        self._ready: SimulatedBatch | None = None
        self._waiting_since: float | None = 0.0
        self._batch: _BatchInTraining | None = None
        self._settled_at = 0.0
        self._steps: list[SimulatedStep] = []

    def run(self, steps: int) -> SimulatedRun:
        self._request_batch(1)
        self._admit()
        while len(self._steps) < steps:
            first_end = min(self._request_ends)
            request_end = self._request_clock.simulated_time_of(first_end)
            training_end = self._training_clock.simulated_time_of(self._training_end)
            end = min(request_end, training_end)
            if self._events and self._events[0][0] < end:
                at, _, act, arguments = heapq.heappop(self._events)
            elif end == math.inf:
                raise UsageError(
                    "the simulated run cannot continue: no episode runs, and the gate admits none. "
                    f"gate.max_groups_in_flight is {self._setting.rule.max_in_flight}, "
                    f"gate.groups_per_step {self._setting.rule.groups_per_step}"
                )
            elif training_end <= request_end:
                at, act, arguments = training_end, self._end_training, ()
            else:
                at, act, arguments = request_end, self._end_request, (self._request_ends.index(first_end),)
            self._now = at
            act(*arguments)
        idle_s = self._idle_s + sum(
            self._now - since for since, load in zip(self._idle_since, self._loads, strict=True) if load == 0
        )
        ledger = self._ledger
        return SimulatedRun(
            setting=self._setting,
            steps=tuple(self._steps),
            seconds=self._now,
            idle_engine_share=idle_s / (len(self._replicas) * max(self._now, 1e-9)),
            max_load=max(r.max_load for r in self._replicas),
            opened=ledger.opened,
            open=ledger.leased,
            queued=ledger.queued,
            batched=ledger.batched,
            dropped=dict(ledger.dropped),
        )

    def _after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (self._now + delay_s, next(self._numbers), act, arguments))

    # Episodes ----------------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        free = (self._limit - self._ledger.leased) // self._setting.rule.unit
        for sequence in self._ledger.open(free):
            episodes, is_dropped = self._source.group(self._setting.samples_per_group)
            group = _Group(sequence, "filtered" if is_dropped else None, len(episodes))
            for episode in episodes:
                running = _Running(group, episode, replica=-1)
                self._after(self._durations.open_s * self._slowness + episode.other_s, self._next_turn, running)

    def _next_turn(self, one: _Running) -> None:
        if one.turn == len(one.episode.turns):
            self._end_episode(one)
            return
        if one.replica < 0:
            # All turns of an episode go to the same replica, the least loaded one at its start.
            one.replica = self._loads.index(min(self._loads))
        one.turn_began = self._now
        number = one.replica
        if self._loads[number] == 0:
            self._busy_replicas += 1
            self._idle_s += self._now - self._idle_since[number]
        self._loads[number] += 1
        self._request_clock.advance(self._now)
        replica, before = self._replicas[number], self._replicas[number].rate
        replica.add(one, one.episode.turns[one.turn].work, self._request_clock.now)
        self._change_speeds(number, replica.rate - before)

    def _end_request(self, number: int) -> None:
        self._request_clock.advance(self._now)
        replica, before = self._replicas[number], self._replicas[number].rate
        one = replica.pop(self._request_clock.now)
        self._loads[number] -= 1
        if self._loads[number] == 0:
            self._busy_replicas -= 1
            self._idle_since[number] = self._now
        self._change_speeds(number, replica.rate - before)
        one.sampled.append((one.turn_began, self._now))
        act_s = one.episode.turns[one.turn].act_s
        one.turn += 1
        self._after(act_s, self._next_turn, one)

    def _change_speeds(self, number: int, rate_change: float) -> None:
        """The load of a replica has changed."""
        self._request_ends[number] = self._replicas[number].next_end
        self._rate = self._rate + rate_change if self._busy_replicas else 0.0
        self._share_cores()

    def _share_cores(self) -> None:
        """Requests and training slow each other down, and both wait for cores."""
        durations, busy = self._durations, self._busy_replicas
        is_training = self._training_end < math.inf
        waiting = durations.processors.worker_slowness(rate=self._rate, workers=self._setting.workers)
        shared = durations.processors.slowness(rate=self._rate / waiting, is_training=is_training)
        self._slowness = shared
        request_slowdown = durations.request.slowdown if is_training else 0.0
        training_slowdown = durations.training.slowdown if busy else 0.0
        self._request_clock.set_slowness((1.0 + request_slowdown) * waiting * shared, self._now)
        training_slowness = (1.0 + training_slowdown) * durations.processors.training_slowness(shared)
        self._training_clock.set_slowness(training_slowness, self._now)

    def _end_episode(self, one: _Running) -> None:
        group = one.group
        group.running -= 1
        group.finished.append(one)
        if self._setting.rule.policy is not BatchPolicy.PARTS:
            if group.running == 0:
                self._submit(group)
        elif group.running == 0:
            self._submit(group)
        elif not group.is_flushing:
            # The samples that end in the same moment are submitted together.
            group.is_flushing = True
            self._after(SAME_MOMENT_S, self._flush, group)

    def _flush(self, group: _Group) -> None:
        group.is_flushing = False
        quorum = self._setting.rule.quorum or self._setting.samples_per_group
        is_complete = is_part_complete(part=group.part, scorable=len(group.finished), quorum=quorum)
        if group.finished and (is_complete or group.running == 0):
            self._submit(group)

    def _submit(self, group: _Group) -> None:
        finished, group.finished = group.finished, []
        group.part += 1
        self._after(self._durations.submit_s * self._slowness, self._store, group, finished)

    def _store(self, group: _Group, finished: list[_Running]) -> None:
        candidate = self._ledger.submit(
            group.sequence,
            samples=len(finished),
            oldest_version=min(self._version_at(one.first_token_at()) for one in finished),
            newest_version=max(self._version_at(one.sampled[-1][1]) for one in finished),
            drop=group.drop,
        )
        if group.drop is None:
            self._stored[candidate.sequence, candidate.part] = finished
        self._try_to_decide()
        self._admit()

    def _version_at(self, moment: float) -> int:
        return bisect_right(self._published_at, moment) - 1

    # Training ----------------------------------------------------------------------------------------------------------------

    def _request_batch(self, step: int) -> None:
        self._wanted_step = step
        self._try_to_decide()

    def _try_to_decide(self) -> None:
        if self._wanted_step and (batch := self._ledger.decide(self._wanted_step)) is not None:
            self._wanted_step = 0
            self._after(self._durations.fetch_s * self._slowness, self._receive, batch)

    def _receive(self, batch: SimulatedBatch) -> None:
        self._ready = batch
        if self._waiting_since is not None:
            self._train()

    def _train(self) -> None:
        assert self._ready is not None
        assert self._waiting_since is not None
        batch, self._ready = self._ready, None
        waited_s, self._waiting_since = self._now - self._waiting_since, None
        self._batch = _BatchInTraining(batch=batch, began_at=self._now, waited_s=waited_s)
        cut_at = self._cut_at(batch)
        for candidate in batch.taken:
            self._batch.add(candidate, self._stored.pop((candidate.sequence, candidate.part)), cut_at)
        self._training_clock.advance(self._now)
        self._training_end = self._training_clock.now + self._source.training_s(
            samples=self._batch.computed_samples, tokens=self._batch.computed_tokens
        )
        self._share_cores()
        self._request_batch(batch.step + 1)
        self._admit()

    def _cut_at(self, batch: SimulatedBatch) -> float:
        """Tokens that were sampled before this moment are masked."""
        return self._published_at[batch.cut] if batch.cut is not None and batch.cut > 0 else float("-inf")

    def _end_training(self) -> None:
        self._training_end = math.inf
        self._share_cores()
        assert self._batch is not None
        self._steps.append(self._batch.trained(self._now))
        # A step is settled after the one before it.
        self._after(max(0.0, self._settled_at - self._now), self._settle, len(self._steps))

    def _settle(self, step: int) -> None:
        settle_s = self._source.settle_s() * self._slowness
        self._settled_at = self._now + settle_s
        self._after(settle_s, self._publish, step)
        self._after(self._durations.between_steps_s, self._wait_for_batch)

    def _wait_for_batch(self) -> None:
        self._waiting_since = self._now
        if self._ready is not None:
            self._train()

    def _publish(self, step: int) -> None:
        self._published_at.append(self._now)
        self._ledger.publish(step)
        self._admit()
