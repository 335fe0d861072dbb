"""The rollout: plays one episode. Here it asks one question and takes one answer."""

from typing import Any

from rollbook import TO_BE_SCORED, MessageTrajectoryAssembler, RolloutFn, RolloutSample, RolloutSetup


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    """Called once in each worker process. It returns the function that plays one episode."""

    async def rollout(row: dict[str, Any]) -> RolloutSample:
        chat = MessageTrajectoryAssembler(setup.tokenizer, setup.sampling)
        chat.add_message("user", row["question"])
        chat.add_completion(await setup.policy.complete(chat.next_prompt()))
        # The functions under [rollout.rewards] in run.toml compute the reward.
        return chat.build(reward=None, invalid_cause=TO_BE_SCORED)

    return rollout
