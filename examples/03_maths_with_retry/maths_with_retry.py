r"""Maths in several turns: after a wrong answer the policy gets a fixed message and another try. An example to copy from.

    user        What is 3 + 4 ?
    assistant   \boxed{8}                        sampled, trained
    user        That is not right . Try again .
    assistant   \boxed{7}                        sampled, trained: reward 1

The reward is that of the last turn, 0 or 1. `scoring.py` scores the answers; it never raises and has a time limit.
"""

import time
from typing import Any

import scoring

from rollbook import (
    EndReason,
    EpisodeError,
    FinishReason,
    MessageTrajectoryAssembler,
    RolloutFn,
    RolloutSample,
    RolloutSetup,
)

RETRY = "That is not right . Try again ."
"""Always the same message, so that it reveals nothing about the answer."""


def make_rollout(setup: RolloutSetup) -> RolloutFn:
    system = setup.settings.get("system_prompt")
    retry = str(setup.settings.get("retry_message", RETRY))
    scorer = scoring.Scorer(
        timeout_s=float(setup.settings.get("score_timeout_s", 5.0)),
        is_lenient=bool(setup.settings.get("is_lenient", False)),
    )

    async def rollout(row: dict[str, Any]) -> RolloutSample | None:
        began = time.monotonic()
        chat = MessageTrajectoryAssembler(setup.tokenizer, setup.sampling)
        if system is not None:
            chat.add_message("system", str(system))
        chat.add_message("user", str(row["question"]))
        end, is_right = None, False
        while True:
            limit = setup.limits.before_turn(
                turns=chat.num_turns, num_tokens=chat.num_tokens, seconds=time.monotonic() - began
            )
            prompt = chat.next_prompt() if limit is None else []
            max_tokens = min(setup.sampling.max_tokens, setup.limits.tokens_left(len(prompt)))
            if limit is not None or max_tokens == 0:
                end = limit or EndReason.MAX_TOKENS
                break
            reply = await setup.policy.complete(prompt, max_tokens=max_tokens)
            if reply.finish_reason is FinishReason.ABORT:
                raise EpisodeError(f"the policy server aborted turn {chat.num_turns + 1}")
            is_right = await scorer.is_right(chat.add_completion(reply), str(row["answer"]))
            if is_right or chat.num_turns >= setup.limits.max_turns:
                break
            chat.add_message("user", retry)
        if chat.num_turns == 0:
            raise EpisodeError(f"the question alone does not fit max_total_tokens = {setup.limits.max_total_tokens}")
        return chat.build(
            reward=float(is_right),
            solved=is_right,
            finish_reason=end,
            metrics={"first_try": float(is_right and chat.num_turns == 1)},
        )

    return rollout
