"""The ledger process: store, service, server. No torch in here."""

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.admission import RunId
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.routes import add_atropos
from rollbook.ledger.http.fast_path import answering
from rollbook.ledger.http.handlers import build_app
from rollbook.ledger.service import open_ledger
from rollbook.ledger.stores.sqlite.store import open_sqlite_store
from rollbook.run.atropos_feed import posts_run
from rollbook.run.supervision.child_main import RoleContext
from rollbook.run.supervision.sockets import BACKLOG, DRAIN_S, url_of


async def main(context: RoleContext) -> str:
    config, clock = context.loaded.config, SystemClock()
    settings = config.gate.settings(max_steps=config.trainer.max_steps, keep_payloads=config.ledger.keep_payloads)
    async with (
        open_sqlite_store(context.directory.ledger, durability=config.ledger.durability) as store,
        open_ledger(store, config.ledger, clock=clock, log=context.log) as ledger,
    ):
        await ledger.create_run(RunId(config.run.name), settings)
        app = build_app(ledger, config.ledger)
        if config.tasks.is_posted and config.tasks.atropos.url is None:
            root = AtroposConfig(run=posts_run(config.run.name))
            add_atropos(app, store=store, config=root, limits=config.ledger, clock=clock, log=context.log)
        sock = context.listening()
        async with answering(app, sock, drain_s=DRAIN_S, backlog=BACKLOG):
            context.log.info("ledger.serving", url=url_of(sock))
            context.channel.ready("serving")
            await context.draining.wait()
    return "stopped"
