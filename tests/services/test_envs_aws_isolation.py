"""Attacks on the AWS environment with real simulators: options that outlive their command, admin requests of the simulator, files
of this package, and destruction in place of a solution.
"""

import shlex
from collections.abc import AsyncIterator, Iterable, Sequence

import aiohttp
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.concurrency.deadline import Deadline
from rollbook.contracts.errors import EpisodeError
from rollbook.envs.builtin.awscli.cloud.backend import SimulatedCloud
from rollbook.envs.builtin.awscli.cloud.worker import ApiCall
from rollbook.envs.builtin.awscli.commands import GLOBAL_OPTIONS
from rollbook.envs.builtin.awscli.environment import AwsCliPool, AwsEpisode
from rollbook.envs.builtin.awscli.tasks.checks import GradingRule
from rollbook.envs.builtin.awscli.tasks.setup import prepare
from rollbook.envs.builtin.awscli.tasks.task_bank import BANK, AwsTask, task_bank
from tests.parts.envs.aws import aws_pool, bucket_task, one_environment, play

pytestmark = pytest.mark.asyncio(loop_scope="module")
RULE = GradingRule(partial=0.5, hint_price=0.85)
# The output of each command depends on the session: its region, account, credentials, output format and query.
PROBES = (["sts", "get-caller-identity"], ["ec2", "describe-availability-zones"], ["s3api", "list-buckets"])
VALUES = ("eu-west-3", "text", "table", "Account", "nobody", "off", "1", "/dev/null", "http://127.0.0.1:9", "")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[AwsCliPool]:
    async with aws_pool(2, command_s=10.0) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cloud(pool: AwsCliPool) -> AsyncIterator[SimulatedCloud]:
    """One slot whose command line runs every command of a test, as in successive sessions."""
    lease = await pool.simulators.acquire(Deadline(60.0, "test"))
    yield lease.sandbox
    lease.release()


@st.composite
def option_words(draw: st.DrawFn) -> list[str]:
    """A global option in one of the spellings that the CLI accepts: abbreviated, with a space or `=`, repeated."""
    words: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(GLOBAL_OPTIONS)))
        option = name[: draw(st.integers(3, len(name)))]
        if GLOBAL_OPTIONS[name]:
            value = draw(st.sampled_from(VALUES))
            words += draw(st.sampled_from([[option, value], [f"{option}={value}"]]))
        else:
            words.append(option)
    return words


@st.composite
def commands_with_options(draw: st.DrawFn) -> list[str]:
    command = draw(
        st.sampled_from(
            [
                *PROBES,
                ["s3api", "no-such-operation"],
                ["no-such-service"],
                ["s3api", "create-bucket"],
                ["s3", "ls"],
                ["help"],
            ]
        )
    )
    place = draw(st.integers(0, len(command)))
    return [*command[:place], *draw(option_words()), *command[place:]]


async def outputs(cloud: SimulatedCloud) -> list[tuple[int, str, str]]:
    results = [await cloud.run(probe) for probe in PROBES]
    return [(result.rc, result.stdout, result.stderr) for result in results]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clean_outputs(cloud: SimulatedCloud) -> list[tuple[int, str, str]]:
    return await outputs(cloud)


@given(commands=st.lists(commands_with_options(), min_size=1, max_size=3))
@settings(max_examples=15)
async def test_no_option_changes_a_later_command_however_it_is_spelt(
    cloud: SimulatedCloud, clean_outputs: list[tuple[int, str, str]], commands: Sequence[list[str]]
) -> None:
    for command in commands:
        await cloud.run(command)
    assert await outputs(cloud) == clean_outputs


