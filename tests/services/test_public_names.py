"""Every name of `rollbook` does one real thing outside of a run. The notebook example uses `train` and its companions."""

import asyncio
import contextlib
import dataclasses
import queue
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from pydantic import BaseModel
from transformers import AutoModelForCausalLM

import rollbook
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import build_app, serve
from rollbook.integrations.trl_rows import TrlRow
from rollbook.rollout.agents.tool_calls import load_parser
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.contract import load_rollout
from rollbook.rollout.groups.player import GroupPlayer
from rollbook.rollout.remote.protocol import RolloutReply, reply_of
from rollbook.rollout.rewards.pool import open_reward_pool
from rollbook.telemetry.events import EventLog
from tests.parts.ledger.service import serving
from tests.parts.rollout.dispatching import REPOSITORY
from tests.parts.rollout.guessing import letter_tokenizer, setup_of
from tests.parts.sandbox.bubblewrap import require_bubblewrap
from tests.services.test_rollout_worker import order

SAMPLING = rollbook.SamplingParams(max_tokens=4)
ELSEWHERE = {
    "Sink",
    "train",
    "evaluate",
    "replay",
    "audit",
    "TrainReport",
    "EvaluationReport",
    "RunFailedError",
    "__version__",
}


class Said(BaseModel):
    text: str
    reward: float | None = None
    done: bool = False


def completion(*token_ids: int) -> rollbook.Completion:
    size = len(token_ids)
    return rollbook.Completion(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.full(size, -0.5, dtype=np.float32),
        versions=np.zeros(size, dtype=np.int32),
        finish_reason=rollbook.FinishReason.STOP,
    )


def sample(reward: float = 1.0) -> rollbook.RolloutSample:
    trajectory = rollbook.TrajectoryAssembler(SAMPLING)
    trajectory.add_prompt([5, 6])
    trajectory.add_completion(completion(7, 8))
    return trajectory.build(reward=reward, solved=reward > 0)


def group(task: str = "t1") -> rollbook.PromptGroup:
    return rollbook.PromptGroup(id=f"{task}@0", task_id=task, draw=0, samples=(sample(1.0), sample(0.0)))  # type: ignore[arg-type]  # ids are strings


@pytest.fixture
async def policy_server() -> AsyncIterator[str]:
    config = InferenceConfig(engine="scripted")
    async with open_engine(config, Path()) as engine, serve(build_app(engine, config)) as url:
        yield url


@pytest.fixture
async def env_server() -> AsyncIterator[str]:
    async with rollbook.serve_environments(rollbook.EnvConfig(name="arithmetic"), size=2) as server:
        yield server.url


def test_every_public_name_is_used_in_a_test() -> None:
    used = Path(__file__).read_text(encoding="utf-8")
    unused = [name for name in rollbook.__all__ if name not in ELSEWHERE and f"rollbook.{name}" not in used]
    assert unused == []


def test_an_unknown_name_is_an_attribute_error_with_the_known_names() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'trane'.*train"):
        rollbook.trane  # noqa: B018
    assert set(rollbook.__all__) == set(dir(rollbook))


def test_a_run_config_reports_what_is_wrong() -> None:
    config = rollbook.RunConfig.model_validate({"model": {"path": "m"}, "tasks": {"source": "t.jsonl"}})
    assert config.gate.max_head_offpolicy_versions == 1
    with pytest.raises(rollbook.ConfigError, match=r"trainer\.stepz: unknown field") as raised:
        rollbook.train({"model": {"path": "m"}, "tasks": {"source": "t.jsonl"}, "trainer": {"stepz": 1}})
    assert isinstance(raised.value, rollbook.RollbookError)


def test_an_assembler_builds_a_sample_of_exact_tokens() -> None:
    built = sample()
    (row,) = built.sequences
    assert isinstance(row, rollbook.TokenRow)
    assert row.token_ids.tolist() == [5, 6, 7, 8]
    assert row.loss_mask.tolist() == [False, False, True, True]
    assert built.finish_reason is rollbook.EndReason.DONE
    assert group().outcome(seconds=1.0).reward_mean == 0.5


