"""Draws the plots after a run. A separate process, so that a failure does not affect the run."""

import asyncio

from rollbook.dashboard.plots import draw_plots
from rollbook.run.supervision.child_main import RoleContext


async def main(context: RoleContext) -> str:
    drawn = await asyncio.to_thread(
        draw_plots,
        context.directory.path,
        context.directory.plots,
        max_head_offpolicy_versions=context.loaded.config.gate.max_head_offpolicy_versions,
    )
    return f"{len(drawn)} plots"
