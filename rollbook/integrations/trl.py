"""Rollbook's workers, admission gate and ledger behind TRL's `AsyncGRPOTrainer` (trl 1.16).

    with open_host("run.toml", run_dir="runs/trl") as run:
        trainer = RollbookGRPOTrainer(
            model=run.info.model_dir,
            args=AsyncGRPOConfig(max_steps=12, per_device_train_batch_size=run.info.rows_per_step, token_budget=0, …),
            train_dataset=placeholder_dataset,  # required by TRL; tasks come from run.toml
            rollout_worker=AsyncRolloutWorker(run),
            weight_transfer=RollbookWeightTransfer(run),
            callbacks=[RollbookCallback(run)],
        )
        trainer.train(resume_from_checkpoint=run.last_checkpoint(args.output_dir))

TRL owns the model, the optimizer, the loss and the checkpoints. Rollbook plays the episodes in supervised processes, admits them by
staleness and stores them in the ledger. One step of TRL is one batch of the ledger.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch import Tensor
from transformers import TrainerCallback

from rollbook.contracts.errors import RunError
from rollbook.integrations.trl_run import AsyncRolloutWorker, HostInfo, RollbookRun, open_host

__all__ = ["AsyncRolloutWorker", "RollbookCallback", "RollbookRun", "RollbookWeightTransfer", "open_host"]


class RollbookWeightTransfer:
    """TRL's `weight_transfer`: acknowledges the step in the ledger and publishes its weights."""

    def __init__(self, run: RollbookRun) -> None:
        self._run = run

    def init_weight_transfer(self) -> None:
        self._run.check_host()

    def pause(self) -> None:
        """Suspend generation while weights are sent. Running requests continue after `resume`; each token has its version."""
        self._run.pause()

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        self._run.publish({name: tensor.detach().cpu().clone() for name, tensor in iterator})

    def resume(self) -> None:
        self._run.resume()

    def destroy(self) -> None:
        """Resume the policy servers and disconnect from them. The ledger stays connected: `open_host` closes the run."""
        self._run.disconnect()


class RollbookCallback(TrainerCallback):
    """Reports the first step, the complete checkpoints and the end of training to the ledger."""

    def __init__(self, run: RollbookRun) -> None:
        self._run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        if isinstance(context["train_dataloader"], DataLoaderDispatcher | DataLoaderShard):
            raise RunError(
                "the trainer fetches a batch ahead of the one it trains; use "
                "`rollbook.integrations.trl_trainer.RollbookGRPOTrainer` in place of AsyncGRPOTrainer"
            )
        if problems := setting_problems(args, self._run.info):
            raise RunError("these settings do not match the run: " + "; ".join(problems))
        self._run.begin(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        names = [path.name.removeprefix("checkpoint-") for path in Path(args.output_dir).glob("checkpoint-*")]
        kept = [int(name) for name in names if name.isdecimal()]
        self._run.checkpointed(state.global_step, oldest_kept=min([state.global_step, *kept]))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= args.max_steps:
            self._run.finish()


def setting_problems(args: Any, info: HostInfo) -> list[str]:
    """Settings that break the mapping of one step to one batch, or that train on other logprobs than those sampled."""
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    problems = []
    if rows != info.rows_per_step:
        processes = f" × {args.world_size} processes" if args.world_size > 1 else ""
        problems.append(
            f"per_device_train_batch_size × gradient_accumulation_steps{processes} is {rows}, a batch of the run has "
            f"{info.rows_per_step} rows ({info.groups_per_step} groups of {info.completions_per_prompt}, batch policy "
            f"{info.batch_policy})"
        )
    if args.token_budget is None or args.token_budget > 0:
        problems.append(f"token_budget is {args.token_budget}; 0 makes a step a fixed number of rows")
    if args.weight_sync_steps != 1:
        problems.append(f"weight_sync_steps is {args.weight_sync_steps}; every step is a version, set it to 1")
    if args.temperature != info.temperature:
        problems.append(f"temperature is {args.temperature}, but the run samples at {info.temperature}")
    if args.max_staleness < info.max_head_offpolicy_versions:
        problems.append(
            f"max_staleness is {args.max_staleness}, but the run's max_head_offpolicy_versions is "
            f"{info.max_head_offpolicy_versions}"
        )
    if args.max_steps <= 0:
        problems.append("max_steps is not set")
    if info.max_steps is not None and args.max_steps > info.max_steps:
        problems.append(f"max_steps is {args.max_steps}, but the run ends after trainer.max_steps = {info.max_steps}")
    return problems
