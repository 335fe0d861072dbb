"""An environment as Atropos users write it: a `BaseEnv` of atroposlib 0.4.0 that knows nothing of this project.

    python echo_env.py SERVER_URL TOKENIZER_DIR

The game: a digit is shown, and the answer `even` or `odd` earns a point where it is right. So that the example needs no inference
server, the answers are fixed here; an environment of your own asks the server of its `APIServerConfig`.
"""

import asyncio
import random
import sys
from typing import Any

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.server_handling.server_manager import APIServerConfig

BOS, FIRST_DIGIT, EVEN, ODD = 0, 1, 9, 10
"""Token ids of the vocabulary in run.toml; `<bos>` stands before it."""


class EvenOrOdd(BaseEnv):  # type: ignore[misc]  # atroposlib is in another virtual environment
    async def setup(self) -> None:
        self.random = random.Random(0)

    async def get_next_item(self) -> int:
        return self.random.randrange(8)

    async def collect_trajectories(self, item: int) -> tuple[dict[str, Any], list[Any]]:
        await asyncio.sleep(0.01)
        tokens, masks, scores = [], [], []
        for number in range(self.config.group_size):
            answer = EVEN if number % 2 == 0 else ODD
            tokens.append([BOS, FIRST_DIGIT + item, answer])
            masks.append([-100, -100, answer])
            scores.append(1.0 if (answer == EVEN) == (item % 2 == 0) else 0.0)
        return {"tokens": tokens, "masks": masks, "scores": scores}, []

    async def evaluate(self, *_: Any, **__: Any) -> None:
        """Nothing to measure."""

    async def wandb_log(self, *_: Any, **__: Any) -> None:
        """There is nobody to tell."""


def main(url: str, tokenizer_dir: str) -> None:
    config = BaseEnvConfig(
        group_size=4,
        tokenizer_name=tokenizer_dir,
        rollout_server_url=url,
        wandb_name="even_or_odd",
        use_wandb=False,
        max_num_workers=4,
        total_steps=10_000,
        max_batches_offpolicy=3,
        max_token_length=64,
        steps_per_eval=0,
    )
    servers = [APIServerConfig(model_name="none", base_url="http://127.0.0.1:9/v1", api_key="x")]
    asyncio.run(EvenOrOdd(config, servers, slurm=False, testing=True).env_manager())


if __name__ == "__main__":
    main(*sys.argv[1:])
