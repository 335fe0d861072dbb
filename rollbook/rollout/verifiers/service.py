"""A program for the Python of another virtual environment: plays the episodes of a verifiers taskset as a rollout service.

    PYTHON -P service.py rows       # prints the tasks of the taskset, one JSON object on each line
    PYTHON -P service.py serve      # prints {"url": ...}, then serves POST /rollouts until its standard input ends

The first line of standard input is a JSON object: `taskset`, `args` (the `[env]` block of verifiers), `limits`, `token`. The
program imports verifiers and its dependencies only, never Rollbook. It sees no token ids: each episode gets the URL of an
OpenAI-compatible endpoint of the run, which records the tokens of every conversation under the id of its trace.
"""

import asyncio
import hmac
import json
import logging
import math
import sys
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

MODEL = "policy"
KEPT_S = 60.0
"""How long a reply is kept for a client that lost its connection."""
RESERVED_PART, MAX_RESERVE_S = 0.1, 15.0
"""Of an episode's time, for the end of its harness and for scoring."""
ENDS = {"max_turns": "max_turns", "max_input_tokens": "max_tokens", "max_output_tokens": "max_tokens"}
ENDS["max_total_tokens"] = "max_tokens"
"""Stop conditions that are limits of an episode, by the names of the run."""


def load(setting: dict[str, Any]) -> vf.Env:
    """The environment of the taskset. The limits of the run apply to each agent that has none of its own."""
    args = dict(setting["args"])
    taskset = args.get("taskset") or {}
    config = resolve_env_config({**args, "taskset": {**taskset, "id": setting["taskset"]}})
    if "max_concurrent_agents" not in args:
        config.max_concurrent_agents = None  # the run limits its groups in flight, and the time of an episode
    limits: Any = setting.get("limits")
    for name, written in agent_config_fields(config).items() if limits else ():
        agent = written.model_copy()
        if agent.max_turns is None:
            agent.max_turns = limits["max_turns"]
        if agent.max_total_tokens is None:
            agent.max_total_tokens = limits["max_total_tokens"]
        if agent.timeout.rollout is None:
            seconds = limits["max_seconds"]
            rollout_s = seconds - min(MAX_RESERVE_S, RESERVED_PART * seconds)
            agent.timeout = agent.timeout.model_copy(update={"rollout": rollout_s})
        setattr(config, name, agent)
    return load_environment(config)


def print_rows(setting: dict[str, Any]) -> None:
    taskset, limit = load(setting).taskset, setting.get("limit")
    if limit is not None:
        taskset = taskset.take(limit)
    if not taskset.bounded:
        sys.exit(f"the taskset {setting['taskset']} never ends: set tasks.limit")
    for task in taskset:
        name = str(task.data.id or task.data.name or task.data.idx).replace("@", "_")
        say({"id": name, "task": task.data.model_dump(mode="json", exclude_defaults=True)})


