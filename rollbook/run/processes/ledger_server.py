"""The ledger process: store, service, server. No torch in here."""

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.admission import RunId
from rollbook.ledger.hot_path import answering
from rollbook.ledger.server import build_app
from rollbook.ledger.service import open_ledger
from rollbook.run.child import RoleContext
from rollbook.run.serving import BACKLOG, DRAIN_S, url_of


async def main(context: RoleContext) -> str:
    config = context.loaded.config
    settings = config.gate.settings(max_steps=config.trainer.max_steps, keep_payloads=config.ledger.keep_payloads)
    async with open_ledger(
        config.ledger, directory=context.directory.ledger, clock=SystemClock(), log=context.log
    ) as ledger:
        await ledger.create_run(RunId(config.run.name), settings)
        sock = context.listening()
        async with answering(build_app(ledger, config.ledger), sock, drain_s=DRAIN_S, backlog=BACKLOG):
            context.log.info("ledger.serving", url=url_of(sock))
            context.channel.ready("serving")
            await context.draining.wait()
    return "stopped"
