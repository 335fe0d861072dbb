"""Parsing the agent's reply into a command or a refusal."""

import os
import shlex
import subprocess
import sys

import pytest
from awscli.clidriver import create_clidriver  # type: ignore[import-untyped]  # the package ships no types
from hypothesis import given
from hypothesis import strategies as st

from rollbook.envs.builtin.awscli.commands import (
    GLOBAL_OPTIONS,
    REFUSED_OPTIONS,
    Command,
    CommandVerb,
    Refusal,
    parse_move,
    positionals,
    split,
)


def parsed(action: str) -> Command:
    move = parse_move(action)
    assert isinstance(move, Command), move
    return move


def refused(action: str) -> str:
    move = parse_move(action)
    assert isinstance(move, Refusal), move
    return move.text


@pytest.mark.parametrize(
    "action",
    [
        "aws s3 ls",
        "$ aws s3 ls",
        "`aws s3 ls`",
        "- `aws s3 ls`",
        "1. aws s3 ls",
        "I look at the buckets first.\n```bash\naws s3 ls\n```\nThen I will see.",
        "<think>maybe\naws s3 rb s3://x\n</think>\naws s3 ls",
        "aws s3 \\\n  ls",
        "aws s3 ls  # all of them",
    ],
)
def test_the_command_is_found_in_any_wrapping(action: str) -> None:
    assert parsed(action).argv == ("s3", "ls")


@pytest.mark.parametrize(
    "action", ["", "   ", "I do not know", "awsome s3 ls", "hinting at aws", "# aws s3 ls", "answer"]
)
def test_text_without_a_command_is_refused_with_an_instruction(action: str) -> None:
    assert "begins with `aws`" in refused(action)


def test_only_the_first_of_several_commands_is_used_and_the_others_are_counted() -> None:
    move = parsed("aws s3 ls\naws sqs list-queues\naws sns list-topics")
    assert move.argv == ("s3", "ls")
    assert move.skipped == 2


def test_an_answer_contains_the_rest_of_the_line() -> None:
    move = parsed("answer rate(5 minutes)")
    assert (move.verb, move.argv) == (CommandVerb.ANSWER, ("rate(5 minutes)",))


def test_a_line_that_begins_with_answer_is_ignored_if_the_task_has_no_question() -> None:
    move = parse_move("answer the question first\naws s3 ls", may_answer=False)
    assert isinstance(move, Command)
    assert (move.verb, move.argv, move.skipped) == (CommandVerb.AWS, ("s3", "ls"), 0)


def test_a_query_may_contain_backticks() -> None:
    move = parsed("aws ec2 describe-vpcs --query 'Vpcs[?IsDefault==`true`]'")
    assert move.argv[-1] == "Vpcs[?IsDefault==`true`]"


@pytest.mark.parametrize(
    ("line", "operator"),
    [
        ("aws s3 ls | cat", "|"),
        ("aws s3 ls; rm -rf /", ";"),
        ("aws s3 ls && id", "&"),
        ("aws s3 ls > /etc/passwd", ">"),
        ("aws s3 ls < /etc/passwd", "<"),
        ("aws s3 ls (x)", "("),
    ],
)
def test_shell_operators_are_refused_by_name(line: str, operator: str) -> None:
    assert repr(operator) in refused(line)


@pytest.mark.parametrize(
    "line", ["aws s3 ls $HOME", "aws s3 ls $(id)", "aws s3 ls `id`", 'aws s3 ls "${HOME}"', 'aws s3 ls "`id`"']
)
def test_substitution_is_refused_also_inside_double_quotes(line: str) -> None:
    assert "single quotes" in refused(line)


def test_single_quotes_protect_everything() -> None:
    assert split("aws x 'a | b; $HOME `id` \"q\"'") == ["aws", "x", 'a | b; $HOME `id` "q"']


def test_json_keeps_its_inner_quotes() -> None:
    assert split("""aws x --d '{"a":"b"}' --e "{\\"c\\":1}" """) == ["aws", "x", "--d", '{"a":"b"}', "--e", '{"c":1}']


def test_an_unclosed_quote_is_reported() -> None:
    assert "never closed" in refused("aws s3 ls 'oops")


@pytest.mark.parametrize(
    "option",
    ["--endpoint-url http://127.0.0.1:4567", "--endpoint-url=http://x", "--endpoint http://x", "--endp http://x", "--profile p",
     "--debug", "--no-verify-ssl", "--no-sign-request", "--ca-bundle x"],
)  # fmt: skip
def test_options_that_leave_the_sandbox_are_refused_also_when_abbreviated(option: str) -> None:
    assert "not available" in refused(f"aws s3 ls {option}")


