"""Number guessing, played token by token: a rollout function to copy from.

A module that `rollout.function` names offers `make_rollout(setup)`. It is called once in each worker process and returns the
function that plays one episode:

    async def rollout(row: dict) -> RolloutSample | None

The setup hands over everything an episode needs: the policy, the tokenizer, an environment, the limits. What the policy samples
and what
the environment answers goes into an assembler in the order it happened, and never through text and back: the tokens that are
trained are
exactly those that were sampled.

In this game every guess is one token of the policy, and every answer of the environment (higher, lower, invalid) is one token too:

    <bos> 7 higher 11 lower 9
          ^        ^        ^   trained: the policy sampled these
"""

import time
from collections.abc import Iterator
from typing import Any

from rollbook.contracts.trajectory import RolloutSample
from rollbook.envs.builtin.number_guessing import number_guessing_tasks
from rollbook.rollout.assemblers.tokens import TrajectoryAssembler
from rollbook.rollout.contract import RolloutFn, RolloutSetup


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
                    # Running into a limit is the policy's doing: it earns nothing, and the sample says why it ended.
                    return assembler.build(reward=0.0, solved=False, finish_reason=limit, facts=seen.facts)
                guess = await setup.policy.complete(assembler.prompt_ids, max_tokens=1)
                assembler.add_completion(guess)
                seen = await env.step(setup.tokenizer.decode(guess.token_ids.tolist()))
                if not seen.done:
                    assembler.add_observation(setup.tokenizer.encode(seen.text))
        return assembler.build(reward=seen.reward, solved=seen.solved, facts=seen.facts)

    return rollout


def tasks(low: int = 0, high: int = 15, copies: int = 1) -> Iterator[dict[str, Any]]:
    """What `tasks.source` names: one row for each secret. A row is a plain dict with a lasting id."""
    yield from number_guessing_tasks(low, high, copies)
