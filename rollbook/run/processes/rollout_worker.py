"""The parts of a rollout worker process: policy client, tokenizer, environments. Built inside the worker from plain values."""

import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollbook.envs.config import EnvConfig
from rollbook.inference.config import InferenceConfig
from rollbook.rollout.chat.tokenizer import ModelTokenizer
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.contract import RolloutSetup
from rollbook.run.episodes import open_setup
from rollbook.run.policy_clients import open_policy, policy_urls
from rollbook.telemetry.events import EventLog


@asynccontextmanager
async def build_setup(settings: Mapping[str, Any]) -> AsyncIterator[RolloutSetup]:
    inference = InferenceConfig.model_validate(settings["inference"])
    rollout = RolloutConfig.model_validate(settings["rollout"])
    tokenizer = ModelTokenizer.from_directory(Path(settings["model_dir"]))
    log = EventLog("rollout-worker", Path(settings["log_file"]))
    sampling = rollout.sampling.params(tokenizer.eos_token_ids)
    if settings.get("is_greedy"):
        # For evaluation only; training always samples.
        sampling = dataclasses.replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
    try:
        async with (
            open_policy(inference, settings["policy_url"], log=log) as policy,
            open_setup(
                policy,
                tokenizer=tokenizer,
                sampling=sampling,
                rollout=rollout,
                env=EnvConfig.model_validate(settings["env"]),
                log=log,
                request_s=inference.request_s,
                policy_url=policy_urls(settings["policy_url"])[0],
            ) as setup,
        ):
            yield setup
    finally:
        log.close()
