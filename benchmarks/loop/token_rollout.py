"""Episodes of random tokens: given prompts, turns and lengths, so that the loop and the engine alone can do the same work."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
from rollbook.rollout.contract import RolloutFn, RolloutSetup


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    async def rollout(row: dict[str, Any]) -> RolloutSample | None:
        assembler = TrajectoryAssembler(setup.sampling)
        assembler.add_prompt(row["prompt"])
        for turn, (length, observation) in enumerate(zip(row["lengths"], row["observations"], strict=True)):
            if turn:
                assembler.add_observation(observation)
            # No stop tokens: every reply has its length.
            reply = await setup.policy.complete(assembler.prompt_ids, max_tokens=length, stop_token_ids=())
            assembler.add_completion(reply)
        return assembler.build(reward=float(reply.token_ids.sum() % 7))

    return rollout


def tasks(  # noqa: PLR0917 - the columns of a workload
    count: int, vocabulary: int, prompt: int, turns: int, shortest: int, longest: int, observation: int
) -> Iterator[dict[str, Any]]:
    for number in range(count):
        rng = random.Random(number)

        def ids(length: int, rng: random.Random = rng) -> Sequence[int]:
            return [rng.randrange(3, vocabulary) for _ in range(length)]

        yield {
            "id": f"prompt-{number}",
            "prompt": ids(prompt),
            "lengths": [rng.randint(shortest, longest) for _ in range(turns)],
            "observations": [ids(observation) for _ in range(turns)],
        }
