"""A trainer rank without a run: `python -m tests.parts.trainer.rank_main lead|follow DIRECTORY HOST STEPS [adapters]`."""

import sys
import time
from pathlib import Path

from rollbook.trainer.checkpoints.checkpoints import Checkpoints
from rollbook.trainer.config import LoraSettings
from rollbook.trainer.distributed.links import Invitation
from rollbook.trainer.model.weights import digest_of
from rollbook.trainer.team import INVITATION, RemoteRanks, Team, follow, join_team
from tests.parts.trainer.batches import quick, recorded_batch, tiny_model_dir


def two_ranks(directory: Path, *, has_adapters: bool) -> Checkpoints:
    lora = LoraSettings(rank=4) if has_adapters else None
    config = quick(ranks=2, ppo_n_minibatches=2, max_tokens_per_microbatch=60, lora=lora)
    return Checkpoints(directory / "checkpoints", model_dir=tiny_model_dir(directory / "model"), config=config)


def train(team: Team, store: Checkpoints, steps: int) -> None:
    """Train and save a checkpoint at the end. Prints the digest of each step."""
    weights = team.snapshot()
    while team.step < steps:
        team.run(recorded_batch(team.step + 1))
        weights = team.snapshot()
        sys.stdout.write(digest_of(weights) + "\n")
        sys.stdout.flush()
    store.write(team.state_snapshot(weights), weights_digest=digest_of(weights))


def main(part: str, directory: Path, host: str, steps: int, *, has_adapters: bool) -> None:
    if part == "lead":
        store = two_ranks(directory, has_adapters=has_adapters)
        remote = RemoteRanks(count=1, host=host, directory=directory) if host else None
        team = Team.assemble(store, store.latest(), size=2, device="cpu", remote=remote)
        train(team, store, steps)
        team.close()
        return
    while (invitation := Invitation.read(directory / INVITATION)) is None:
        time.sleep(0.1)
    follow(join_team(invitation), host=host)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), has_adapters="adapters" in sys.argv[5:])
