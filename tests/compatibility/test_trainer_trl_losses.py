"""The losses that TRL has too give TRL's value and TRL's gradient. Needs `.venvs/trl` (`make test-trl-losses`)."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venvs" / "trl" / "bin" / "python"
NAMES = (
    "grpo",
    "grpo_token_mean",
    "grpo_kl",
    "grpo_kl_weighted",
    "grpo_off_policy_mask",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    if not PYTHON.exists():
        pytest.skip("TRL is not installed: `make test-trl-losses` makes .venvs/trl and runs this")
    done = subprocess.run(
        [str(PYTHON), "-m", "tests.compatibility.trl_losses"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_that_trl_has_gives_the_same_value_and_gradient(found: dict[str, Any], name: str) -> None:
    assert found[name]["ours"] == pytest.approx(found[name]["trl"], rel=1e-4, abs=1e-6)
    assert found[name]["gradient_difference"] < 1e-4


def test_every_shared_loss_is_compared() -> None:
    text = (ROOT / "tests" / "compatibility" / "trl_losses.py").read_text(encoding="utf-8")
    assert all(f'    "{name}": (' in text for name in NAMES)
