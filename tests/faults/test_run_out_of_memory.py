"""Memory that is missing outside of a step: the run goes on, or ends with the process, what it did, the sizes and the settings that
help."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollbook.contracts.batch import PassSplit
from rollbook.run.config.run import load_resolved_config
from rollbook.run.directory import RunDirectory
from rollbook.run.reader import open_run
from tests.parts.run.small import REPOSITORY, SmallRun, rollbook

pytestmark = pytest.mark.slow

CAUSE = "CUDA out of memory. Tried to allocate 61.00 GiB"
PLANTED = f"""
import torch

def fail(*args, **options):
    raise torch.OutOfMemoryError({CAUSE!r})

async def fail_later(*args, **options):
    fail()
"""
CASES = {
    "loading the model in the trainer": (
        """
from rollbook.trainer.model.policy_model import PolicyModel
PolicyModel.load = fail
""",
        f"trainer stopped the run: out of memory while loading the model: {CAUSE}",
    ),
    "loading the model in the policy server": (
        """
import rollbook.inference.engines.embedded.build as build
build.load_module = fail
""",
        f"policy stopped the run: out of memory while loading the model: {CAUSE}",
    ),
    "warming up": (
        """
from rollbook.inference.engines.embedded.runner import Runner
Runner.warm_up = fail
""",
        f"policy stopped the run: the policy server has no memory for its steps on cpu: {CAUSE}",
    ),
    "publishing": (
        """
from rollbook.inference.weights.transports.files import FileTransport
FileTransport.put = fail_later
""",
        "trainer stopped the run: the trainer has no memory for the copy of its weights that policy servers read (step 0",
    ),
    "applying an adapter": (
        """
from rollbook.inference.engines.embedded.live_weights import LiveWeights
LiveWeights.plan_adapter = fail
""",
        "the policy server has no memory for the new weights on cpu",
    ),
    "loading the model in a rank": (
        """
import sys
from rollbook.trainer.model.policy_model import PolicyModel
if "rollbook.trainer.team" in sys.orig_argv:
    PolicyModel.load = fail
""",
        f"trainer stopped the run: trainer rank 1 has no memory for its part of the model: {CAUSE}",
    ),
    "training in a rank": (
        """
import sys
from rollbook.trainer.model.policy_model import PolicyModel
if "rollbook.trainer.team" in sys.orig_argv:
    PolicyModel.token_logprobs = fail
""",
        "trainer stopped the run: step 1 does not fit into the memory of trainer rank 1 (cpu)",
    ),
    "training": (
        """
from rollbook.trainer.model.policy_model import PolicyModel
PolicyModel.token_logprobs = fail
""",
        "trainer stopped the run: step 1 does not fit into the memory of the trainer (cpu)",
    ),
    "the state of the optimizer": (
        """
import sys
allocate = torch.zeros_like

def zeros_like(*args, **options):
    callers = {sys._getframe(number).f_code.co_name for number in (1, 2, 3)}
    return fail() if "allocate_state" in callers else allocate(*args, **options)

