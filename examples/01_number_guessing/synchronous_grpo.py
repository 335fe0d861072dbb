"""Synchronous GRPO in 60 lines: `MultiTurnEnvPool` plays a group of sessions, plain PyTorch trains. No event loop, no ledger.

    rollbook env serve --env number_guessing --pool-size 8 --port 8000
    python examples/01_number_guessing/synchronous_grpo.py --url http://127.0.0.1:8000 --steps 150

The policy sees the interval that is still possible and chooses a number from 0 to 15. It learns to halve the interval.
"""

import argparse
import random

import torch
from torch import Tensor, nn

from rollbook import MultiTurnEnvPool, Observation

HIGH = 15
MAX_TURNS = 8


class Policy(nn.Module):
    """A table: for each interval, a score for each number."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(HIGH + 1, HIGH + 1, HIGH + 1))

    def choose(self, low: int, high: int) -> tuple[int, Tensor]:
        """A number inside the interval, and its log-probability."""
        logprobs = torch.log_softmax(self.scores[low, high, low : high + 1], dim=0)
        choice = int(torch.multinomial(logprobs.exp(), 1))
        return low + choice, logprobs[choice]


def play_group(policy: Policy, pool: MultiTurnEnvPool, task: dict[str, int]) -> tuple[Tensor, Tensor]:
    """The reward and the summed log-probability of each episode. All sessions step together."""
    pool.reset_group(task)
    bounds = [(0, HIGH)] * pool.size
    rewards, logprobs = torch.zeros(pool.size), [torch.zeros(()) for _ in range(pool.size)]
    running = set(range(pool.size))
    for _ in range(MAX_TURNS):
        guesses: dict[int, int] = {}
        for at in running:
            guesses[at], logprob = policy.choose(*bounds[at])
            logprobs[at] = logprobs[at] + logprob
        seen: list[Observation] = pool.run_group_step(
            [str(guesses[at]) if at in guesses else None for at in range(pool.size)]
        )
        for at in list(running):
            rewards[at] += seen[at].reward
            low, high = bounds[at]
            bounds[at] = (guesses[at] + 1, high) if seen[at].text == "higher" else (low, guesses[at] - 1)
            if seen[at].done or bounds[at][0] > bounds[at][1]:
                running.discard(at)
        if not running:
            break
    return rewards, torch.stack(logprobs)


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="address of `rollbook env serve`")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument(
        "--group", type=int, default=8, help="sessions of a group; the server needs as many environments"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    mean = 0.0
    with MultiTurnEnvPool(args.url, args.group) as pool:
        for step in range(1, args.steps + 1):
            rewards, logprobs = play_group(policy, pool, {"secret": rng.randint(0, HIGH), "low": 0, "high": HIGH})
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            optimizer.zero_grad()
            torch.autograd.backward(-(advantages * logprobs).mean())
            optimizer.step()
            mean = 0.95 * mean + 0.05 * float(rewards.mean()) if step > 1 else float(rewards.mean())
            if step % 25 == 0:
                print(f"step {step}: mean reward {mean:.3f}")
    return mean


if __name__ == "__main__":
    main()
