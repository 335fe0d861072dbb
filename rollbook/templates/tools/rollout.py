"""The rollout: plays one episode. The policy calls tools until it answers without a call or reaches a limit."""

import time
from typing import Any

from tools import SYSTEM_PROMPT, call_tool

from rollbook import (
    TO_BE_SCORED,
    MessageTrajectoryAssembler,
    RolloutFn,
    RolloutSample,
    RolloutSetup,
    parse_tool_calls,
)


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    """Called once in each worker process. It returns the function that plays one episode."""

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        began = time.monotonic()
        chat = MessageTrajectoryAssembler(setup.tokenizer, setup.sampling)
        chat.add_message("system", SYSTEM_PROMPT)
        chat.add_message("user", row["question"])
        results: list[str] = []
        while True:
            end = setup.limits.before_turn(
                turns=chat.num_turns, num_tokens=chat.num_tokens, seconds=time.monotonic() - began
            )
            if end is not None:
                break
            text = chat.add_completion(await setup.policy.complete(chat.next_prompt()))
            _, calls = parse_tool_calls(text)
            if not calls:
                break
            for call in calls:
                results.append(call_tool(call.name, call.arguments, row))
                chat.add_message("tool", results[-1])
        # The functions under [rollout.rewards] in run.toml compute the reward.
        return chat.build(reward=None, invalid_cause=TO_BE_SCORED, finish_reason=end, facts={"tool_results": results})

    return rollout
