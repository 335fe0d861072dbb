"""A real account as the cloud of an environment. What an episode makes is removed after it, and nothing else.

An object is removed if it did not exist before the episode first changed its service, and a changing command of the episode named
it or printed its id. Other objects stay, even those that appear meanwhile. Changes to older objects are not undone.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jmespath  # type: ignore[import-untyped]  # the package ships no types

from rollbook.contracts.errors import RunError
from rollbook.envs.builtin.awscli.cloud.backend import CREDENTIALS, worker_settings
from rollbook.envs.builtin.awscli.cloud.removal import KINDS, PAGES, SERVICES, Parts, ResourceKind
from rollbook.envs.builtin.awscli.cloud.worker import ApiAnswer, ApiCall, AwsWorker, CommandResult
from rollbook.envs.builtin.awscli.commands import GLOBAL_OPTIONS, Command, CommandVerb, matching_options, positionals
from rollbook.envs.builtin.awscli.config import AwsCliConfig
from rollbook.sandbox.sandbox import SandboxDiedError
from rollbook.telemetry.events import EventLog

SANDBOX_MARK = "/rollbook/sandbox"
"""A parameter of the account whose value is the account number: its owner allows agents to change it."""
REFUSED = 254
Place = tuple[str, str | None]
"""A service in a region; None is the default region."""
Inventory = dict[tuple[ResourceKind, str | None], set[str]]


class AccountCloud:
    """The confirmed account, marked as a sandbox. Satisfies `Backend`."""

    def __init__(self, worker: AwsWorker, account: str, *, log: EventLog) -> None:
        self._worker = worker
        self._log = log
        self.name = f"aws:{account}"
        self._before: Inventory = {}
        self._changed: set[Place] = set()
        self._texts: list[str] = []
        """Command lines and outputs of the changing commands since the last clean-up."""

    @classmethod
    async def start(cls, config: AwsCliConfig, *, log: EventLog) -> "AccountCloud":
        """Raises `RunError`, before anything is changed, unless the account is the confirmed one and is marked as a sandbox."""
        credentials = {name: os.environ[name] for name in CREDENTIALS if name in os.environ}
        if "AWS_ACCESS_KEY_ID" not in credentials:
            raise RunError(f"backend `aws` needs credentials in the environment variables {', '.join(CREDENTIALS)}")
        endpoint = os.environ.get("AWS_ENDPOINT_URL")
        worker = await AwsWorker.start(
            worker_settings(config, name="aws-account", endpoint=endpoint, extra=credentials)
        )
        try:
            account = await _checked_account(worker, config)
        except BaseException:
            await worker.stop()
            raise
        return cls(worker, account, log=log)

    @property
    def scratch(self) -> Path:
        return self._worker.scratch

    async def run(self, argv: Sequence[str]) -> CommandResult:
        if Command(verb=CommandVerb.AWS, text="", argv=tuple(argv)).is_read_only:
            return await self._worker.run(argv)
        place = _place(argv)
        if place[0] not in SERVICES:
            return CommandResult(
                rc=REFUSED,
                stdout="",
                stderr=f"{place[0] or 'this command'}: changes are not allowed on a real account, because they could not be "
                f"removed afterwards; allowed: {', '.join(sorted(SERVICES))}",
            )
        if place not in self._changed:
            self._before |= await self._inventory(place)
            self._changed.add(place)
        self._texts.append(" ".join(argv))  # before it runs: a command that is cancelled may have made its object
        result = await self._worker.run(argv)
        self._texts.append(result.stdout)
        return result

    async def call_api(self, calls: Sequence[ApiCall]) -> list[ApiAnswer]:
        return await self._worker.call_api(calls)

    async def clean(self) -> None:
        """Remove what the episode made, and local files. Raises `RunError` with what could not be removed."""
        await self._worker.restart_if_dead()  # a cancelled command has killed it
        await self._worker.clean()
        text, places = "\n".join(self._texts), sorted(self._changed, key=str)
        left: list[str] = []
        found: Inventory = {}
        for place in places:
            found |= await self._inventory(place)
        for kind in KINDS:
            for region in {region for service, region in places if service == kind.service}:
                new = found[kind, region] - self._before[kind, region]
                for name in sorted(name for name in new if _is_named(name, text)):
                    left += await self._remove(kind, name, region)
        if left:
            raise RunError(f"{self.name}: these objects of an episode must be removed manually: {'; '.join(left)}")
        self._before, self._changed, self._texts = {}, set(), []

    async def remove(self) -> None:
        try:
            await self.clean()
        finally:
            await self._worker.stop()

    async def _inventory(self, place: Place) -> Inventory:
        service, region = place
        return {(kind, region): await self._listed(kind, region) for kind in KINDS if kind.service == service}

    async def _listed(self, kind: ResourceKind, region: str | None) -> set[str]:
        names: set[str] = set()
        page: dict[str, Any] = {}
        while True:
            result = await self._call(kind.list_call(region, page))
            names |= set(jmespath.search(kind.path, result) or ())
            page = {PAGES[name]: result[name] for name in PAGES if result.get(name)}
            if not page:
                return names

    async def _remove(self, kind: ResourceKind, name: str, region: str | None) -> list[str]:
        """Delete an object with its parts. Returns the problem, if there is one."""
        try:
            for parts in kind.parts:
                deleted: Any = None
                # Each pass deletes a page. One that deletes nothing ends the loop; then the object cannot be deleted either.
                while (items := await self._parts(kind, parts, name, region)) and items != deleted:
                    for item in items:
                        await self._call(kind.delete_part_call(parts, name, item, region))
                    deleted = items
            await self._call(kind.delete_call(name, region))
        except RunError as error:
            return [f"{kind.service} {name} ({error})"]
        self._log.info("env.account_object_removed", account=self.name, service=kind.service, object=name)
        return []

    async def _parts(self, kind: ResourceKind, parts: Parts, name: str, region: str | None) -> Any:
        return jmespath.search(parts.path, await self._call(kind.parts_call(parts, name, region)))

    async def _call(self, call: ApiCall) -> Mapping[str, Any]:
        (answer,) = await self._worker.call_api([call])
        if answer.code is not None:
            raise RunError(f"{call.service} {call.operation}: {answer.message}")
        return answer.result or {}


def _place(argv: Sequence[str]) -> Place:
    region = None
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if "--region" in matching_options(word, GLOBAL_OPTIONS):
            region = word.partition("=")[2] or following
    service = next(iter(positionals(argv)), "")
    return ("s3" if service == "s3api" else service), region


def _is_named(name: str, text: str) -> bool:
    """Whether a command named the object, or printed its id. Of a URL or an ARN, the last part counts."""
    short = re.split(r"[/:]", name.strip("/"))[-1]
    return any(re.search(rf"(?<![\w.-]){re.escape(part)}(?![\w-])", text) is not None for part in {name, short} if part)


async def _checked_account(worker: AwsWorker, config: AwsCliConfig) -> str:
    calls = [
        ApiCall(service="sts", operation="get_caller_identity"),
        ApiCall(service="ssm", operation="get_parameter", params={"Name": SANDBOX_MARK}),
    ]
    try:
        identity, mark = await worker.call_api(calls)
    except SandboxDiedError as error:
        raise RunError(
            f"backend `aws`: get-caller-identity failed, so nothing was changed in the account: {error}"
        ) from error
    found = (identity.result or {}).get("Account")
    if found != config.confirm_account:
        raise RunError(
            f"the credentials belong to account {found or 'unknown'}, but confirm_account is {config.confirm_account}; "
            f"nothing was changed. {identity.message}"
        )
    if ((mark.result or {}).get("Parameter") or {}).get("Value") != found:
        raise RunError(
            f"account {found} is not marked as a sandbox, so nothing was changed. If agents may change and delete things in it, "
            f"mark it: aws ssm put-parameter --type String --region {config.region} --name {SANDBOX_MARK} --value {found}"
        )
    return str(found)
