"""A whole run with LoRA: only adapters are published, the trainer is killed and resumes, and a replay gives the same digests."""

import re
from pathlib import Path

import pytest

from rollbook.telemetry.events import read_json_lines
from tests.parts.run.small import SmallRun, rollbook

LORA = ["trainer.lora.rank=4", "trainer.lora.alpha=8", "trainer.lr=0.01", "trainer.max_steps=8"]
EVALUATION = ["evaluation.every_steps=3", "evaluation.max_tasks=4"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_are_published_after_a_kill_and_the_audit_passes(tmp_path: Path) -> None:
    run = SmallRun(
        tmp_path, [*LORA, "inference.transfer='directory'", "trainer.checkpoint_every=3", *EVALUATION]
    ).start()
    try:
        saved = run.directory / "checkpoints" / "step-000003" / "checkpoint.json"
        run.until(lambda: saved.exists() and run.step() >= 4, what="a checkpoint and a step after it")
        published = max((run.directory / "weights").glob("publication-*"))
        files = {path.name for path in published.iterdir() if not path.name.startswith(".")}
        run.kill("trainer")
        summary = run.wait()
    finally:
        run.stop()
    assert summary["exit_code"] == 0, summary["stderr"]
    assert (summary["steps"], summary["audit"]) == (8, "ok")
    assert 'publish = "adapter"' in (run.directory / "config.toml").read_text()
    assert files <= {"adapter_config.json", "adapter_model.safetensors"}, "no full model was written"
    trainer = run.directory / "logs" / "trainer.jsonl"
    rows = [row for row in read_json_lines(trainer) if row.get("event") == "trainer.restored"]
    assert [row["step"] for row in rows][-1] >= 3, "the second trainer resumed from the checkpoint of the first"
    assert not [row for row in read_json_lines(trainer) if row.get("event") == "trainer.diverged"]
    evaluations = sorted(path.name for path in (run.directory / "evaluations").iterdir())
    assert len(evaluations) >= 2, "the evaluation server loaded the merged weights of a checkpoint"
    history = run.directory / "trainer_state.json"
    history.write_text(re.sub(r'"torch": ?"[^"]+"', '"torch": "1.0"', history.read_text()))
    replayed = rollbook("replay", str(run.directory), "--verify")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    first, *steps, verdict = replayed.stderr.splitlines()
    assert first.startswith("the steps after 0 were trained with torch 1.0 instead of ")
    assert [line.split(":")[0] for line in steps] == [f"step {step} of 8" for step in range(1, 9)]
    assert all(line.endswith(", the recorded bits") for line in steps)
    assert verdict == "8 steps reproduced bit for bit"
