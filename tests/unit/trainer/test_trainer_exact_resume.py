"""A run killed at any step and resumed ends with the same weights, bit for bit, as an uninterrupted run."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollbook.contracts.batch import AckReceipt, PassSplit, TrainingBatch
from rollbook.contracts.errors import RunError
from rollbook.contracts.group import GroupId
from rollbook.trainer.checkpoints.settings_history import SettingsHistory, SettingsPeriod
from rollbook.trainer.loop import LoopEnd
from rollbook.trainer.replay import replay, replay_periods
from tests.parts.ledger.groups import RUN
from tests.parts.trainer.batches import quick, recorded_batch, tiny_model_dir
from tests.parts.trainer.ledger import FakeReplicas, LedgerSource, TinyLoop, TrainerLedger, open_trainer_ledger

STEPS = 6


class KilledError(BaseException):
    """Simulates SIGKILL: no handler for exceptions catches it."""


class KillingSource(LedgerSource):
    """Kills the trainer in one call, before or after the ledger receives the call."""

    def __init__(self, ledger: TrainerLedger, call: str, step: int, *, is_received: bool) -> None:
        super().__init__(ledger)
        self._kill_at = (call, step)
        self._is_received = is_received

    async def acknowledge(
        self,
        step: int,
        weights_digest: str,
        *,
        unusable: Mapping[GroupId, str] | None = None,
        split: PassSplit | None = None,
    ) -> AckReceipt:
        if self._kill_at == ("acknowledge", step) and not self._is_received:
            raise KilledError
        receipt = await super().acknowledge(step, weights_digest, unusable=unusable, split=split)
        if self._kill_at == ("acknowledge", step):
            raise KilledError
        return receipt

    async def checkpointed(self, step: int, *, oldest_kept: int) -> None:
        if self._kill_at == ("checkpointed", step) and not self._is_received:
            raise KilledError
        await super().checkpointed(step, oldest_kept=oldest_kept)
        if self._kill_at == ("checkpointed", step):
            raise KilledError


CALLS = [("acknowledge", s, is_received) for s in range(1, STEPS + 1) for is_received in (False, True)] + [
    ("checkpointed", s, is_received) for s in (2, 4, 6) for is_received in (False, True)
]


@pytest.mark.parametrize(
    ("call", "step", "is_received", "minibatches"),
    [(*call, 1) for call in CALLS] + [("acknowledge", 3, True, 3), ("acknowledge", 6, False, 3)],
)
async def test_a_run_killed_anywhere_ends_with_the_same_bits(
    tmp_path: Path, call: str, step: int, is_received: bool, minibatches: int
) -> None:
    config = quick(ppo_n_minibatches=minibatches)
    async with open_trainer_ledger() as ledger:
        await ledger.create(max_steps=STEPS)
        source = KillingSource(ledger, call, step, is_received=is_received)
        # SIGKILL ends the threads of a process too. Here a checkpoint may still be written: wait until it is.
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor() as threads:
            loop.set_default_executor(threads)
            with pytest.raises(KilledError):
                await TinyLoop(source, FakeReplicas(), tmp_path, config).run()
        loop.set_default_executor(ThreadPoolExecutor())
        outcome = await TinyLoop(ledger.source(), FakeReplicas(), tmp_path, config).run()
        acknowledged = await ledger.ledger.steps(RUN)
        durable_step = await ledger.durable_step()

    uninterrupted = await replay(
        (recorded_batch(s) for s in range(1, STEPS + 1)), model_dir=tmp_path / "model", config=config
    )
    assert outcome.end is LoopEnd.ENDED
    assert outcome.digest == uninterrupted.final_digest
    assert {record.step for record in acknowledged} == set(range(1, STEPS + 1))
    assert all(record.digest == uninterrupted.digests[record.step] for record in acknowledged)
    assert len(set(uninterrupted.digests.values())) == STEPS + 1, "every step must have moved the weights"
    assert durable_step == STEPS


class StoppingSource(LedgerSource):
    """Stops the loop after a step, as Ctrl-C does."""

    loop: TinyLoop

    def __init__(self, ledger: TrainerLedger, last: int) -> None:
        super().__init__(ledger)
        self._last = last

    async def acknowledge(
        self,
        step: int,
        weights_digest: str,
        *,
        unusable: Mapping[GroupId, str] | None = None,
        split: PassSplit | None = None,
    ) -> AckReceipt:
        if step == self._last:
            self.loop.stop_after_step()
        return await super().acknowledge(step, weights_digest, unusable=unusable, split=split)


async def test_replay_stops_at_the_requested_step(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path / "model")
    batches = [recorded_batch(s) for s in (1, 2, 3)]

    async def stream() -> AsyncIterator[TrainingBatch]:
        for batch in batches:
            yield batch

    part = await replay(stream(), model_dir=model_dir, config=quick(), until=2)
    uninterrupted = await replay(batches, model_dir=model_dir, config=quick())
    assert set(part.digests) == {0, 1, 2}
    assert part.final_digest == uninterrupted.digests[2]


async def test_a_run_whose_settings_changed_on_resume_is_replayed_by_period(tmp_path: Path) -> None:
    slow, fast = quick(lr=1e-3, ppo_n_minibatches=2), quick(lr=3e-3, ppo_n_minibatches=1)
    async with open_trainer_ledger() as ledger:
        await ledger.create(max_steps=STEPS)
        for settings, last in ((slow, 2), (fast, 4), (slow, STEPS)):
            source = StoppingSource(ledger, last)
            source.loop = TinyLoop(source, FakeReplicas(), tmp_path, settings)
            await source.loop.run()
        recorded = {record.step: record.digest for record in await ledger.ledger.steps(RUN)}
    history = SettingsHistory.read(tmp_path / "trainer_state.json")
    changes = history.changes()
    assert [sorted(changed) for changed in changes.values()] == [["lr", "ppo_n_minibatches"]] * 2
    batches = [recorded_batch(s) for s in range(1, STEPS + 1)]
    periods = replay_periods(history, slow, until=STEPS)
    by_period = await replay(batches, model_dir=tmp_path / "model", config=periods)
    assert {step: by_period.digests[step] for step in recorded} == recorded
    whole = await replay(batches, model_dir=tmp_path / "model", config=slow)
    first = min(changes)
    assert (whole.digests[first], whole.digests[first + 1] == recorded[first + 1]) == (recorded[first], False)


def test_what_cannot_be_replayed_is_named_with_its_setting_and_steps() -> None:
    settings = quick().numeric_settings()
    two_ranks = SettingsHistory(
        periods=(
            SettingsPeriod(after_step=0, settings=settings),
            SettingsPeriod(after_step=4, settings={**settings, "ranks": 2}),
        )
    )
    assert len(replay_periods(two_ranks, quick(), until=4)) == 1
    with pytest.raises(RunError, match=r"steps 5 to 9 cannot be replayed: trainer\.ranks was 2"):
        replay_periods(two_ranks, quick(), until=9)
    unknown = SettingsHistory(periods=(SettingsPeriod(after_step=0, settings={**settings, "old_option": 1}),))
    with pytest.raises(RunError, match=r"steps 1 to 9 cannot be replayed: .*trainer\.old_option"):
        replay_periods(unknown, quick(), until=9)
