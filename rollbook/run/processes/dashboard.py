"""The dashboard of a live run. It reads files, and actions go to the ledger, so the run does not notice if it fails."""

from contextlib import AsyncExitStack

from rollbook.access.server import serve_app
from rollbook.access.tokens import read_token
from rollbook.dashboard.server.access import DashboardAccess
from rollbook.dashboard.server.app import build_app
from rollbook.dashboard.server.runs import open_runs
from rollbook.run.catalog import open_catalog
from rollbook.run.supervision.child_main import RoleContext


async def main(context: RoleContext) -> str:
    async with AsyncExitStack() as stack:
        token_file = context.directory.operator_token_file
        operator = read_token(token_file) if token_file.exists() else None
        catalog = open_catalog(str(context.directory.path))
        runs = await stack.enter_async_context(open_runs(catalog, allows_actions=operator is not None))
        app = build_app(runs, DashboardAccess(operator=operator))
        url = await stack.enter_async_context(serve_app(app, context.listening()))
        context.channel.ready(f"serving {url}")
        await context.draining.wait()
    return "stopped"