@pytest.mark.parametrize(
    "files",
    [
        {"config": "[default]\nregion = eu-west-3\noutput = text\n"},
        {
            ".aws/config": "[default]\nregion = eu-west-3\n",
            ".aws/credentials": "[default]\naws_access_key_id = 999988887777\n",
        },
        {".aws/cli/alias": "[toplevel]\nsts = !id\ns3api = ec2 describe-vpcs\n"},
        {".aws/models/sts/2011-06-15/service-2.json": "{}", "sitecustomize.py": "raise SystemExit", "awscli.py": "1/0"},
    ],
    ids=["config", "credentials", "alias", "models and modules"],
)
async def test_files_of_the_agent_do_not_configure_the_command_line(
    cloud: SimulatedCloud, files: dict[str, str]
) -> None:
    before = await outputs(cloud)
    for name, text in files.items():
        path = cloud.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert await outputs(cloud) == before
    forked = await cloud.run(["sts", "get-caller-identity", "--output", "json"])
    assert (forked.rc, forked.stdout) == before[0][:2]
    await cloud.clean()


async def test_a_line_cannot_set_environment_variables(pool: AwsCliPool) -> None:
    lines = [
        "AWS_DEFAULT_REGION=eu-west-3 aws ec2 describe-availability-zones",
        "env AWS_PROFILE=x aws s3 ls",
        "aws ec2 describe-availability-zones",
    ]
    async with one_environment(pool) as env:
        seen = await play(env, bucket_task(), lines)
    assert [observation.text.startswith("error: no command found") for observation in seen[1:]] == [True, True, False]
    assert "us-east-1a" in seen[-1].text


ADMIN_COMMANDS = [
    "s3api create-multipart-upload --bucket _ministack --key reset",
    "s3api create-multipart-upload --bucket _MiniStack --key reset",
    "s3api restore-object --bucket _ministack --key reset",
    "s3api create-multipart-upload --bucket x --key ../_ministack/reset",
    "s3api create-multipart-upload --bucket .. --key _ministack/reset",
    "s3api select-object-content --bucket _ministack --key reset --expression a --expression-type SQL "
    "--input-serialization CSV={} --output-serialization CSV={} out",
    "s3api delete-objects --bucket _ministack --delete Objects=[{Key=reset}]",
    "s3api get-object --bucket _ministack --key health out",
    "s3api get-object --bucket _localstack --key health out",
    "s3api put-object --bucket _ministack --key config",
    "s3 mv s3://_ministack/reset s3://_ministack/reset2",
    "sqs send-message --queue-url ENDPOINT/_ministack/reset --message-body x",
    "sqs purge-queue --queue-url ENDPOINT/_ministack/reset",
    "lambda invoke --function-name ../../../_ministack/reset out",
    "apigatewaymanagementapi post-to-connection --connection-id ../_ministack/reset --data x",
]


@pytest.mark.parametrize("line", ADMIN_COMMANDS)
async def test_no_command_reaches_the_admin_requests_of_the_simulator(cloud: SimulatedCloud, line: str) -> None:
    await cloud.run(["s3api", "create-bucket", "--bucket", "witness"])
    result = await cloud.run(shlex.split(line.replace("ENDPOINT", f"http://127.0.0.1:{cloud.port}")))
    assert result.rc != 0
    assert "services" not in result.stdout
    assert not (cloud.scratch / "out").exists() or "services" not in (cloud.scratch / "out").read_text()
    assert "witness" in (await cloud.run(["s3api", "list-buckets"])).stdout
    await cloud.clean()


PAGES = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Host": "evil.example"},
    {"Host": "127.0.0.1.evil.example:80"},
    {"Host": "localhost.evil.example:80"},
    {"User-Agent": "Mozilla/5.0 (an old browser, which sends neither Origin nor Sec-Fetch-Site with an image)"},
]


