"""Kill the sandboxes of a run again and again: their episodes are played again, and no reward is 0 because of a kill."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rollbook.run.reader import open_run
from tests.parts.run.small import CONFIG, SmallRun, rollbook
from tests.parts.sandbox.bubblewrap import require_bubblewrap

STEPS, KILLS = 6, 12
ENVIRONMENT = '''
"""Every action runs the same right program in a sandbox, so every reward is 1, unless something else than the program failed."""
from rollbook import Observation, run_code


class Program:
    def __init__(self, sandbox="bubblewrap"):
        self.sandbox = sandbox

    async def reset(self, task):
        return Observation(text="higher")

    async def step(self, action):
        result = await run_code("import time; time.sleep(0.2); print(6 * 7)", sandbox=self.sandbox)
        return Observation(text="correct", reward=float(result.stdout == b"42\\n"), done=True)

    async def close(self):
        pass
'''


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    require_bubblewrap()
    (tmp_path / "program.py").write_text(ENVIRONMENT, encoding="utf-8")
    config = CONFIG.replace('"delayed_number_guessing"', '"program:Program"')
    config = config.replace("args = { max_turns = 4, step_s = 0.02 }", "")
    run = SmallRun(tmp_path, [f"trainer.max_steps={STEPS}", "gate.max_attempts=100"], config=config)
    yield run
    run.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_reward_is_zero_because_a_sandbox_was_killed(run: SmallRun) -> None:
    run.start()
    chosen, num_killed = random.Random(5), 0
    while run.process.poll() is None and num_killed < KILLS:
        found = [process for process in run.descendants() if _is_sandbox(process)]
        if found:
            with suppress(ProcessLookupError):
                os.kill(chosen.choice(found).pid, signal.SIGKILL)
                num_killed += 1
        time.sleep(0.3)
    summary = run.wait()
    assert (summary["exit_code"], summary["steps"], summary["audit"]) == (0, STEPS, "ok"), summary["stderr"]
    assert num_killed >= KILLS // 2, "a short run may end before the last kills"
    audit = json.loads(rollbook("audit", str(run.directory), "--full", "--json").stdout)
    assert audit["ok"], audit["violations"]
    with open_run(run.directory) as record:
        samples = [sample for batch in record.batches(STEPS) for group in batch.groups for sample in group.samples]
    scored = [sample.reward for sample in samples if sample.reward is not None]
    assert scored
    assert set(scored) == {1.0}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_without_confinement_says_so_and_keeps_its_quota(run: SmallRun) -> None:
    run.overrides = ["trainer.max_steps=2", 'env.args={sandbox = "none"}', "sandbox.at_once=1"]
    run.start()
    most = 0
    while run.process.poll() is None:
        most = max(most, sum(_has_argument(process, "main.py") for process in run.descendants()))
        time.sleep(0.05)
    summary = run.wait()
    assert (summary["exit_code"], summary["steps"], summary["audit"]) == (0, 2, "ok"), summary["stderr"]
    assert most == 1
    assert "runs unconfined" in summary["problems"][0]
    assert 'env.args.sandbox = "none"' in summary["problems"][0]


def _has_argument(process: psutil.Process, argument: str) -> bool:
    with suppress(psutil.Error):
        return argument in process.cmdline()
    return False


def _is_sandbox(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.name() == "bwrap"
    return False
