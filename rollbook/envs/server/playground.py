"""A web page to play one environment by hand: `rollbook env play`. The page is a client of the same protocol.

Only for a pool of one environment: on a training server each visitor would occupy an environment that episodes need. The page's
sources are in `dashboard_page`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from rollbook.contracts.errors import RunError

PATH = "/web"
STATIC_PATH = "/static/"
STATIC = Path(__file__).parent / "static"
POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
DESCRIPTION_FIELDS = ("description", "goal", "question", "prompt")
MAX_TASKS = 2_000
"""A page with more rows is slow, and a person plays a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Playground:
    """What the page shows. An environment class offers tasks with a static method `example_tasks`."""

    name: str
    description: str = ""
    tasks: Sequence[Mapping[str, Any]] = ()
    max_steps: int | None = None
    step_s: float
    idle_s: float

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "description": self.description,
            "tasks": [_task_json(row) for row in self.tasks[:MAX_TASKS]],
            "num_tasks": len(self.tasks),
            "limits": {"max_steps": self.max_steps, "step_s": self.step_s, "idle_s": self.idle_s},
        }


def example_tasks(kind: object) -> Sequence[Mapping[str, Any]]:
    """The rows that an environment class offers for playing; none if it offers nothing."""
    offer = getattr(kind, "example_tasks", None)
    return tuple(offer()) if callable(offer) else ()


def mount_playground(app: web.Application, page: Playground, *, capacity: int) -> None:
    if capacity > 1:
        raise RunError(
            f"the playground needs a pool of one environment, but this server has {capacity} sessions; "
            "use a pool of 1, or disable the playground"
        )

    async def show(_: web.Request) -> web.Response:
        html = (STATIC / "playground.html").read_text()
        return web.Response(text=html, content_type="text/html", headers={"Content-Security-Policy": POLICY})

    async def tasks(_: web.Request) -> web.Response:
        return web.json_response(page.to_json(), dumps=lambda value: json.dumps(value, default=str))

    async def home(_: web.Request) -> web.Response:
        raise web.HTTPFound(PATH)

    app.router.add_get(PATH, show)
    app.router.add_get(f"{PATH}/tasks", tasks)
    app.router.add_get("/", home)
    app.router.add_static(STATIC_PATH, STATIC)


def _task_json(row: Mapping[str, Any]) -> dict[str, Any]:
    texts = (row[name] for name in DESCRIPTION_FIELDS if isinstance(row.get(name), str))
    tier = row.get("tier")
    return {
        "id": str(row.get("id", "")),
        "tier": None if tier is None else str(tier),
        "description": next(texts, ""),
        "task": dict(row),
    }
