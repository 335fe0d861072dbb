"""TRL's AsyncGRPOTrainer on Rollbook's workers, gate and ledger. Run it again after a crash: it resumes without losing groups.

.venvs/trl/bin/python examples/06_trl/train.py --run-dir runs/trl
.venvs/trl/bin/accelerate launch --num_processes 2 examples/06_trl/train.py --run-dir runs/trl     (two GPUs)
.venvs/trl/bin/torchrun --nproc-per-node 2 examples/06_trl/train.py --run-dir runs/trl              (two processes on a CPU)
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig

from rollbook.integrations.trl import AsyncRolloutWorker, RollbookCallback, RollbookWeightTransfer, open_host
from rollbook.integrations.trl_trainer import RollbookGRPOTrainer, use_cpu

HERE = Path(__file__).parent


class PrintSteps(TrainerCallback):
    """Prints one JSON line per step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(self._step_s)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        shown = {key: logs[key] for key in ("ratio", "reward", "sample/staleness_max") if logs and key in logs}
        if shown:
            dropped = (logs or {}).get("sample/dropped_stale_total") or 0
            print(json.dumps({"step": state.global_step, **shown, "dropped_stale": dropped}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", default="runs/trl")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--step-s", type=float, default=0.0, help="make each step take this much longer")
    parser.add_argument("--set", action="append", default=[], help="override a field of run.toml")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        use_cpu()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    overrides = [f"trainer.max_steps={given.steps}", *given.set]
    with open_host(HERE / "run.toml", run_dir=given.run_dir, overrides=overrides) as run:
        args = AsyncGRPOConfig(
            output_dir=str(Path(given.run_dir) / "trl"),
            max_steps=given.steps,
            # With `accelerate launch`, the rows of a batch are divided among the processes.
            per_device_train_batch_size=run.info.rows_per_step // processes,
            token_budget=0,  # a step has a fixed number of rows, not of tokens
            num_generations=run.info.completions_per_prompt,
            max_staleness=run.info.max_head_offpolicy_versions,
            temperature=run.info.temperature,
            learning_rate=1e-3,
            save_steps=2,
            logging_steps=1,
            report_to=[],
            dtype="float32",
            use_cpu=not torch.cuda.is_available(),
            ddp_backend="gloo" if processes > 1 and not torch.cuda.is_available() else None,
            bf16=torch.cuda.is_available(),
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = RollbookGRPOTrainer(
            model=run.info.model_dir,
            args=args,
            # TRL requires a dataset; the tasks come from run.toml.
            train_dataset=Dataset.from_dict({"prompt": ["unused"] * math.prod((given.steps, run.info.rows_per_step))}),
            rollout_worker=AsyncRolloutWorker(run),
            weight_transfer=RollbookWeightTransfer(run),
            callbacks=[RollbookCallback(run), PrintSteps(given.step_s)],
        )
        checkpoint = run.last_checkpoint(args.output_dir)
        before = run.status()
        if run.is_leader:
            print(json.dumps({"resumed_from": checkpoint, "groups": dict(before.by_state)}), flush=True)
        trainer.train(resume_from_checkpoint=checkpoint)
        if not run.is_leader:
            return
        after = run.status()
        print(
            json.dumps(
                {
                    "done": run.step,
                    "opened": after.opened,
                    "groups": dict(after.by_state),
                    "dropped": dict(after.dropped),
                    "divergences": run.divergences,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