def test_a_message_assembler_renders_only_what_is_new() -> None:
    tokenizer = letter_tokenizer()
    chat = rollbook.MessageTrajectoryAssembler(tokenizer, SAMPLING)
    chat.add_message("user", "hi")
    first = chat.next_prompt()
    assert chat.add_completion(completion(*tokenizer.encode("yes<|im_end|>"))) == "yes"
    chat.add_message("user", "why?")
    assert chat.next_prompt()[: len(first)] == first
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "user"]


async def test_a_setup_plays_an_episode_and_samples_are_joined_to_groups() -> None:
    setup, _ = setup_of()
    assert isinstance(setup, rollbook.RolloutSetup)
    play: rollbook.RolloutFn = load_rollout("chat")(setup)
    assert isinstance(await play({"secret": 3}), rollbook.RolloutSample)

    async def broken(row: dict[str, Any]) -> rollbook.RolloutSample:
        raise rollbook.EpisodeError("the simulator is gone")

    config = RolloutConfig(completions_per_prompt=2, retry_budget=0, drop_constant_reward=False)
    good = await GroupPlayer(play, config).play(order(1))
    bad = await GroupPlayer(broken, config).play(order(2))
    assert good.group is not None
    assert len(good.group.samples) == 2
    assert "the simulator is gone" in str(bad)
    groups = rollbook.GroupAssembler(completions_per_prompt=1)
    groups.note_started("row", submit_version=0)
    resolved = groups.add_sample("row", sample())
    assert isinstance(resolved, rollbook.RowResolution)
    assert resolved.pg is not None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_async_function_of_a_row_trains_without_a_factory(tmp_path: Path) -> None:
    async def rollout(row: dict[str, Any], setup: rollbook.RolloutSetup) -> rollbook.RolloutSample | None:
        prompt = setup.tokenizer.encode(row["question"])
        reply = await setup.policy.complete(prompt)
        return rollbook.RolloutSample(
            tokens=[*prompt, *reply.token_ids],
            logprobs=[*[0.0] * len(prompt), *reply.logprobs],
            loss_mask=[*[0] * len(prompt), *[1] * len(reply.token_ids)],
            versions=[*[-1] * len(prompt), *reply.versions],
            reward=float(reply.token_ids[0] % 2),
        )

    config = {
        "run": {"name": "flat"},
        "model": {"build": {"hidden_size": 16, "layers": 1, "vocabulary": ["0", "1", "2", "3", "+", "="]}},
        "gate": {"groups_per_step": 2},
        "rollout": {"completions_per_prompt": 4, "drop_constant_reward": False, "sampling": {"max_tokens": 2}},
        "trainer": {"max_steps": 2},
    }
    rows = [{"id": str(number), "question": f"{number} + 1 ="} for number in range(3)]
    before = listening_sockets()
    report = rollbook.train(config, rollout=rollout, tasks=rows, run_dir=tmp_path / "run")
    assert (report.exit_code, report.summary.steps) == (0, 2)
    assert report.plots
    assert listening_sockets() == before, "those of the run are closed"


def listening_sockets() -> set[object]:
    """Addresses on which this process accepts connections."""
    return {found.laddr for found in psutil.Process().net_connections() if found.status == psutil.CONN_LISTEN}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_trainer_gets_rows_from_the_queue_of_a_worker(tmp_path: Path) -> None:
    """Two steps of a loop that knows neither the ledger nor TRL; the run audits."""
    with rollbook.open_host(
        Path(REPOSITORY) / "examples/06_trl/run.toml", run_dir=tmp_path / "run", overrides=["trainer.max_steps=2"]
    ) as run:
        model = AutoModelForCausalLM.from_pretrained(run.info.model_dir, dtype=torch.float32)
        run.begin(0)
        run.publish(dict(model.named_parameters()))
        worker = rollbook.AsyncRolloutWorker(run)
        worker.start()
        worker.start()
        for step in (1, 2):
            rows: list[TrlRow] = []
            while len(rows) < run.info.rows_per_step:
                worker.check_health()
                with contextlib.suppress(queue.Empty):
                    rows.append(worker.rollout_buffer.get(timeout=1.0))
            assert worker.rollout_buffer.empty()
            for row in rows:
                ids = torch.from_numpy(row.input_ids)[None]
                logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None]).squeeze(1)
                loss = -(row.advantage * logprobs * torch.from_numpy(row.completion_mask)[1:]).sum()
                torch.autograd.backward(loss)
            torch.optim.SGD(model.parameters(), lr=0.01).step()
            run.publish(dict(model.named_parameters()))
            assert run.step == step
        run.checkpointed(2, oldest_kept=2)
        run.finish()
        worker.stop()
        assert worker.rollout_buffer.empty()
    report = rollbook.audit(tmp_path / "run")
    assert report.ok, report.violations


