"""Trainer and policy server share the frozen base of adapters: whichever process is killed, the weights are the same bits."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.telemetry.events import read_json_lines
from tests.parts.run.small import SmallRun, rollbook

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="main memory is shared on Linux only")

LORA = ["trainer.lora.rank=4", "trainer.lora.alpha=8", "trainer.lr=0.01", "resources.shared_base=true"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path, [*LORA, "run.most_quick_deaths=50", "trainer.max_steps=100000"])
    yield run
    run.stop()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("rounds", "dtype"),
    [(1, "bfloat16"), (10, "float32")],
    ids=["once", "ten times"],
)
def test_kills_of_all_that_share_the_base_change_no_bit_and_end_only_the_processes_that_map_it(
    run: SmallRun, rounds: int, dtype: str
) -> None:
    run.overrides += [f"trainer.compute_dtype={dtype}", f"inference.dtype={dtype}"]
    run.start()
    for role in ["trainer", "policy"] * rounds:
        step = run.step()
        run.until(lambda step=step: run.step() > step, what="a step")  # type: ignore[misc]
        others = {name: run.pid(name) for name in ("base", "trainer", "policy") if name != role}
        killed = run.kill(role)
        run.until(lambda role=role, killed=killed: run.pid(role) not in (None, killed), what=f"{role} was back")  # type: ignore[misc]
        assert {name: run.pid(name) for name in others} == others
    mapping = {name: run.pid(name) for name in ("trainer", "policy")}
    ledger = run.pid("ledger")
    run.kill("base")
    run.until(lambda: all(run.pid(name) not in (None, pid) for name, pid in mapping.items()), what="both were back")
    assert run.pid("ledger") == ledger
    step = run.step()
    run.until(lambda: run.step() > step, what="a step")
    run.process.send_signal(signal.SIGINT)
    drained = run.wait()
    assert (drained["exit_code"], drained["end"], drained["audit"]) == (0, "drained", "ok"), drained["stderr"]
    assert not (run.directory / "shared_base.json").exists(), "its owner compared the weights again, and ended"

    replayed = rollbook("replay", str(run.directory), "--verify", "--json")
    assert replayed.returncode == 0, replayed.stderr
    assert json.loads(replayed.stdout)["steps"] >= 2 * rounds, "the replay loads a base of its own"
    log = list(read_json_lines(run.directory / "logs" / "base.jsonl"))
    assert len([row for row in log if row["event"] == "base.shared"]) == 2
    assert log[-1]["how"] == "stopped"
