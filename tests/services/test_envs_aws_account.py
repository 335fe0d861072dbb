"""A real account as the cloud, played by a simulator in which other objects exist too."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import RunError
from rollbook.envs.builtin.awscli.cloud.account import SANDBOX_MARK
from rollbook.envs.builtin.awscli.cloud.backend import SimulatedCloud
from rollbook.envs.builtin.awscli.config import AwsCliConfig
from rollbook.envs.builtin.awscli.environment import AwsCliEnvironment
from rollbook.envs.environment import EnvironmentPool
from tests.parts.envs.aws import bucket_task, play, quiet_log

pytestmark = pytest.mark.asyncio(loop_scope="module")
ACCOUNT = "444455556666"
ARGS: dict[str, Any] = {"backend": "aws", "confirm_account": ACCOUNT}
MARK = f"ssm put-parameter --type String --name {SANDBOX_MARK} --value {ACCOUNT}"
OLDER = [
    "s3api create-bucket --bucket older",
    "s3api put-object --bucket older --key kept",
    "iam create-user --user-name owner",
]
MOVES = [
    "aws s3 mb s3://made",
    "aws s3api put-bucket-versioning --bucket made --versioning-configuration Status=Enabled",
    "aws s3api put-object --bucket made --key a/b",
    "aws s3api put-object --bucket made --key a/b",
    "aws s3api put-bucket-tagging --bucket older --tagging TagSet=[{Key=seen,Value=yes}]",
    "aws sqs create-queue --queue-name made-queue",
    "aws iam create-role --role-name made-role --assume-role-policy-document {}",
    "aws iam attach-role-policy --role-name made-role --policy-arn arn:aws:iam::aws:policy/ReadOnlyAccess",
    "aws iam create-user --user-name made-user",
    "aws iam create-access-key --user-name made-user",
    "aws dynamodb create-table --table-name made-table --billing-mode PAY_PER_REQUEST"
    " --attribute-definitions AttributeName=k,AttributeType=S --key-schema AttributeName=k,KeyType=HASH",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def simulator() -> AsyncIterator[SimulatedCloud]:
    cloud = await SimulatedCloud.start(AwsCliConfig(account=ACCOUNT), port=0)
    yield cloud
    await cloud.remove()


@pytest_asyncio.fixture(loop_scope="module")
async def owner(simulator: SimulatedCloud, monkeypatch: pytest.MonkeyPatch) -> SimulatedCloud:
    """The account as its owner sees it, empty."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{simulator.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCOUNT)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "simulated")
    await simulator.clean()
    return simulator


async def run(cloud: SimulatedCloud, line: str) -> str:
    result = await cloud.run(line.split())
    assert result.rc == 0, (line, result.stderr)
    return result.stdout


async def names(cloud: SimulatedCloud) -> dict[str, list[str]]:
    lists = {
        "buckets": "s3api list-buckets --query Buckets[].Name",
        "queues": "sqs list-queues --query QueueUrls",
        "users": "iam list-users --query Users[].UserName",
        "roles": "iam list-roles --query Roles[].RoleName",
        "tables": "dynamodb list-tables --query TableNames",
    }
    return {kind: (await run(cloud, f"{line} --output text")).split() for kind, line in lists.items()}


async def play_once(pool: EnvironmentPool, moves: list[str]) -> list[str]:
    env = await pool.acquire(Deadline(10.0, "test"))
    try:
        return [observation.text for observation in await play(env, bucket_task(max_steps=30), moves)]
    finally:
        await env.close()


async def test_only_what_an_episode_made_is_removed_from_the_account(owner: SimulatedCloud) -> None:
    for line in [MARK, *OLDER]:
        await run(owner, line)
    before = await names(owner)
    async with AwsCliEnvironment.open_pool(size=1, log=quiet_log(), args=ARGS) as pool:
        texts = await play_once(pool, MOVES)
        assert not [text for text in texts[1:] if "exit code" in text]
        await run(owner, "s3api create-bucket --bucket someone-elses")  # appears during the episode, not made by it
        during = await names(owner)
        assert {"made", "older", "someone-elses"} <= set(during["buckets"])
        assert during["roles"] == [*before["roles"], "made-role"]
        await play_once(pool, ["aws s3 mb s3://second"])  # the account is cleaned before the next session
        between = await names(owner)
        assert sorted(between.pop("buckets")) == ["older", "second", "someone-elses"]
        assert between == {kind: found for kind, found in before.items() if kind != "buckets"}
    # The last session is cleaned up at the end.
    assert sorted((await names(owner))["buckets"]) == ["older", "someone-elses"]
    assert "kept" in await run(owner, "s3api list-objects-v2 --bucket older")


async def test_after_a_cancelled_command_the_account_is_cleaned_and_used_again(owner: SimulatedCloud) -> None:
    await run(owner, MARK)
    async with AwsCliEnvironment.open_pool(size=1, log=quiet_log(), args=ARGS) as pool:
        env = await pool.acquire(Deadline(10.0, "test"))
        await env.reset(bucket_task(max_steps=30))
        await env.step("aws s3 mb s3://made")
        step = asyncio.create_task(env.step("aws s3api create-bucket --bucket cancelled"))
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        assert step.cancelled()
        await env.close()
        # Whether the cancelled command made it is not known; it named it.
        await owner.run(["s3api", "create-bucket", "--bucket", "cancelled"])
        await play_once(pool, ["aws s3 mb s3://second"])
        assert (await names(owner))["buckets"] == ["second"]
    assert (await names(owner))["buckets"] == []


async def test_services_whose_objects_could_not_be_removed_are_not_changed(owner: SimulatedCloud) -> None:
    await run(owner, MARK)
    async with AwsCliEnvironment.open_pool(size=1, log=quiet_log(), args=ARGS) as pool:
        texts = await play_once(pool, ["aws ec2 create-vpc --cidr-block 10.0.0.0/16", "aws ec2 describe-vpcs"])
    assert "ec2: changes are not allowed on a real account" in texts[1]
    assert "exit code" not in texts[2]


async def test_an_account_that_is_not_marked_as_a_sandbox_is_refused(owner: SimulatedCloud) -> None:
    with pytest.raises(RunError, match=rf"account {ACCOUNT} is not marked as a sandbox.*ssm put-parameter"):
        async with AwsCliEnvironment.open_pool(size=1, log=quiet_log(), args=ARGS):
            pytest.fail("the account is not marked")
    await run(owner, f"ssm put-parameter --type String --name {SANDBOX_MARK} --value 000011112222")
    with pytest.raises(RunError, match="is not marked as a sandbox"):
        async with AwsCliEnvironment.open_pool(size=1, log=quiet_log(), args=ARGS):
            pytest.fail("the mark is of another account")
