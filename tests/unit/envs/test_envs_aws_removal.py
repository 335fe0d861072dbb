"""The table of removable objects, compared with the service descriptions of the AWS CLI."""

import re
from typing import Any

import pytest
from awscli.botocore import xform_name  # type: ignore[import-untyped]  # the package ships no types
from awscli.botocore.session import Session  # type: ignore[import-untyped]

from rollbook.envs.builtin.awscli.cloud.account import _is_named
from rollbook.envs.builtin.awscli.cloud.removal import KINDS, PAGES, ResourceKind
from rollbook.envs.builtin.awscli.cloud.worker import ApiCall


@pytest.fixture(scope="module")
def session() -> Any:
    return Session()


def operation_of(session: Any, call: ApiCall) -> Any:
    model = session.get_service_model(call.service)
    names = {xform_name(name): name for name in model.operation_names}
    operation = model.operation_model(names[call.operation])
    assert set(call.params) <= set(operation.input_shape.members), call
    return operation


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.service}.{kind.listing}")
def test_calls_and_fields_of_a_kind_exist_in_the_service_description(session: Any, kind: ResourceKind) -> None:
    listing = operation_of(session, kind.list_call(None, {}))
    assert re.split(r"\W", kind.path)[0] in listing.output_shape.members
    operation_of(session, kind.delete_call("x", None))
    for parts in kind.parts:
        listed = operation_of(session, kind.parts_call(parts, "x", None))
        assert set(re.findall(r"^\w+|(?<=\[)[A-Z]\w+", parts.path)) <= set(listed.output_shape.members)
        operation_of(session, kind.delete_part_call(parts, "x", {"Key": "k", "VersionId": "v"}, None))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.service}.{kind.listing}")
def test_every_page_of_a_listing_is_read(session: Any, kind: ResourceKind) -> None:
    listing = operation_of(session, kind.list_call(None, {}))
    followed = {PAGES[name] for name in PAGES if name in listing.output_shape.members}
    starts = {
        "NextToken",
        "nextToken",
        "Marker",
        "ExclusiveStartTableName",
        "ContinuationToken",
        "ExclusiveStartStreamName",
    }
    pages = set(listing.input_shape.members) & starts
    assert pages <= followed | {"ExclusiveStartStreamName"}, "Kinesis has both forms"


@pytest.mark.parametrize(
    ("name", "text", "is_named"),
    [
        ("made", "s3 mb s3://made\n", True),
        ("made", "s3api put-object --bucket made-by-others --key x\n", False),
        ("https://sqs.us-east-1.amazonaws.com/1/made", "sqs create-queue --queue-name made\n{}", True),
        ("arn:aws:sns:us-east-1:1:topic", "sns create-topic --name topic", True),
        ("1f2e-3d", 'kms create-key\n{"KeyId": "1f2e-3d"}', True),
        ("/app/one", "ssm put-parameter --name /app/one", True),
        ("alias/a", "kms create-alias --alias-name alias/b", False),
    ],
)
def test_an_object_is_an_episodes_own_if_a_changing_command_names_it(name: str, text: str, is_named: bool) -> None:
    assert _is_named(name, text) is is_named
