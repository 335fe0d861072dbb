"""Number guessing, token by token: an example of a rollout function.

`rollout.function` names a module with `make_rollout(setup)`. It is called once in each worker process and returns the function that
plays one episode:

    async def rollout(row: dict) -> RolloutSample | None

The setup provides the policy, the tokenizer, environments and limits. The assembler collects sampled tokens and observation tokens
in order. Sampled tokens are never decoded and encoded again, so the trained tokens are exactly the sampled ones.

In this game every guess of the policy is one token, and every response of the environment (higher, lower, invalid) is one token:

    <bos> 7 higher 11 lower 9
          ^        ^        ^   sampled by the policy, and trained
"""

import time
from collections.abc import Iterator
from typing import Any

from rollbook import EndReason, RolloutFn, RolloutSample, RolloutSetup, TrajectoryAssembler
from rollbook.envs.builtin.number_guessing import number_guessing_tasks


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    opening = setup.tokenizer.encode("<bos>")

    async def rollout(row: dict[str, Any]) -> RolloutSample | None:
        began = time.monotonic()
        assembler = TrajectoryAssembler(setup.sampling)
        assembler.add_prompt(opening)
        async with setup.open_environment() as env:
            seen = await env.reset(row)
            while not seen.done:
                limit = setup.limits.before_turn(
                    turns=assembler.num_turns, num_tokens=assembler.num_tokens, seconds=time.monotonic() - began
                )
                if limit is not None:
                    # Reaching a limit is the policy's fault: the reward is 0, and the sample stores the reason.
                    return assembler.build(reward=0.0, solved=False, finish_reason=limit, facts=seen.facts)
                guess = await setup.policy.complete(assembler.prompt_ids, max_tokens=1)
                assembler.add_completion(guess)
                seen = await env.step(setup.tokenizer.decode(guess.token_ids.tolist()))
                if not seen.done:
                    assembler.add_observation(setup.tokenizer.encode(seen.text))
        # A guess is one token by design, so the last one is not cut.
        return assembler.build(reward=seen.reward, solved=seen.solved, finish_reason=EndReason.DONE, facts=seen.facts)

    return rollout


def tasks(low: int = 0, high: int = 15, copies: int = 1) -> Iterator[dict[str, Any]]:
    """The rows of `tasks.source`: one for each secret. A row is a plain dict with a stable id."""
    yield from number_guessing_tasks(low, high, copies)
