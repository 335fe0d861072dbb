"""A rollout with a long prompt, a short answer and an environment that sleeps: much to train, little to generate."""

from collections.abc import Iterator
from typing import Any

from rollbook.contracts.trajectory import RolloutSample
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
from rollbook.rollout.contract import RolloutFn, RolloutSetup


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    length: int = setup.settings["prompt_tokens"]

    async def rollout(row: dict[str, Any]) -> RolloutSample | None:
        prompt = setup.tokenizer.encode(
            "<bos> " + " ".join(str((row["secret"] * 7 + i * i) % 16) for i in range(length))
        )
        assembler = TrajectoryAssembler(setup.sampling)
        assembler.add_prompt(prompt)
        answer = await setup.policy.complete(assembler.prompt_ids)
        assembler.add_completion(answer)
        async with setup.open_environment() as env:
            await env.reset(row)
            seen = await env.step(setup.tokenizer.decode(answer.token_ids[:1].tolist()))
        return assembler.build(reward=float(answer.token_ids.sum() % 7), solved=seen.solved)

    return rollout


def tasks(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {"id": f"prompt-{number}", "secret": number % 16, "low": 0, "high": 15}