@pytest.mark.parametrize("headers", PAGES, ids=str)
async def test_no_web_page_changes_the_simulated_cloud(cloud: SimulatedCloud, headers: dict[str, str]) -> None:
    url = f"http://127.0.0.1:{cloud.port}/"
    create = {"Action": "CreateQueue", "QueueName": f"page-{PAGES.index(headers)}", "Version": "2012-11-05"}
    queues = {"Action": "ListQueues", "Version": "2012-11-05"}
    async with aiohttp.ClientSession() as session:
        async with session.post(url, data=create, headers=headers) as response:
            assert response.status == 403
        async with session.get(url, params=create, headers=headers) as response:
            assert response.status == 403
        async with session.post(url, data=queues) as response:
            assert create["QueueName"] not in await response.text()
        # The same form without the marks of a browser is executed.
        async with session.post(url, data=create) as response:
            assert create["QueueName"] in await response.text()


# Where the commands below store what they read.
STORED = (
    ApiCall(service="s3", operation="list_objects_v2", params={"Bucket": "stage"}),
    ApiCall(service="sqs", operation="list_queues"),
    ApiCall(service="cloudformation", operation="list_stacks"),
    ApiCall(service="ssm", operation="get_parameters", params={"Names": ["p"]}),
)
BANK_FILE = BANK / "expert.yaml"
READING_COMMANDS = [
    ["s3", "cp", "FILE", "s3://stage/loot"],
    ["s3", "mv", "FILE", "s3://stage/loot"],
    ["s3", "sync", "FOLDER", "s3://stage"],
    ["s3api", "put-object", "--bucket", "stage", "--key", "loot", "--body", "FILE"],
    ["s3api", "put-object", "--bucket", "stage", "--key", "loot", "--body=FILE"],
    ["s3api", "put-bucket-policy", "--bucket", "stage", "--policy", "file://FILE"],
    ["sqs", "create-queue", "--queue-name", "q", "--attributes", "file://FILE"],
    ["sqs", "create-queue", "--cli-input-json", "file://FILE"],
    ["sqs", "create-queue", "--cli-input-json", "fileb://FILE"],
    ["cloudformation", "package", "--template-file", "FILE", "--s3-bucket", "stage"],
    ["cloudformation", "deploy", "--template-file", "FILE", "--stack-name", "s"],
    ["cloudformation", "create-stack", "--stack-name", "s", "--template-body", "file://FILE"],
    ["cloudformation", "create-stack", "--stack-name", "s", "--template-url", "file://FILE"],
    ["lambda", "create-function", "--function-name", "f", "--runtime", "python3.12", "--handler", "a.b", "--role",
     "arn:aws:iam::111122223333:role/r", "--zip-file", "fileb://FILE"],
    ["ssm", "put-parameter", "--name", "p", "--type", "String", "--value", "file://FILE"],
    ["kinesis", "put-record", "--stream-name", "s", "--partition-key", "k", "--data", "fileb://FILE"],
    ["gamelift", "upload-build", "--name", "b", "--build-version", "1", "--build-root", "FOLDER"],
]  # fmt: skip


async def test_no_command_reads_the_task_bank(cloud: SimulatedCloud) -> None:
    await cloud.run(["s3api", "create-bucket", "--bucket", "stage"])
    for command in READING_COMMANDS:
        words = [word.replace("FILE", str(BANK_FILE)).replace("FOLDER", str(BANK)) for word in command]
        result = await cloud.run(words)
        answers = await cloud.call_api(STORED)
        assert "Contents" not in answers[0].result, result
        text = " ".join([result.stdout, *(str(answer) for answer in answers)])
        assert "variants" not in text
    await cloud.clean()


async def test_changing_the_environment_does_not_change_the_right_answer(pool: AwsCliPool) -> None:
    change = "aws sqs set-queue-attributes --queue-url URL --attributes VisibilityTimeout=7"
    async with one_environment(pool) as env:
        for answer, is_solved in (("7", False), ("45", True)):
            await env.reset(question())
            url = (
                await env.step("aws sqs get-queue-url --queue-name orders --query QueueUrl --output text")
            ).text.strip()
            await env.step(change.replace("URL", url))
            assert (await env.step(f"answer {answer}")).solved is is_solved


