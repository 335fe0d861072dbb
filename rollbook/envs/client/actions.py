"""Turns what a policy writes into the action of an OpenEnv server, by the schema that the server publishes.

An action with one text field takes the text as it is; with one other field a value (`42`); every action a JSON object with its
fields. Text that cannot be read is a mistake of the agent: it gets an observation that says what is expected, and may try again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError, ClientSession

from rollbook.concurrency.deadline import Deadline, DeadlineExceededError
from rollbook.contracts.decoding import load_json
from rollbook.contracts.task import Observation
from rollbook.envs.client.session import EnvSession, RefusedActionError

IGNORED = "metadata"
"""Every action of the `openenv` package has it. It is not for the agent."""
KINDS: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}
SHOWN_CHARS = 300


class UnreadableActionError(ValueError):
    """The policy did not write an action. The message is for the policy."""


@dataclass(frozen=True, slots=True)
class ActionForm:
    """The fields of an action, with their JSON schemas."""

    fields: Mapping[str, Mapping[str, Any]]
    required: tuple[str, ...]

    @classmethod
    def of(cls, schema: object) -> "ActionForm | None":
        """None if the schema has no fields that could be filled."""
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(schema, Mapping) or not isinstance(properties, Mapping):
            return None
        fields = {
            str(name): field if isinstance(field, Mapping) else {}
            for name, field in properties.items()
            if name != IGNORED
        }
        required = schema.get("required")
        return cls(fields, tuple(str(name) for name in required or () if name in fields)) if fields else None

    def read(self, text: str) -> dict[str, Any]:
        """The fields of an action. Raises `UnreadableActionError`."""
        single = self._single
        if single is not None and self._kind(single) == "string":
            return {single: text}
        for part in (text, text[text.find("{") : text.rfind("}") + 1]):
            try:
                found = load_json(part.strip())
            except ValueError:
                continue
            if isinstance(found, dict):
                is_complete = set(self.required) <= found.keys() <= self.fields.keys()
                if is_complete and all(self._fits(name, value) for name, value in found.items()):
                    return found
            elif single is not None and self._fits(single, found):
                return {single: found}
        raise UnreadableActionError(f"This is not an action. {self.expected}")

    @property
    def expected(self) -> str:
        """For the policy."""
        names = [
            f"{name} ({self._kind(name) or 'any value'}{'' if name in self.required else ', optional'})"
            for name in self.fields
        ]
        single = "" if self._single is None else f"Write the value of {self._single}, or "
        return f"{single or 'Write '}a JSON object with {', '.join(names)}."

    @property
    def _single(self) -> str | None:
        """The only field that must be filled."""
        names = self.required or tuple(self.fields)
        return names[0] if len(names) == 1 else None

    def _kind(self, name: str) -> str:
        return str(self.fields[name].get("type", ""))

    def _fits(self, name: str, value: object) -> bool:
        kinds = KINDS.get(self._kind(name))
        return kinds is None or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)))


class TypedSession:
    """A session on a server whose actions have fields of their own, opened without a `task_field`. Satisfies `Environment`."""

    def __init__(self, session: EnvSession, form: ActionForm) -> None:
        self._session = session
        self._form = form

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        # Classes take the fields of the row as arguments, or the row as `task`.
        return await self._session.reset({"task": dict(task), **task})

    async def step(self, action: str) -> Observation:
        try:
            return await self._session.step(self._form.read(action))
        except UnreadableActionError as error:
            return Observation(text=str(error))
        except RefusedActionError as error:
            return Observation(text=f"{str(error)[:SHOWN_CHARS]}\n{self._form.expected}")

    async def close(self) -> None:
        await self._session.close()


async def read_form(http: ClientSession, url: str, path: str, *, deadline: Deadline) -> ActionForm | None:
    """None if the server publishes no schema of its actions."""
    try:
        async with deadline.limit(f"reading {url}{path}"), http.get(f"{url}{path}") as reply:
            if reply.status != 200:
                return None
            schema = load_json(await reply.text())
    except (ClientError, DeadlineExceededError, ValueError, OSError):
        return None
    return ActionForm.of(schema.get("action")) if isinstance(schema, Mapping) else None
