"""The ledger process: store, service, server. No torch in here."""

from rollbook.concurrency.clock import SystemClock
from rollbook.contracts.admission import RunId
from rollbook.ledger.server import build_app
from rollbook.ledger.service import open_ledger
from rollbook.run.child import RoleContext
from rollbook.run.serving import serving


async def main(context: RoleContext) -> str:
    config = context.loaded.config
    settings = config.gate.settings(max_steps=config.trainer.max_steps, keep_payloads=config.ledger.keep_payloads)
    async with open_ledger(
        config.ledger, directory=context.directory.ledger, clock=SystemClock(), log=context.log
    ) as ledger:
        await ledger.create_run(RunId(config.run.name), settings)
        async with serving(build_app(ledger, config.ledger), context.listening()) as url:
            context.log.info("ledger.serving", url=url)
            context.channel.ready("serving")
            await context.draining.wait()
    return "stopped"