class Service:
    """`POST /rollouts`, `DELETE /rollouts/ID` and `GET /health`, as in Rollbook's protocol of remote rollouts."""

    def __init__(self, env: vf.Env, token: str) -> None:
        self._env = env
        self._token = token
        self._task_type = type(env.taskset).task_type()
        self._episodes: dict[str, asyncio.Task[dict[str, Any]]] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 2**20, middlewares=[self._guard])
        app.router.add_post("/rollouts", self._post)
        app.router.add_delete("/rollouts/{id}", self._delete)
        app.router.add_get("/health", self._health)
        app.on_shutdown.append(self._close)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(sent, f"Bearer {self._token}".encode()):
            return error(401, "unauthorized", "a bearer token is required")
        response: web.StreamResponse = await handler(request)
        return response

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "playing": len(self._episodes)})

    async def _post(self, request: web.Request) -> web.Response:
        rollout = await request.json()
        episode = self._episodes.get(rollout["request_id"])
        if episode is None:
            episode = asyncio.create_task(self._play(rollout))
            self._episodes[rollout["request_id"]] = episode
            episode.add_done_callback(lambda _: self._forget_later(rollout["request_id"]))
        try:
            return web.json_response(await asyncio.shield(episode))
        except asyncio.CancelledError:
            if episode.cancelled():
                return error(410, "cancelled", "this rollout was cancelled")
            raise
        except TimeoutError:
            return error(504, "deadline", "the rollout did not end within its deadline")
        except Exception as failure:
            return error(422, "episode_failed", f"{type(failure).__name__}: {failure}")

    async def _delete(self, request: web.Request) -> web.Response:
        episode = self._episodes.get(request.match_info["id"])
        if episode is None:
            return error(404, "unknown_rollout", "this rollout is not being played")
        episode.cancel()
        return web.json_response({"status": "cancelled"})

    async def _close(self, _: web.Application) -> None:
        for episode in self._episodes.values():
            episode.cancel()
        await asyncio.gather(*self._episodes.values(), return_exceptions=True)

    async def _play(self, rollout: dict[str, Any]) -> dict[str, Any]:
        data = self._task_type.data_type().model_validate(rollout["row"]["task"])
        task = self._task_type(data, self._env.config.taskset.task)
        # The run decides about sampling: its proxy replaces what a request asks for.
        context = ModelContext(
            model=MODEL,
            client=EvalClientConfig(base_url=rollout["chat_url"], api_key_var="ROLLBOOK_NO_KEY"),
            sampling=SamplingConfig(),
        )
        (slot,) = self._env.slots(task)
        async with asyncio.timeout(rollout["deadline_s"]):
            episode = await self._env.run_slot(slot, context)
        is_complete = self._env.complete(episode)
        broken = None if is_complete else episode_error(episode)
        return {
            "tokenizer_id": rollout["tokenizer_id"],
            "sampling": rollout["sampling"],
            "turns": [],
            "conversations": [conversation(trace, broken) for trace in episode.traces],
            # Without any trace, only the episode says what failed.
            "invalid_cause": None if episode.traces else broken or "the environment ran no agent",
        }

    def _forget_later(self, request_id: str) -> None:
        asyncio.get_running_loop().call_later(KEPT_S, self._episodes.pop, request_id, None)


def episode_error(episode: Any) -> str:
    """What the environment itself reports, else the first error of its traces."""
    failed = [trace for trace in episode.traces if not trace.ok]
    errors = episode.errors[-1:] or [failure for trace in failed for failure in trace.errors[-1:]]
    if errors:
        return text_of(errors[0])
    return "a deadline of the environment expired" if episode.is_timeout else "the episode is not complete"


def text_of(failure: Any) -> str:
    return f"{failure.type}: {failure.message}"


def conversation(trace: Any, broken: str | None) -> dict[str, Any]:
    """The reward of one trace. A reward that was not computed is a failure, never 0."""
    failure = trace.errors[-1] if trace.errors and not trace.ok else None
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    cause = None
    if failure is not None:
        cause = text_of(failure)
    elif broken is not None:
        cause = broken
    elif unscored:
        cause = f"verifiers did not compute the rewards {', '.join(unscored)}"
    elif not trace.rewards:
        cause = "the task has no reward"
    elif not math.isfinite(trace.reward):
        cause = f"the reward is {trace.reward}"
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    return {
        "session": trace.id,
        "agent": trace.agent.name,
        "is_trained": trace.agent.trainable,
        "reward": trace.reward if cause is None else None,
        "invalid_cause": cause,
        "is_scoring_error": failure is not None and failure.type == "TaskError",
        "finish_reason": "time" if trace.is_timeout else ENDS.get(trace.stop_condition or ""),
        "scores": finite(scores),
        "metrics": finite(trace.metrics),
    }


def finite(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def error(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": {"type": kind, "message": message}}, status=status)


async def serve(setting: dict[str, Any]) -> None:
    env = load(setting)
    async with env.serving():
        runner = web.AppRunner(Service(env, setting["token"]).app(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        say({"url": f"http://{host}:{port}"})
        # Ends with the process that started it, which holds the other end of the pipe.
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        await runner.cleanup()


def main() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    setting = json.loads(sys.stdin.buffer.readline())
    if sys.argv[1] == "rows":
        print_rows(setting)
    else:
        asyncio.run(serve(setting))


if __name__ == "__main__":
    main()
