"""A whole run on the AWS environment, with a scripted policy that knows the solutions."""

import json
from pathlib import Path

import psutil
import pytest

from rollbook.run.reader import open_run
from tests.parts.run.small import REPOSITORY, rollbook

pytest.importorskip("ministack")
pytest.importorskip("awscli")


@pytest.mark.slow
def test_a_scripted_policy_solves_aws_tasks_in_eight_clouds_and_every_group_is_trained(tmp_path: Path) -> None:
    example = REPOSITORY / "examples" / "02_aws_cli_agent" / "run.toml"
    done = rollbook("train", str(example), "--run-dir", str(tmp_path / "run"), "--set", "trainer.max_steps=2", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["audit"], summary["solved_last"], summary["reward_last"]) == (2, "ok", 1.0, 1.0)
    with open_run(tmp_path / "run") as run:
        batches = list(run.batches(2))
    samples = [sample for batch in batches for group in batch.groups for sample in group.samples]
    assert len(samples) == 2 * 2 * 4
    assert all(sample.solved and sample.reward == pytest.approx(1.0) for sample in samples)
    assert all(sample.turns for sample in samples)
    assert [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])] == []
