"""How the objects of a real account are listed and deleted, one entry for each kind of object.

Only services with an entry may be changed by episodes on a real account: what cannot be removed must not be made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.envs.builtin.awscli.cloud.worker import ApiCall

PAGES = {
    "NextToken": "NextToken",
    "nextToken": "nextToken",
    "Marker": "Marker",
    "NextMarker": "Marker",
    "LastEvaluatedTableName": "ExclusiveStartTableName",
    "ContinuationToken": "ContinuationToken",
}
"""The field of a response that names its next page, and the parameter that requests it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Things inside an object that must be deleted before it: listed at `path`, each deleted by one call."""

    listing: str
    path: str
    deletion: str
    params: Mapping[str, Any]
    """`{item}` is the listed value, `{item[Key]}` one of its fields."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResourceKind:
    """A kind of object. `path` lists the ids, which `deletion` takes as the parameter `key`."""

    service: str
    listing: str
    path: str
    deletion: str
    key: str
    options: Mapping[str, Any] = field(default_factory=dict)
    filters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the listing."""
    parts: Sequence[Parts] = ()
    part_key: str = ""
    """The parameter that names the object in calls about its parts; default: `key`."""

    def list_call(self, region: str | None, page: Mapping[str, Any]) -> ApiCall:
        return ApiCall(service=self.service, operation=self.listing, params={**self.filters, **page}, region=region)

    def delete_call(self, name: str, region: str | None) -> ApiCall:
        value: Any = [name] if self.key.endswith("Names") else name
        return ApiCall(
            service=self.service, operation=self.deletion, params={self.key: value, **self.options}, region=region
        )

    def parts_call(self, parts: Parts, name: str, region: str | None) -> ApiCall:
        owner = {self.part_key or self.key: name}
        return ApiCall(service=self.service, operation=parts.listing, params=owner, region=region)

    def delete_part_call(self, parts: Parts, name: str, item: Any, region: str | None) -> ApiCall:
        owner = {self.part_key or self.key: name}
        return ApiCall(
            service=self.service,
            operation=parts.deletion,
            params={**owner, **_filled(parts.params, item)},
            region=region,
        )


def _filled(params: Mapping[str, Any], item: Any) -> dict[str, Any]:
    return {
        name: [part.format(item=item) for part in value] if isinstance(value, list) else value.format(item=item)
        for name, value in params.items()
    }


def _policies(owner: str) -> tuple[Parts, ...]:
    """Attached and inline policies of a role, user or group."""
    return (
        Parts(
            listing=f"list_attached_{owner}_policies",
            path="AttachedPolicies[].PolicyArn",
            deletion=f"detach_{owner}_policy",
            params={"PolicyArn": "{item}"},
        ),
        Parts(
            listing=f"list_{owner}_policies",
            path="PolicyNames",
            deletion=f"delete_{owner}_policy",
            params={"PolicyName": "{item}"},
        ),
    )


# In the order of deletion: an object comes before those it depends on.
KINDS: tuple[ResourceKind, ...] = (
    ResourceKind(
        service="s3",
        listing="list_buckets",
        path="Buckets[].Name",
        deletion="delete_bucket",
        key="Bucket",
        parts=[
            Parts(
                listing="list_object_versions",
                path="[Versions, DeleteMarkers][] | [?@].{Key: Key, VersionId: VersionId}",
                deletion="delete_object",
                params={"Key": "{item[Key]}", "VersionId": "{item[VersionId]}"},
            ),
            Parts(
                listing="list_objects_v2",
                path="Contents[].Key",
                deletion="delete_object",
                params={"Key": "{item}"},
            ),
        ],
    ),
    ResourceKind(service="sqs", listing="list_queues", path="QueueUrls", deletion="delete_queue", key="QueueUrl"),
    ResourceKind(
        service="sns", listing="list_topics", path="Topics[].TopicArn", deletion="delete_topic", key="TopicArn"
    ),
    ResourceKind(
        service="ssm", listing="describe_parameters", path="Parameters[].Name", deletion="delete_parameter", key="Name"
    ),
    ResourceKind(
        service="secretsmanager",
        listing="list_secrets",
        path="SecretList[].Name",
        deletion="delete_secret",
        key="SecretId",
        options={"ForceDeleteWithoutRecovery": True},
    ),
    ResourceKind(
        service="dynamodb", listing="list_tables", path="TableNames", deletion="delete_table", key="TableName"
    ),
    ResourceKind(
        service="logs",
        listing="describe_log_groups",
        path="logGroups[].logGroupName",
        deletion="delete_log_group",
        key="logGroupName",
    ),
    ResourceKind(
        service="lambda",
        listing="list_event_source_mappings",
        path="EventSourceMappings[].UUID",
        deletion="delete_event_source_mapping",
        key="UUID",
    ),
    ResourceKind(
        service="lambda",
        listing="list_functions",
        path="Functions[].FunctionName",
        deletion="delete_function",
        key="FunctionName",
    ),
    ResourceKind(
        service="events",
        listing="list_rules",
        path="Rules[].Name",
        deletion="delete_rule",
        key="Name",
        part_key="Rule",
        parts=[
            Parts(
                listing="list_targets_by_rule",
                path="Targets[].Id",
                deletion="remove_targets",
                params={"Ids": ["{item}"]},
            )
        ],
    ),
    ResourceKind(
        service="cloudwatch",
        listing="describe_alarms",
        path="MetricAlarms[].AlarmName",
        deletion="delete_alarms",
        key="AlarmNames",
    ),
    ResourceKind(
        service="kinesis", listing="list_streams", path="StreamNames", deletion="delete_stream", key="StreamName"
    ),
    ResourceKind(
        service="kms", listing="list_aliases", path="Aliases[].AliasName", deletion="delete_alias", key="AliasName"
    ),
    ResourceKind(
        service="kms",
        listing="list_keys",
        path="Keys[].KeyId",
        deletion="schedule_key_deletion",
        key="KeyId",
        options={"PendingWindowInDays": 7},
    ),
    ResourceKind(
        service="ecr",
        listing="describe_repositories",
        path="repositories[].repositoryName",
        deletion="delete_repository",
        key="repositoryName",
        options={"force": True},
    ),
    ResourceKind(
        service="stepfunctions",
        listing="list_state_machines",
        path="stateMachines[].stateMachineArn",
        deletion="delete_state_machine",
        key="stateMachineArn",
    ),
    ResourceKind(
        service="iam",
        listing="list_instance_profiles",
        path="InstanceProfiles[].InstanceProfileName",
        deletion="delete_instance_profile",
        key="InstanceProfileName",
        parts=[
            Parts(
                listing="get_instance_profile",
                path="InstanceProfile.Roles[].RoleName",
                deletion="remove_role_from_instance_profile",
                params={"RoleName": "{item}"},
            )
        ],
    ),
    ResourceKind(
        service="iam",
        listing="list_users",
        path="Users[].UserName",
        deletion="delete_user",
        key="UserName",
        parts=[
            Parts(
                listing="list_access_keys",
                path="AccessKeyMetadata[].AccessKeyId",
                deletion="delete_access_key",
                params={"AccessKeyId": "{item}"},
            ),
            Parts(
                listing="list_groups_for_user",
                path="Groups[].GroupName",
                deletion="remove_user_from_group",
                params={"GroupName": "{item}"},
            ),
            *_policies("user"),
        ],
    ),
    ResourceKind(
        service="iam",
        listing="list_groups",
        path="Groups[].GroupName",
        deletion="delete_group",
        key="GroupName",
        parts=[
            Parts(
                listing="get_group",
                path="Users[].UserName",
                deletion="remove_user_from_group",
                params={"UserName": "{item}"},
            ),
            *_policies("group"),
        ],
    ),
    ResourceKind(
        service="iam",
        listing="list_roles",
        path="Roles[].RoleName",
        deletion="delete_role",
        key="RoleName",
        parts=_policies("role"),
    ),
    ResourceKind(
        service="iam",
        listing="list_policies",
        path="Policies[].Arn",
        deletion="delete_policy",
        key="PolicyArn",
        filters={"Scope": "Local"},
    ),
)
SERVICES = frozenset(kind.service for kind in KINDS)
