"""Rollout functions and filters with faults. Workers under test load them by path."""

import asyncio
import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

from rollbook.contracts.errors import RunError, WeightsAwaitedError
from rollbook.contracts.group import PromptGroup
from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.contract import RolloutFn, RolloutSetup
from rollbook.rollout.episodes import chat as episode


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    """Plays the default episode, unless the row has an `action`."""
    play = episode.make_rollout(setup)

    async def rollout(row: dict[str, Any]) -> RolloutSample | None:  # noqa: PLR0912 - one branch for each fault
        action = row.pop("action", None)  # the row is a copy, so other episodes still have it
        if action == "raise":
            raise ValueError("row is malformed")
        if action == "wrong":
            return 42  # type: ignore[return-value]  # a user's mistake
        if action == "none":
            return None
        if action == "hang":
            await asyncio.sleep(3600)
        if action == "hang_once" and _is_first(Path(row["marker"])):
            await asyncio.sleep(3600)
        if action == "block":
            if "marker" in row:
                Path(row["marker"]).touch()
            time.sleep(3600)  # noqa: ASYNC251 - this is the tested fault
        if action == "stop_run":
            raise RunError("the licence of the grader expired")
        if action == "no_weights" and not Path(row["marker"]).exists():
            raise WeightsAwaitedError("this server has no weights")
        if action == "die_once" and _is_first(Path(row["marker"])):
            os.kill(os.getpid(), signal.SIGKILL)
        if action in ("late_once", "die_late_once") and _is_first(Path(row["marker"])):
            await _be_late(Path(row["marker"] + ".go"), dies=action == "die_late_once")
        if action == "die":
            print("output of the dying worker")  # noqa: T201
            os._exit(9)
        sample = await play(row)
        if action == "say_loop" and sample is not None:
            return dataclasses.replace(sample, messages=({"role": "assistant", "content": "loop"},))
        return sample

    return rollout


async def _be_late(may_go_on: Path, *, dies: bool) -> None:
    """Wait for the test, which lets the episode go on when the other samples of its group are stored."""
    while not may_go_on.exists():  # noqa: ASYNC110 - the test is another process
        await asyncio.sleep(0.02)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)


def _is_first(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def make_not_async(setup: RolloutSetup) -> RolloutFn:
    return lambda row: None  # type: ignore[return-value]  # a user's mistake


def make_raising(setup: RolloutSetup) -> RolloutFn:
    raise OSError("no such dataset")


async def make_async(setup: RolloutSetup) -> RolloutFn:
    return episode.make_rollout(setup)


def drop_all(group: PromptGroup) -> str | None:
    return "too_easy"


def filter_raises(group: PromptGroup) -> str | None:
    raise KeyError("difficulty")


def filter_wrong(group: PromptGroup) -> str | None:
    return True  # type: ignore[return-value]  # a user's mistake


def _sample(row: dict[str, Any], max_tokens: int | None) -> RolloutSample:
    return RolloutSample([1, 2], [0.0, -0.5], [0, 1], 1.0, facts={"row": row, "max_tokens": max_tokens})


async def plays_a_row(row: dict[str, Any], reward: float = 1.0) -> RolloutSample | None:
    return _sample(row, None) if reward else None


async def plays_a_row_with_its_setup(row: dict[str, Any], setup: RolloutSetup) -> RolloutSample | None:
    return _sample(row, setup.sampling.max_tokens)


async def plays_three(row: dict[str, Any], setup: RolloutSetup, more: object) -> RolloutSample | None:
    return None


class Plays:
    async def __call__(self, row: dict[str, Any]) -> RolloutSample | None:
        return _sample(row, None)


PLAYS = Plays()