torch.zeros_like = zeros_like
""",
        "trainer stopped the run: the state of the optimizer",
    ),
}


def run_with(directory: Path, code: str, overrides: list[str]) -> dict[str, Any]:
    run = SmallRun(directory, overrides)
    run.plant(PLANTED + code)
    run.start()
    try:
        return run.wait()
    finally:
        run.stop()


@pytest.mark.parametrize("case", CASES)
def test_a_run_without_enough_memory_ends_with_what_did_not_fit_and_the_settings_that_help(
    tmp_path: Path, case: str
) -> None:
    code, expected = CASES[case]
    overrides = {"applying an adapter": ["trainer.lora.rank=2"]}.get(
        case, ["trainer.ranks=2"] if "rank" in case else []
    )
    summary = run_with(tmp_path, code, overrides)
    shown = re.sub(r"\s+", " ", summary["stderr"])
    assert summary["end"] == "failed"
    assert expected in shown
    assert CAUSE in shown
    assert "planned for main memory, in GB: " in shown
    assert "Free some memory there" in shown
    assert "Traceback" not in shown
    # A rank that runs out of memory in a pass ends the trainer, which is restarted with smaller passes.
    assert (summary["restarts"] > 0) == (case == "training in a rank")


SFT = """
[model.build]
hidden_size = 16
layers = 1
heads = 2
kv_heads = 2
intermediate_size = 24
max_position_embeddings = 32
vocabulary = ["yes", "no"]
chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
[sft]
data = "demos.jsonl"
"""
DEMONSTRATION = {"messages": [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "no"}]}


def run_with_fault(tmp_path: Path, code: str, *arguments: str) -> str:
    """What the command printed to stderr."""
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "sitecustomize.py").write_text(PLANTED + code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "rollbook", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{planted}"},
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return re.sub(r"\s+", " ", done.stderr)


LOADING = """
from rollbook.trainer.model.policy_model import PolicyModel
PolicyModel.load = fail
"""
PASSES = """
from rollbook.trainer.model.policy_model import PolicyModel
PolicyModel.token_logprobs = fail
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (LOADING, f"error: out of memory while loading the model: {CAUSE}"),
        (PASSES, "error: step 1 does not fit into the memory of the trainer (cpu)"),
    ],
)
def test_a_warm_start_without_enough_memory_ends_with_the_plan(tmp_path: Path, code: str, expected: str) -> None:
    (tmp_path / "sft.toml").write_text(SFT, encoding="utf-8")
    (tmp_path / "demos.jsonl").write_text(json.dumps(DEMONSTRATION) + "\n", encoding="utf-8")
    shown = run_with_fault(tmp_path, code, "sft", str(tmp_path / "sft.toml"), "--out", str(tmp_path / "out"))
    assert expected in shown
    assert "planned for main memory, in GB: trainer 1.2 (process 1.2) Free some memory there" in shown


def test_a_replay_without_enough_memory_ends_with_the_plan(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, ["trainer.max_steps=2"])
    run.start()
    run.wait()
    shown = run_with_fault(tmp_path, LOADING, "replay", str(tmp_path / "run"))
    assert f"out of memory while replaying the run: {CAUSE} planned for main memory, in GB: trainer 1." in shown


def test_a_publication_that_finds_no_memory_once_is_repeated_and_the_run_goes_on(tmp_path: Path) -> None:
    code = """
from itertools import count
from rollbook.inference.weights.transports.files import FileTransport
put, calls = FileTransport.put, count(1)

async def once(self, *args, **options):
    if next(calls) == 3:
        fail()
    return await put(self, *args, **options)

FileTransport.put = once
"""
    summary = run_with(tmp_path, code, ["trainer.max_steps=4"])
    assert (summary["end"], summary["restarts"]) == ("finished", 0)
    log = (tmp_path / "run" / "logs" / "trainer.jsonl").read_text(encoding="utf-8")
    assert log.count("trainer.publication_retried") == 1


def test_the_pass_size_that_fits_is_tried_before_the_first_step_and_recorded(tmp_path: Path) -> None:
    code = """
from rollbook.trainer.loop import TrainerLoop
from rollbook.trainer.model.policy_model import PolicyModel
begin, compute = TrainerLoop.__init__, PolicyModel.token_logprobs

def probing(self, **options):
    begin(self, **{**options, "probes": True})

def limited(self, micro, **options):
    return fail() if micro.inputs_BT.size > 600 else compute(self, micro, **options)

TrainerLoop.__init__ = probing
PolicyModel.token_logprobs = limited
"""
    sizes = ["trainer.max_steps=3", "trainer.max_tokens_per_microbatch=5000"]
    summary = run_with(tmp_path, code, sizes)
    assert (summary["end"], summary["restarts"]) == ("finished", 0)
    recorded = load_resolved_config(RunDirectory(tmp_path / "run")).config.trainer
    assert (recorded.max_tokens_per_microbatch, recorded.gradient_checkpointing) == (312, True)
    with open_run(tmp_path / "run") as run:
        assert {step.split for step in run.steps()} == {PassSplit(max_tokens=312, gradient_checkpointing=True)}
    replay = rollbook("replay", str(tmp_path / "run"), "--verify")
    assert replay.returncode == 0, replay.stderr
    resumed = rollbook(
        "train", str(tmp_path / "run"), "--set", "trainer.max_steps=4", "--no-preflight", "--no-dashboard"
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "max_tokens_per_microbatch" not in resumed.stderr, "nothing changed"
