"""The ledger process of a run. It must not import torch."""

import json
from pathlib import Path
from typing import Any

from rollbook.access.server import DRAIN_S
from rollbook.concurrency.sockets import url_of
from rollbook.contracts.admission import RunId
from rollbook.contracts.group_checks import TrainingLimits
from rollbook.ledger.atropos.config import AtroposConfig
from rollbook.ledger.atropos.routes import atropos_dialect
from rollbook.ledger.http.auth import steering_keys
from rollbook.ledger.serve import open_ledger_service
from rollbook.ledger.stores.registry import sqlite_url
from rollbook.run.atropos_feed import posts_run
from rollbook.run.supervision.child_main import RoleContext

POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
"""Names of the longest sequence in the `config.json` of models."""


async def main(context: RoleContext) -> str:
    config, sock = context.loaded.config, context.listening()
    settings = config.ledger_settings(
        model_limits(context.directory.initial_model, needs_logprobs=config.trainer.missing_logprobs == "refuse")
    )
    dialects = []
    if config.tasks.is_posted and config.tasks.atropos.url is None:
        posts = AtroposConfig(run=posts_run(config.run.name))
        dialects.append(atropos_dialect(posts, trainable=settings.limits))
    store_url = sqlite_url(context.directory.ledger)
    async with open_ledger_service(
        store_url, config.ledger, log=context.log, keys=steering_keys(context.token), dialects=dialects
    ) as service:
        await service.ledger.create_run(RunId(config.run.name), settings)
        async with service.serving(sock, drain_s=DRAIN_S):
            context.log.info("ledger.serving", url=url_of(sock))
            context.channel.ready("serving")
            await context.draining.wait()
    return "stopped"


def model_limits(model_dir: Path, *, needs_logprobs: bool) -> TrainingLimits:
    """The limits of the model in a Hugging Face directory, or of the base model of an adapter directory."""
    settings = _read_json(model_dir / "config.json")
    if not settings:
        base = _read_json(model_dir / "adapter_config.json").get("base_model_name_or_path")
        settings = _read_json(Path(base) / "config.json") if base else {}
    settings = settings.get("text_config") or settings
    lengths = [settings[name] for name in POSITIONS if settings.get(name)]
    return TrainingLimits(
        vocabulary_size=settings.get("vocab_size"),
        max_tokens=lengths[0] if lengths else None,
        needs_logprobs=needs_logprobs,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """An empty dict if there is no such file: a model on the hub is checked by the trainer alone."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    except FileNotFoundError:
        return {}