async def test_a_question_without_an_answer_at_the_start_aborts_the_reset(pool: AwsCliPool) -> None:
    async with one_environment(pool) as env:
        with pytest.raises(EpisodeError, match="no answer to the question"):
            await env.reset(
                question(
                    setup=["aws sts get-caller-identity"],
                    answer={"call": "s3.list_buckets", "query": "Buckets[0].Name"},
                )
            )


def question(**changes: object) -> dict[str, object]:
    task: dict[str, object] = bucket_task(
        setup=[
            {
                "run": "aws sqs create-queue --queue-name orders --attributes VisibilityTimeout=45",
                "keep": {"url": "QueueUrl"},
            }
        ],
        answer={
            "call": "sqs.get_queue_attributes",
            "with": {"QueueUrl": "${url}", "AttributeNames": ["All"]},
            "query": "Attributes.VisibilityTimeout",
        },
    )
    del task["checks"]
    return task | changes


def has_absence(task: AwsTask) -> bool:
    return any(check.is_absence for check in [*task.checks, *(check for fault in task.drift for check in fault.checks)])


async def earnings_after_destruction(
    cloud: SimulatedCloud, task: AwsTask, seed: int, kinds: Iterable[str]
) -> dict[str, float]:
    """What an agent earns in a task by deleting one kind of thing, or everything, and then answering 0."""
    found: dict[str, float] = {}
    for name in kinds:
        commands = DESTRUCTION[name]
        await cloud.clean()
        episode = AwsEpisode(await prepare(task, cloud, seed=seed), rule=RULE, chaos_scale=0.0)
        for listing, deletion in commands:
            for item in (await cloud.run([*listing.split(), "--output", "text"])).stdout.split():
                await cloud.run(shlex.split(deletion.replace("ITEM", item)))
        if not commands:
            await cloud.clean()
        if task.answer is None:
            await episode.update_results()
        else:
            episode.answer("0")
        found[name] = episode.take_reward()
    return found


DESTRUCTION: dict[str, list[tuple[str, str]]] = {
    "everything": [],
    "buckets": [("s3api list-buckets --query Buckets[].Name", "s3 rb s3://ITEM --force")],
    "objects": [("s3api list-buckets --query Buckets[].Name", "s3 rm s3://ITEM --recursive")],
    "queues": [("sqs list-queues --query QueueUrls", "sqs delete-queue --queue-url ITEM")],
    "topics": [("sns list-topics --query Topics[].TopicArn", "sns delete-topic --topic-arn ITEM")],
    "volumes": [("ec2 describe-volumes --query Volumes[].VolumeId", "ec2 delete-volume --volume-id ITEM")],
    "security groups": [("ec2 describe-security-groups --query SecurityGroups[].GroupId",
                         "ec2 delete-security-group --group-id ITEM")],
    "user pools": [("cognito-idp list-user-pools --max-results 20 --query UserPools[].Id",
                    "cognito-idp delete-user-pool --user-pool-id ITEM")],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("task_id", sorted(task.id for task in task_bank().values() if has_absence(task)))
async def test_destruction_earns_nothing_in_a_task_that_asks_to_remove_something(
    cloud: SimulatedCloud, task_id: str
) -> None:
    for seed in (0, 1):
        earned = await earnings_after_destruction(cloud, task_bank()[task_id], seed, DESTRUCTION)
        assert not any(earned.values()), earned


@pytest.mark.slow
async def test_an_empty_account_and_the_answer_0_earn_nothing_in_any_task(cloud: SimulatedCloud) -> None:
    for task in task_bank().values():
        earned = await earnings_after_destruction(cloud, task, 1, ["everything"])
        assert not any(earned.values()), task.id


async def test_an_empty_account_earns_nothing_in_a_task_that_asks_to_remove_something(cloud: SimulatedCloud) -> None:
    for task in filter(has_absence, task_bank().values()):
        earned = await earnings_after_destruction(cloud, task, 0, ["everything"])
        assert not any(earned.values()), task.id
