"""The AWS agent example: held-out names, demonstrations, prompts and the result table."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.parts.run.examples import modules_of
from tests.parts.run.small import REPOSITORY

RECIPE = REPOSITORY / "examples" / "04_aws_agent_learns"


@pytest.fixture(scope="module")
def recipe() -> Iterator[dict[str, ModuleType]]:
    with modules_of(RECIPE, ("small_aws", "prepare", "results")) as found:
        yield found


def test_held_out_pairs_of_words_are_in_every_evaluated_task_and_in_no_renamed_demonstration(
    recipe: dict[str, ModuleType],
) -> None:
    small_aws, prepare = recipe["small_aws"], recipe["prepare"]
    rows = list(small_aws.tasks("test", 3))
    assert all(small_aws.has_held_out_pair(json.dumps(row["variants"])) for row in rows)
    chat = [
        {"role": "user", "content": "Create a bucket named amber-birch."},
        {"role": "assistant", "content": "amber-birch"},
    ]
    shown = list(prepare.renamed([chat], 200, seed=3))
    assert not any(small_aws.has_held_out_pair(message["content"]) for other in shown for message in other)
    assert len({other[0]["content"] for other in shown}) > 150
    # Words are replaced consistently, so names can still be copied.
    assert all(other[1]["content"] in other[0]["content"] for other in shown)


def test_no_training_task_has_a_held_out_pair_in_any_position(recipe: dict[str, ModuleType]) -> None:
    small_aws = recipe["small_aws"]
    rows = list(small_aws.tasks("train", 60, seed=5))
    assert not [row["id"] for row in rows if small_aws.has_held_out_pair(json.dumps(row["variants"]))]


@pytest.mark.parametrize(
    ("flaw", "line"),
    [
        ("guessed_operation", "aws s3api make-bucket --bucket amber-birch"),
        ("guessed_option", "aws s3api create-bucket --id amber-birch"),
        ("cut_name", "aws s3api create-bucket --bucket amber"),
    ],
)
def test_a_flawed_move_differs_from_the_right_one_in_one_part(
    recipe: dict[str, ModuleType], flaw: str, line: str
) -> None:
    assert getattr(recipe["prepare"], flaw)("aws s3api create-bucket --bucket amber-birch") == line
    assert getattr(recipe["prepare"], flaw)("aws sns list-topics") != "aws sns list-topics"


def test_the_prompt_keeps_values_and_errors_and_omits_braces_and_usage(recipe: dict[str, ModuleType]) -> None:
    view = recipe["small_aws"].seen_by_agent
    assert (
        view(json.dumps({"Parameter": {"Name": "/a", "LastModifiedDate": 17.5, "Value": "fern"}}))
        == "Name /a; Value fern;"
    )
    usage = "usage: aws [options] <command>\nTo see help text, you can run:\n\n  aws help\n\naws: error: argument operation: no"
    assert view(usage) == "error: argument operation: no"


def test_a_command_has_few_tokens_and_is_decoded_unchanged(recipe: dict[str, ModuleType]) -> None:
    line = "aws s3api create-bucket --bucket amber-birch"
    chats = [
        [{"role": "user", "content": "Create an S3 bucket named amber-birch."}, {"role": "assistant", "content": line}]
    ]
    tokenizer = recipe["prepare"].train_tokenizer(chats * 20, vocab_size=400)
    ids = tokenizer.encode(line, add_special_tokens=False)
    assert len(ids) <= 14
    assert tokenizer.decode(ids) == line


def measurement(mean: float) -> dict[str, Any]:
    solved = {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}
    return {
        "step": 4,
        "results": [{"label": "all", "tasks": 8, "episodes": 16, "solved": solved, "solved_once": solved}],
    }


def test_the_table_reports_whether_the_intervals_overlap(recipe: dict[str, ModuleType], tmp_path: Path) -> None:
    table = recipe["results"].table
    assert table({"before": measurement(0.3), "after": measurement(0.6)})[-1].endswith("| +30.0 | apart |")
    assert table({"before": measurement(0.3), "after": measurement(0.35)})[-1].endswith("| +5.0 | overlap |")
    recipe["results"].draw(tmp_path / "x.png", [(2.5, 0.4)], {"before": measurement(0.3), "after": measurement(0.6)})
    assert (tmp_path / "x.png").stat().st_size > 5_000
