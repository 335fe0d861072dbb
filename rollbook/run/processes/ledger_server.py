"""The ledger process of a run. It must not import torch."""

import asyncio

from rollbook.access.server import DRAIN_S
from rollbook.concurrency.sockets import url_of
from rollbook.contracts.admission import RunId
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.feed import posts_run
from rollbook.ledger.atropos.routes import atropos_dialect
from rollbook.ledger.serve import open_ledger_service
from rollbook.ledger.stores.registry import store_warnings
from rollbook.run.ledger_clients import ledger_keys, run_settings, store_url
from rollbook.run.supervision.child_main import RoleContext

STORE_WAIT_S = 10.0
"""The ledger process of a killed run ends within seconds, and an action on a stopped run uses the store for a moment."""


async def main(context: RoleContext) -> str:
    config, sock = context.loaded.config, context.listening()
    settings = run_settings(config, context.directory)
    dialects = []
    if config.tasks.is_posted and config.tasks.atropos.url is None:
        posts = AtroposConfig(run=posts_run(config.run.name))
        dialects.append(atropos_dialect(posts, trainable=settings.limits))
    url = store_url(config.ledger, context.directory)
    async with open_ledger_service(
        url,
        config.ledger,
        log=context.log,
        keys=ledger_keys(config, context.directory),
        dialects=dialects,
        wait_s=STORE_WAIT_S,
        run_directory=context.directory.path,
    ) as service:
        for warning in await asyncio.to_thread(store_warnings, url):
            context.log.warning("ledger.store", warning=warning)
        await service.ledger.create_run(RunId(config.run.name), settings)
        async with service.serving(sock, drain_s=DRAIN_S):
            context.log.info("ledger.serving", url=url_of(sock))
            context.channel.ready("serving")
            await context.draining.wait()
    return "stopped"
