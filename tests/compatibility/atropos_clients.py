"""Unmodified atroposlib 0.4.0 as a client: environments and the calls of its example trainer. Runs in its own virtual environment.

python atropos_clients.py env NAME GROUP_SIZE URL ACKNOWLEDGED_FILE TOKENIZER_DIR
python atropos_clients.py trainer URL DELIVERED_FILE BATCH_SIZE STEPS
"""

import asyncio
import importlib
import importlib.util
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

PAUSE_S = 0.2


def play(name: str, group_size: int, url: str, acknowledged: Path, tokenizer_dir: str) -> None:
    base = importlib.import_module("atroposlib.envs.base")
    server = importlib.import_module("atroposlib.envs.server_handling.server_manager")

    class ScriptedEnv(base.BaseEnv):  # type: ignore[name-defined,misc]  # atroposlib is in another environment
        """Every group is identified by its tokens."""

        async def setup(self) -> None:
            self.num_items = 0

        async def get_next_item(self) -> int:
            self.num_items += 1
            return self.num_items

        async def wandb_log(self, *_: Any, **__: Any) -> None:
            """Logs nothing."""

        async def evaluate(self, *_: Any, **__: Any) -> None:
            pass

        async def collect_trajectories(self, item: int) -> tuple[dict[str, Any], list[Any]]:
            await asyncio.sleep(0.02)
            own = sum(name.encode())
            tokens = [[own, item, at, *range(400)] for at in range(group_size)]
            masks = [[-100, -100, *row[2:]] for row in tokens]
            scores = [at - 0.5 for at in range(group_size)]
            logprobs = [[1.0, 1.0, *(-0.1 * at - 1e-7 for at in range(401))] for _ in tokens]
            return {"tokens": tokens, "masks": masks, "scores": scores, "inference_logprobs": logprobs}, []

        async def _send_scored_data_to_api(self, scored_data: Any) -> None:
            await super()._send_scored_data_to_api(scored_data)
            with acknowledged.open("a") as file:
                file.write(f"{scored_data['tokens'][0][0]}/{scored_data['tokens'][0][1]}\n")

    config = base.BaseEnvConfig(
        group_size=group_size,
        tokenizer_name=tokenizer_dir,
        rollout_server_url=url,
        wandb_name=name,
        use_wandb=False,
        max_num_workers=4,
        total_steps=10_000,
        max_batches_offpolicy=3,
        max_token_length=1024,
        steps_per_eval=0,
        include_messages=False,
    )
    servers = [server.APIServerConfig(model_name="none", base_url="http://127.0.0.1:9/v1", api_key="x")]
    env = ScriptedEnv(config, servers, slurm=False, testing=True)
    asyncio.run(env.env_manager())


def train(url: str, delivered: Path, batch_size: int, steps: int) -> None:
    # The package of the example trainer imports torch. Only its API calls are used here.
    package = types.ModuleType("example_trainer")
    found = importlib.util.find_spec("example_trainer")
    assert found is not None
    package.__path__ = list(found.submodule_search_locations or [])
    sys.modules["example_trainer"] = package
    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["torch"].cuda = types.SimpleNamespace(is_available=lambda: False)  # type: ignore[attr-defined]
    api = importlib.import_module("example_trainer.api")
    config = types.SimpleNamespace(
        atropos_url=url,
        training_steps=steps,
        checkpoint_interval=0,
        wandb_group=None,
        wandb_project=None,
        batch_size=batch_size,
        gradient_accumulation_steps=1,
        seq_len=2048,
        save_path="checkpoints",
    )
    assert api.check_atropos_api(url)
    api.register_trainer(config)
    step = 0
    while step < steps:
        batch = api.get_batch(url)["batch"]
        if batch is None:
            time.sleep(PAUSE_S)
            continue
        assert sum(len(group["tokens"]) for group in batch) == batch_size
        assert all(group["inference_logprobs"][0][0] == 1.0 and group["masks"][0][0] == -100 for group in batch)
        step += 1
        with delivered.open("a") as file:
            file.write(json.dumps([f"{group['tokens'][0][0]}/{group['tokens'][0][1]}" for group in batch]) + "\n")
        time.sleep(PAUSE_S)


def main(arguments: list[str]) -> None:
    if arguments[0] == "env":
        name, size, url, acknowledged, tokenizer_dir = arguments[1:]
        play(name, int(size), url, Path(acknowledged), tokenizer_dir)
    else:
        url, delivered, batch_size, steps = arguments[1:]
        train(url, Path(delivered), int(batch_size), int(steps))


if __name__ == "__main__":
    main(sys.argv[1:])
