"""A new process computes the same weights, bit for bit: a resumed trainer relies on that."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollbook.trainer.replay import replay
from tests.parts.trainer.batches import quick, recorded_batch, tiny_model_dir

ROOT = Path(__file__).parents[2]
CODE = """
import asyncio, sys
from pathlib import Path
from rollbook.trainer.replay import replay
from tests.parts.trainer.batches import quick, recorded_batch
batches = [recorded_batch(step) for step in (1, 2, 3)]
result = asyncio.run(replay(batches, model_dir=Path(sys.argv[1]), config=quick(ppo_n_minibatches=2)))
print(result.final_digest)
"""


# `test_chaos` replays a run in a fresh process.
@pytest.mark.slow
def test_a_fresh_process_reproduces_the_weights_bit_for_bit(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model_dir = tiny_model_dir(tmp_path / "model")
    batches = [recorded_batch(step) for step in (1, 2, 3)]
    here = asyncio.run(replay(batches, model_dir=model_dir, config=quick(ppo_n_minibatches=2)))
    there = subprocess.run(
        [sys.executable, "-c", CODE, str(model_dir)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert there.stdout.split()[-1] == here.final_digest