@given(st.sampled_from(sorted(REFUSED_OPTIONS)), st.data())
def test_every_abbreviation_of_a_refused_option_is_refused_wherever_it_is_written(
    name: str, data: st.DataObject
) -> None:
    option = name[: data.draw(st.integers(3, len(name)))]
    written = data.draw(st.sampled_from([[option], [option, "x"], [f"{option}=x"], [option, "x", option, "y"]]))
    words = ["s3api", "list-objects", "--bucket", "b"]
    place = data.draw(st.integers(0, len(words)))
    assert "not available" in refused(shlex.join(["aws", *words[:place], *written, *words[place:]]))


def test_the_end_of_options_mark_is_refused() -> None:
    """After it, the endpoint that is added to every command would not be read as an option."""
    assert "-- is not available" in refused("aws s3api list-buckets --")


def test_the_list_of_global_options_is_that_of_the_installed_cli() -> None:
    table = create_clidriver()._get_argument_table()
    takes_value = {
        f"--{name}": argument._action not in {"store_true", "store_false", "version"}
        for name, argument in table.items()
    }
    assert takes_value == GLOBAL_OPTIONS


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--region eu-west-1 s3api list-buckets", ["s3api", "list-buckets"]),
        ("--reg=eu-west-1 s3api --ou json list-buckets", ["s3api", "list-buckets"]),
        ("s3api --no-paginate list-objects --bucket get-it", ["s3api", "list-objects"]),
        ("s3 cp a s3://b/k --query x", ["s3", "cp", "a", "s3://b/k"]),
    ],
)
def test_the_service_and_the_operation_are_found_between_global_options(line: str, words: list[str]) -> None:
    assert positionals(line.split()) == words


@pytest.mark.parametrize("word", ["file:///etc/passwd", "fileb://x.zip", "Code=fileb:///etc/shadow"])
def test_local_files_as_parameters_are_refused(word: str) -> None:
    assert "cannot be read from files" in refused(f"aws lambda create-function --x {word}")


@pytest.mark.parametrize("path", ["/etc/passwd", "~/x", "../x", "a/../../x"])
def test_local_paths_outside_the_working_directory_are_refused(path: str) -> None:
    assert "working directory" in refused(f"aws s3 cp {path} s3://b/k")


def test_paths_inside_the_working_directory_are_accepted() -> None:
    assert parsed("aws s3 cp site/index.html s3://b/k").argv[2] == "site/index.html"


@pytest.mark.parametrize(
    "service", ["configure set region x", "history list", "--region x configure list", "--out=json history show"]
)
def test_the_configuration_of_the_cli_is_not_available(service: str) -> None:
    assert "not available" in refused(f"aws {service}")


def test_a_very_long_line_is_refused() -> None:
    assert "the limit is 20000" in refused("aws s3 ls " + "x" * 30_000)


@pytest.mark.parametrize(
    ("line", "is_read_only"),
    [
        ("aws s3 ls", True),
        ("aws s3api list-buckets", True),
        ("aws iam get-role --role-name x", True),
        ("aws ec2 describe-vpcs", True),
        ("aws s3api help", True),
        ("aws s3api create-bucket --bucket b", False),
        ("aws sqs receive-message --queue-url u", False),
        ("aws dynamodb update-table --table-name t", False),
        ("aws s3 mb s3://b", False),
        ("aws getaway", False),
        ("aws s3api --query get-it create-bucket --bucket b", False),
        ("aws s3api create-bucket --bucket help", False),
        ("aws --region us-east-1 s3api list-buckets", True),
    ],
)
def test_only_commands_that_surely_change_nothing_are_read_only(line: str, is_read_only: bool) -> None:
    assert parsed(line).is_read_only is is_read_only


# The skeleton of an operation needs no server.
OUTPUTS_KEPT = """
import gc
from rollbook.envs.builtin.awscli.cloud.warm_cli import Bounded, WarmCli
cli = WarmCli(endpoint="http://127.0.0.1:9", max_output_bytes=1000, read_s=1)
for _ in range(5):
    assert cli.run(["s3api", "list-buckets", "--generate-cli-skeleton"])["rc"] == 0
gc.collect()
print(sum(type(found) is Bounded for found in gc.get_objects()))
"""


def test_a_warm_command_line_keeps_no_output_of_earlier_commands() -> None:
    credentials = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    printed = subprocess.run(
        [sys.executable, "-c", OUTPUTS_KEPT],
        env={**os.environ, **credentials},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed == "0\n"
