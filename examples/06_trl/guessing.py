"""Number guessing, token by token: each guess of the policy is one token, and so is each answer of the environment.

The contract does not depend on the trainer: `make_rollout(setup)` returns the function that plays one episode.
"""

from collections.abc import Iterator
from typing import Any

from rollbook import EndReason, RolloutFn, RolloutSample, RolloutSetup, TrajectoryAssembler


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    opening = setup.tokenizer.encode("<bos>")

    async def rollout(row: dict[str, Any]) -> RolloutSample | None:
        assembler = TrajectoryAssembler(setup.sampling)
        assembler.add_prompt(opening)
        async with setup.open_environment() as env:
            seen = await env.reset(row)
            while not seen.done:
                guess = await setup.policy.complete(assembler.prompt_ids, max_tokens=1)
                assembler.add_completion(guess)
                seen = await env.step(setup.tokenizer.decode(guess.token_ids.tolist()))
                if not seen.done:
                    assembler.add_observation(setup.tokenizer.encode(seen.text))
        # A guess is one token by design, so the last one is not cut.
        return assembler.build(reward=seen.reward, solved=seen.solved, finish_reason=EndReason.DONE, facts=seen.facts)

    return rollout


def tasks(low: int, high: int) -> Iterator[dict[str, Any]]:
    """The rows of `tasks.source`: one for each secret."""
    for secret in range(low, high + 1):
        yield {"id": f"guess-{secret}", "secret": secret, "low": low, "high": high}