def test_a_controller_requests_no_more_groups_than_it_can_play() -> None:
    rule = rollbook.FreshnessRule(groups_per_step=2, max_in_flight=8, max_head_offpolicy_versions=1)
    controller = rollbook.StalenessController(rule, slots=3)
    assert controller.to_propose == 3


def test_task_sources_draw_every_task() -> None:
    tasks = [rollbook.Task(id=name, row={"n": number}) for number, name in enumerate("abc")]  # type: ignore[arg-type]  # ids are strings
    for source in (rollbook.CursorDataLoader(tasks, epochs=1), rollbook.Curriculum(tasks)):
        assert {draw.task_id for draw in source.propose(3)} == {"a", "b", "c"}


async def test_a_reward_function_scores_a_case_in_another_process() -> None:
    case = rollbook.RewardCase(row={"answer": "4"}, response="4")
    config = RolloutConfig.model_validate(
        {"rewards": {"functions": {"right": {"path": "tests.parts.rollout.rewards:right"}}, "processes": 1}}
    )
    assert config.rewards.rules is not None
    async with open_reward_pool(config.rewards.rules, search_path=(REPOSITORY,), log=EventLog("test")) as pool:
        scored = await pool.score("right", case)
    assert scored.value == 1.0


def test_pass_at_k_shares_the_credit_of_a_solved_sample() -> None:
    cases = [rollbook.RewardCase(row={}, solved=solved) for solved in (True, False, False)]
    assert rollbook.pass_at(2)(cases) == [1.0, 0.5, 0.5]


async def test_a_rollout_service_plays_an_episode_behind_http() -> None:
    setup, _ = setup_of()

    class Service:
        tokenizer_id = setup.tokenizer.identity

        async def play(self, request: rollbook.RolloutRequest) -> RolloutReply | None:
            return reply_of(sample(), tokenizer_id=self.tokenizer_id)

    async def one_sample(request: rollbook.RolloutRequest) -> rollbook.RolloutSample:
        return sample()

    services: list[rollbook.RolloutService] = [
        Service(),
        rollbook.FunctionService(setup.tokenizer.identity, one_sample),
    ]
    for service in services:
        async with rollbook.serve_rollouts(service) as url:
            play = load_rollout("remote")(dataclasses.replace(setup, settings={"url": url}))
            played = await play({"secret": 3})
        assert played is not None
        assert played.sequences[0].token_ids.tolist() == [5, 6, 7, 8]


def test_a_sample_without_a_reward_waits_for_the_reward_functions() -> None:
    trajectory = rollbook.TrajectoryAssembler(SAMPLING)
    trajectory.add_prompt([5])
    trajectory.add_completion(completion(7))
    waiting = trajectory.build(reward=None, invalid_cause=rollbook.TO_BE_SCORED)
    assert waiting.invalid_cause == rollbook.TO_BE_SCORED


