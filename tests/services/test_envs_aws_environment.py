"""The AWS environment with real simulators: episodes and attacks."""

import asyncio
import random
import re
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.envs.builtin.awscli.cloud.backend import CREDENTIALS
from rollbook.envs.builtin.awscli.environment import AwsCliEnvironment, AwsCliPool
from rollbook.envs.builtin.awscli.tasks.task_bank import task_bank
from rollbook.envs.environment import EnvironmentsExhaustedError
from tests.parts.envs.aws import (
    LONG_S,
    aws_pool,
    bucket_task,
    ministack_pool,
    one_environment,
    play,
    play_reference,
    quiet_log,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
# Some tasks of each tier and mechanism: answers, files, lookups, forks, drift. A slow test plays them all.
SAMPLE = ["s3-object-size", "sqs-visibility-timeout", "s3-upload-file", "iam-create-role", "sqs-dead-letter-queue",
          "s3-static-website", "lambda-create-function", "network-with-public-subnet", "stack-from-template",
          "repair-queue-pair", "repair-routes", "evict-intruder"]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[AwsCliPool]:
    async with aws_pool(2, command_s=3.0) as opened:
        yield opened


@pytest.mark.parametrize("task_id", SAMPLE)
async def test_the_reference_solution_scores_one(pool: AwsCliPool, task_id: str) -> None:
    async with one_environment(pool) as env:
        seen = await play_reference(env, {"id": task_id, "seed": 5})
    assert seen[-1].solved
    assert sum(observation.reward for observation in seen) == pytest.approx(1.0)


# An answer, a creation and a repair.
@pytest.mark.parametrize("task_id", ["s3-object-size", "iam-create-role", "repair-routes"])
async def test_reading_until_no_moves_are_left_scores_nothing(pool: AwsCliPool, task_id: str) -> None:
    async with one_environment(pool) as env:
        seen = await play(env, {"id": task_id}, ["aws sts get-caller-identity"] * task_bank()[task_id].step_limit)
    assert seen[-1].done
    assert seen[-1].solved is False
    assert [observation.reward for observation in seen] == [0.0] * len(seen)


async def test_partial_work_earns_its_share_and_undoing_it_costs_the_same(pool: AwsCliPool) -> None:
    task = bucket_task(
        checks=[
            {"says": "a", "call": "s3.list_buckets", "query": "Buckets[].Name", "contains": "aaa"},
            {"says": "b", "call": "s3.list_buckets", "query": "Buckets[].Name", "contains": "bbb"},
        ]
    )
    moves = ["aws s3 mb s3://aaa", "aws s3 rb s3://aaa", "aws s3 mb s3://aaa", "aws s3 mb s3://bbb"]
    async with one_environment(pool) as env:
        seen = await play(env, task, moves)
    assert [round(observation.reward, 6) for observation in seen[1:]] == [0.25, -0.25, 0.25, 0.75]


async def test_hints_are_shown_and_reduce_the_reward(pool: AwsCliPool) -> None:
    async with one_environment(pool) as env:
        seen = await play(env, bucket_task(), ["hint", "hint", "aws s3 mb s3://wanted"])
    assert "It is about s3" in seen[1].text
    assert seen[-1].reward == pytest.approx(0.7225)


async def test_a_wrong_answer_ends_the_episode_with_nothing(pool: AwsCliPool) -> None:
    async with one_environment(pool) as env:
        seen = await play(env, {"id": "s3-object-size"}, ["answer 999999"])
    assert (seen[-1].done, seen[-1].solved, seen[-1].reward) == (True, False, 0.0)


async def test_the_environment_enforces_the_move_limit(pool: AwsCliPool) -> None:
    async with one_environment(pool) as env:
        seen = await play(env, bucket_task(max_steps=2), ["hello", "aws s3 ls", "aws s3 mb s3://wanted"])
        assert len(seen) == 3
        assert seen[-1].done
        with pytest.raises(EpisodeError, match="step after the end"):
            await env.step("aws s3 mb s3://wanted")


async def test_a_failed_set_up_aborts_the_reset_and_names_the_command(pool: AwsCliPool) -> None:
    async with one_environment(pool) as env:
        with pytest.raises(EpisodeError, match=r"rb s3://never-there.*failed"):
            await env.reset(bucket_task(setup=["aws s3 rb s3://never-there"]))


async def test_a_task_that_starts_solved_aborts_the_reset(pool: AwsCliPool) -> None:
    async with one_environment(pool) as env:
        with pytest.raises(EpisodeError, match="solved before"):
            await env.reset(bucket_task(setup=["aws s3 mb s3://wanted"]))


async def test_a_second_reset_starts_from_an_empty_cloud(pool: AwsCliPool) -> None:
    async with one_environment(pool) as env:
        await play(env, bucket_task(), ["aws s3 mb s3://left-over"])
        seen = await play(env, bucket_task(), ["aws s3 ls"])
    assert "(no output)" in seen[-1].text


async def test_an_unknown_command_gets_the_error_of_the_cli_and_leaves_no_state(
    pool: AwsCliPool,
) -> None:
    moves = [
        "aws s3api create-buckt --bucket wanted",
        "aws s4api create-bucket --bucket wanted",
        "aws s3api --bucket wanted",
        "aws s3api create-bucket --bucket wanted",
    ]
    async with one_environment(pool) as env:
        seen = await play(env, bucket_task(max_steps=9), moves)
    for refused in seen[1:3]:
        assert "Invalid choice" in refused.text
        assert "(exit code 252)" in refused.text or "(exit code 2)" in refused.text
    assert "(exit code" in seen[3].text
    assert seen[-1].solved


async def test_a_command_leaves_no_state_for_the_next(pool: AwsCliPool) -> None:
    """If a driver kept the state of these commands, later ones would fail."""
    moves = [
        "aws ec2 create-vpc --cidr-block 10.0.0.0/16 --region eu-west-1",
        "aws ec2 describe-vpcs --query 'length(Vpcs)' --output text",
        "aws ec2 modify-vpc-attribute --vpc-id nope --enable-dns-hostnames",
        "aws ec2 describe-vpcs --query 'Vpcs[].CidrBlock'",
        "aws sns publish --topic-arn",
        "aws ec2 describe-vpcs --query 'Vpcs[].CidrBlock'",
    ]
    async with one_environment(pool) as env:
        seen = await play(env, bucket_task(max_steps=20), moves)
    assert seen[2].text.strip().isdigit()
    assert "10.0.0.0/16" not in seen[4].text
    assert seen[4].text == seen[6].text


ATTACKS: dict[str, tuple[str, str]] = {
    "reading a host file by upload": ("aws s3 cp /etc/passwd s3://wanted-not/x", "working directory"),
    "reading a host file as a body": ("aws s3api put-object --bucket stage --key x --body /etc/passwd", "not permitted|Blob"),
    "reading a host file as a parameter": ("aws sqs create-queue --queue-name file:///etc/passwd", "cannot be read from files"),
    "writing a host file": ("aws s3api get-object --bucket stage --key k /tmp/rollbook-escape", "not permitted"),
    "climbing out": ("aws s3api get-object --bucket stage --key k ../../rollbook-escape", "not permitted"),
    "a shell": ("aws s3 ls; touch /tmp/rollbook-escape", "no shell"),
    "a substitution": ("aws s3 ls $(touch /tmp/rollbook-escape)", "no shell"),
    "another endpoint": ("aws s3 ls --endpoint-url http://127.0.0.1:9", "endpoint is fixed"),
    "another endpoint, abbreviated": ("aws s3 ls --endpoint http://127.0.0.1:9", "not available"),
    "a pager": ("aws s3api help", "s3api"),
    "a session program": ("aws ssm start-session --target i-1", "exit code"),
    "a configuration": ("aws configure set region x", "not available"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attack_is_refused_with_a_clear_error(pool: AwsCliPool, attack: str) -> None:
    line, answer = ATTACKS[attack]
    task = bucket_task(setup=["aws s3 mb s3://stage", "aws s3api put-object --bucket stage --key k"])
    async with one_environment(pool) as env:
        seen = await play(env, task, [line, "aws s3 ls s3://stage"])
    assert re.search(answer, seen[1].text), seen[1].text
    assert "root:" not in seen[1].text + seen[2].text
    assert sum(observation.reward for observation in seen) == 0.0
    assert not Path("/tmp/rollbook-escape").exists()


async def test_a_long_output_is_cut_with_a_remark(pool: AwsCliPool) -> None:
    async with one_environment(pool) as env:
        seen = await play(env, bucket_task(), ["aws ec2 help"])
    assert len(seen[-1].text) < 8_400
    assert "output cut" in seen[-1].text


async def test_a_command_over_its_time_limit_is_stopped_and_the_next_one_works(pool: AwsCliPool) -> None:
    task = bucket_task(setup=[{"run": "aws sqs create-queue --queue-name q", "keep": {"url": "QueueUrl"}}])
    slow = ["aws cloudformation wait stack-create-complete --stack-name x", "aws s3 ls"]
    async with one_environment(pool) as env:
        seen = [await env.reset(task)]
        seen.append(await env.step("aws sqs get-queue-url --queue-name q --query QueueUrl --output text"))
        url = seen[-1].text.strip()
        seen.append(await env.step(f"aws sqs receive-message --queue-url {url} --wait-time-seconds 15"))
        seen += [await env.step(line) for line in slow]
    assert "did not finish" in seen[2].text or "Read timeout" in seen[2].text
    assert seen[-1].text.startswith("(no output)")
    assert sum(observation.reward for observation in seen) == 0.0


async def test_lambda_code_is_not_executed_on_this_machine(pool: AwsCliPool, tmp_path: Path) -> None:
    flag = tmp_path / "executed"
    task = bucket_task(
        files={"fn.zip": {"app.py": f"open({str(flag)!r}, 'w').close()\ndef main(event, context): return 1\n"}},
        setup=["aws s3 mb s3://stage", "aws s3 cp fn.zip s3://stage/fn.zip"],
        max_steps=20,
    )
    create = "aws lambda create-function --function-name f --runtime python3.12 --handler app.main"
    moves = [
        f"{create} --role arn:aws:iam::111122223333:role/r --code S3Bucket=stage,S3Key=fn.zip",
        "aws lambda invoke --function-name f out.json",
    ]
    async with one_environment(pool) as env:
        await play(env, task, moves)
    assert not flag.exists()


async def test_a_simulator_cannot_call_the_address_of_a_subscription(pool: AwsCliPool) -> None:
    """A subscription may name any address; the simulator must not be able to reach it."""
    called = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    arn = "arn:aws:sns:us-east-1:111122223333:t"
    moves = [
        "aws sns create-topic --name t",
        f"aws sns subscribe --topic-arn {arn} --protocol http --notification-endpoint http://127.0.0.1:{port}/_ministack/reset",
        f"aws sns publish --topic-arn {arn} --message hello",
        "aws sns list-topics",
    ]
    async with server, one_environment(pool) as env:
        seen = await play(env, bucket_task(), moves)
    assert arn in seen[-1].text
    assert not called.is_set()


async def test_chaos_is_the_same_for_the_same_seed(pool: AwsCliPool) -> None:
    row: dict[str, Any] = {"id": "parameters-for-two-stages", "seed": 3, "chaos_scale": 4.0}
    moves = [f"aws ssm put-parameter --name /p/{n} --value x --type String" for n in range(8)]
    texts = []
    for _ in range(2):
        async with one_environment(pool) as env:
            seen = await play(env, row, moves)
            texts.append([observation.text for observation in seen[1:]])
            assert seen[-1].facts["chaos"] == 2
    assert texts[0] == texts[1]


async def test_an_environment_without_a_pool_starts_and_stops_its_own_simulator() -> None:
    env = AwsCliEnvironment()
    try:
        seen = await play(env, bucket_task(), ["aws s3 mb s3://wanted"])
        scratch = env._cloud.scratch if env._cloud else None
        assert seen[-1].solved
    finally:
        await env.close()
    assert scratch is not None
    assert not scratch.exists()


async def test_a_full_pool_is_reported_with_its_size(pool: AwsCliPool) -> None:
    async with one_environment(pool), one_environment(pool):
        assert pool.health().busy == pool.capacity == 2
        with pytest.raises(EnvironmentsExhaustedError, match=r"MiniStack pool exhausted: 2 of 2"):
            await pool.acquire(Deadline(0.05, "impatient"))


async def test_a_real_account_is_not_changed_unless_it_is_the_confirmed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = {"backend": "aws", "confirm_account": "999999999999"}
    for name in CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RunError, match="needs credentials"):
        async with AwsCliEnvironment.open_pool(size=1, log=quiet_log(), args=args):
            pytest.fail("there are no credentials")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-a-key")
    with pytest.raises(RunError, match=r"nothing was changed"):
        async with AwsCliEnvironment.open_pool(size=1, log=quiet_log(), args=args):
            pytest.fail("this account is not confirmed")


def two_free_ports() -> int:
    """The first of two neighbouring ports below those that the kernel gives to other programs."""
    for first in random.sample(range(20_000, 32_000, 2), 100):
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", first)),
            socket.create_server(("127.0.0.1", first + 1)),
        ):
            return first
    raise RuntimeError("no two neighbouring ports are free")


async def test_slots_listen_on_consecutive_ports_and_a_port_in_use_is_reported() -> None:
    base = two_free_ports()
    async with ministack_pool(pool_size=2, base_port=base) as pool:
        ports = {(await pool.acquire(Deadline(LONG_S, "test"))).sandbox.port for _ in range(2)}
        with pytest.raises(RunError, match=rf"port {base} .* cannot be used.*AWS_RL_ENV_MINISTACK_BASE_PORT"):
            async with ministack_pool(pool_size=1, base_port=base):
                pytest.fail("the port is taken")
    assert ports == {base, base + 1}
