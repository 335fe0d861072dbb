"""Division of the passes of a minibatch among ranks."""

from pathlib import Path

import pytest
import torch

from rollbook.contracts.errors import RunError
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.data.minibatches import plan
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.distributed.sharding import Ranks
from tests.parts.trainer.batches import quick, recorded_batch, tiny_model_dir


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return tiny_model_dir(tmp_path / "model")


def test_several_ranks_need_several_processes(model_dir: Path) -> None:
    with pytest.raises(RunError, match=r"trainer.ranks = 2, but this command trains in one process"):
        initial_learner(model_dir, quick(ranks=2))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_runs_equally_many_passes_and_each_pass_counts_once(size: int) -> None:
    (minibatch,) = plan(
        flatten(recorded_batch(1), quick()), quick(max_tokens_per_microbatch=30), step=1, is_packed=True
    )
    shares = [Ranks(rank=rank, size=size).own_passes(minibatch.microbatches) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    counted = [id(micro) for share in shares for micro, counts in share if counts]
    assert sorted(counted) == sorted(id(micro) for micro in minibatch.microbatches)
    idle = [micro for share in shares for micro, counts in share if not counts]
    assert all(not micro.weights_N.any() for micro in idle)