def test_tool_calls_are_parsed_from_the_text_of_a_completion() -> None:
    text, calls = rollbook.parse_tool_calls('look: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    assert text.strip() == "look:"
    assert [call.name for call in calls] == ["add"]


def test_a_parser_of_tool_calls_is_named_by_module_and_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_calls.py").write_text(
        "from rollbook import ParsedText, ToolCall\n"
        "def parse(text):\n"
        "    name, _, rest = text.partition('!')\n"
        "    return ParsedText(rest, (ToolCall(name, '{}'),))\n"
        "def wrong(text):\n"
        "    return text, []\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    parsed = load_parser("my_calls:parse")("stop!now")
    assert parsed == rollbook.ParsedText("now", (rollbook.ToolCall("stop", "{}"),))
    with pytest.raises(rollbook.RollbookError, match="returned a tuple; it must return a"):
        load_parser("my_calls:wrong")("stop!now")


def test_a_tokenizer_is_read_from_a_model_directory(tmp_path: Path) -> None:
    with pytest.raises(rollbook.RollbookError, match="tokenizer"):
        rollbook.ModelTokenizer.from_directory(tmp_path)


def test_a_group_is_encoded_once_for_every_wire() -> None:
    assert rollbook.encode_group(group()).id == "t1@0"


async def test_an_environment_is_played_without_a_server() -> None:
    environments = rollbook.EnvironmentSource(rollbook.EnvConfig(name="arithmetic"))
    async with environments.open() as opened:
        env: rollbook.Environment = opened
        await env.reset({"left": 2, "sign": "+", "right": 3})
        assert (await env.step("5")).reward == 1.0
    environments.close()


async def test_the_ledger_stores_a_group_and_hands_out_its_batch(tmp_path: Path) -> None:
    rule = rollbook.FreshnessRule(groups_per_step=1, max_in_flight=4, max_head_offpolicy_versions=1)
    async with serving(tmp_path) as (url, _), rollbook.open_ledger_client(url, "mine") as ledger:
        assert isinstance(ledger, rollbook.LedgerClient)
        await ledger.create_run(rollbook.RunSettings(rule=rule))
        await ledger.take_role(restored_step=0)
        await ledger.confirm(await ledger.register(0, "w0"))

        def produce() -> tuple[int, bool]:
            with rollbook.open_sync_ledger_client(url, "mine") as client:
                assert isinstance(client, rollbook.SyncLedgerClient)
                client.register_producer("script")
                client.submit(group(), group().outcome(seconds=1.0), producer="script")
                return client.status().by_state["queued"], client.audit().ok

        assert await asyncio.to_thread(produce) == (1, True)
        batch = await ledger.batch(1, wait_s=5.0)
        assert [found.task_id for found in batch.groups] == ["t1"]  # type: ignore[union-attr]  # a batch is queued


async def test_environments_are_played_in_groups(env_server: str) -> None:
    task = {"left": 2, "sign": "+", "right": 3}

    async def play(session: rollbook.EnvSession) -> rollbook.Observation:
        return await session.step("5")

    async with rollbook.GrpoPool(env_server, size=2) as pool:
        await pool.reset_group(task)
        assert all(isinstance(seen, rollbook.Observation) for seen in await pool.run_group(play))

    def play_blocking() -> list[float]:
        with rollbook.MultiTurnEnvPool(env_server, size=2) as blocking:
            return blocking.run_group(task, lambda session, first: session.step("5").reward)

    assert len(await asyncio.to_thread(play_blocking)) == 2


async def test_code_runs_in_a_sandbox() -> None:
    require_bubblewrap()
    assert (await rollbook.run_code("print(6 * 7)")).stdout == b"42\n"
    image, limits = rollbook.SandboxImage(workdir="/app"), rollbook.SandboxLimits(memory_mb=256)
    async with rollbook.open_sandbox(image, limits) as sandbox:
        opened: rollbook.Sandbox = sandbox
        assert (await opened.exec("pwd")).text == "/app\n"


async def test_a_weight_client_talks_to_a_policy_server(policy_server: str) -> None:
    async with rollbook.WeightTransferClient([policy_server], request_s=10.0) as weights:
        assert list(await weights.reported()) == [None]
        await weights.pause()
        await weights.resume()


async def test_a_blocking_trainer_pushes_weights(policy_server: str) -> None:
    def train() -> list[int]:
        weights = rollbook.SyncWeightTransferClient([policy_server])
        weights.init()
        versions = []
        for number in range(2):
            weights.pause()
            versions.append(weights.update({"w": torch.full((2, 2), float(number))}))
            weights.resume()
        weights.destroy()
        with pytest.raises(rollbook.RollbookError, match="not connected"):
            weights.pause()
        return versions

    assert await asyncio.to_thread(train) == [1, 2]
    async with rollbook.WeightTransferClient([policy_server], request_s=10.0) as client:
        (reported,) = await client.reported()
    assert reported is not None
    assert reported.step == 2


def test_simulated_clouds_are_lent_to_threads_one_at_a_time() -> None:
    pytest.importorskip("ministack")
    pytest.importorskip("awscli")
    in_use: set[int] = set()

    def borrow(_: int) -> int:
        port = pool.acquire(timeout_s=60.0)
        assert port not in in_use, "lent twice"
        in_use.add(port)
        assert pool.endpoint(port) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port)).close()
        in_use.discard(port)
        pool.release(port)
        return port

    with rollbook.MiniStackPool(2, base_port=0) as pool, ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(borrow, range(8)))) == 2
        with pytest.raises(rollbook.RollbookError, match="port 1 is not acquired"):
            pool.release(1)
        held = [pool.acquire(), pool.acquire()]
        assert pool.free_count == 0
        for arguments in ({}, {"timeout_s": 0.05}):
            with pytest.raises(RuntimeError, match="exhausted"):
                pool.acquire(**arguments)
        for port in held:
            pool.release(port)
        # Released simulators are wiped in the background; acquiring waits for that.
        assert {pool.acquire(), pool.acquire()} == set(held)


async def test_an_app_of_an_openenv_class_is_created_and_served() -> None:
    class Echo:
        state = Said(text="")

        def reset(self) -> Said:
            return Said(text="")

        def step(self, action: Said) -> Said:
            return Said(text=action.text, done=True)

    app = rollbook.create_app(Echo, Said, Said, env_name="echo", max_concurrent_envs=1)
    async with app.serving(port=0) as server, rollbook.GrpoPool(base_url=server.url, size=1) as pool:
        await pool.reset_group({})
        (seen,) = await pool.run_group(lambda env: env.step({"text": "hello"}))
    assert (seen.done, "hello" in seen.text) == (True, True)


async def test_the_asynchronous_recipe_is_one_function() -> None:
    class Trainer:
        def train_step(
            self, global_step: int, groups: list[rollbook.PromptGroup], stats: dict[str, Any]
        ) -> tuple[int, dict[str, Any]]:
            return global_step + len(groups), stats

    async def play(number: int) -> rollbook.RolloutSample:
        return rollbook.RolloutSample([1, 2], [0.0, -0.5], [0, 1], float(number))

    steps = await rollbook.run_async_rl_loop(
        [rollbook.RowRequest(row, play) for row in range(3)],
        train_fns=Trainer(),
        completions_per_prompt=2,
        prompt_groups_per_step=1,
        max_head_offpolicy_versions=0,
    )
    assert steps == 3
    group = rollbook.rollout_to_prompt_group(rollbook.Rollout([await play(0), await play(1)]))
    assert group is not None


def test_a_loss_is_one_function() -> None:
    def plain(inputs: rollbook.LossInputs, settings: rollbook.LossSettings) -> rollbook.LossTerms:
        loss_N = -inputs.advantages_N * inputs.current_N
        return rollbook.LossTerms(loss_N=loss_N, is_clipped_N=torch.zeros_like(loss_N, dtype=torch.bool))

    ones_N = torch.ones(3)
    inputs = rollbook.LossInputs(
        current_N=-ones_N,
        old_N=-ones_N,
        sampled_N=-ones_N,
        advantages_N=ones_N,
        row_of_N=torch.tensor([0, 0, 1]),
        num_rows=2,
    )
    assert plain(inputs, rollbook.LossSettings()).loss_N.tolist() == [1.0, 1.0, 1.0]
