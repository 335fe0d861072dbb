"""Measures how well generation and training overlap: the same work with staleness bounds 0 and 2, compared with the ideal time.

Generation and training are first timed alone. The environment's step sleeps for so long that both take equally long:

    training alone      the recorded batches of the synchronous run, trained again with nothing else running
    generation alone    the same processes without a trainer; a stand-in takes each batch and publishes at once

The ideal time of an asynchronous run is the longer of the two; a synchronous run takes their sum. Times are measured from the
start of the first group to the end of the last step: they exclude start-up and include filling and draining the pipeline.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.report import Figure, print_figures, print_status
from rollbook.access.tokens import read_token
from rollbook.concurrency.sockets import listening_socket, url_of
from rollbook.contracts.admission import RunId
from rollbook.contracts.batch import EndOfRun
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.ledger.client.client import open_ledger_client
from rollbook.run.config.run import load_config
from rollbook.run.directory import RunDirectory
from rollbook.run.reader import open_run
from rollbook.run.supervision.host import ProcessStart
from rollbook.run.supervision.process import SupervisedProcess
from rollbook.run.supervision.supervisor import RunEnd, Supervisor
from rollbook.telemetry.events import EventLog
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.model.weights import digest_of, write_weights

PROMPT_TOKENS = 200
FLOOR = 0.9


def config_table(*, steps: int, step_s: float, max_head_offpolicy_versions: int) -> dict[str, Any]:
    """Episodes that mostly wait, and long sequences, so that training a step takes a while."""
    return {
        "run": {"name": "overlap", "seed": 1},
        "model": {
            "build": {
                "hidden_size": 128,
                "layers": 2,
                "heads": 4,
                "kv_heads": 4,
                "intermediate_size": 352,
                "max_position_embeddings": 256,
                "vocabulary": [*(str(n) for n in range(16)), "higher", "lower", "correct", "invalid"],
            }
        },
        "tasks": {"source": "overlap_rollout:tasks", "args": {"count": 64}},
        "env": {"name": "delayed_number_guessing", "args": {"max_turns": 1, "step_s": step_s}},
        "rollout": {
            "function": "overlap_rollout",
            "settings": {"prompt_tokens": PROMPT_TOKENS},
            "completions_per_prompt": 8,
            "max_seconds": 60.0,
            "drop_constant_reward": False,
            "sampling": {"max_tokens": 4},
        },
        # As many groups in flight as a step has, so that both modes generate at the same rate.
        "gate": {
            "groups_per_step": 4,
            "max_groups_in_flight": 4,
            "max_head_offpolicy_versions": max_head_offpolicy_versions,
        },
        "ledger": {"durability": "process_crash"},
        # A learning rate that hardly changes the policy, so that every step is the same work.
        "trainer": {"max_steps": steps, "lr": 1e-7, "checkpoint_every": 1000, "threads": 1},
    }


class Bench:
    def __init__(self, home: Path) -> None:
        self.home = home
        shutil.copy(Path(__file__).with_name("overlap_rollout.py"), home)

    def directory(self, name: str, *, steps: int, step_s: float, max_head_offpolicy_versions: int) -> RunDirectory:
        table = config_table(steps=steps, step_s=step_s, max_head_offpolicy_versions=max_head_offpolicy_versions)
        source = self.home / f"{name}.toml"
        source.write_text(tomli_w.dumps(table), encoding="utf-8")
        load_config(source)
        directory = RunDirectory(self.home / name)
        directory.prepare()
        shutil.copy(source, directory.config_file)
        directory.write_manifest(name="overlap", source_dir=self.home)
        return directory

    async def whole_run(
        self, name: str, *, steps: int, step_s: float, max_head_offpolicy_versions: int
    ) -> tuple[RunDirectory, float]:
        directory = self.directory(
            name, steps=steps, step_s=step_s, max_head_offpolicy_versions=max_head_offpolicy_versions
        )
        config = load_config(directory.config_file, source_dir=self.home).config
        outcome = await Supervisor(
            config, directory, log=EventLog("supervisor", directory.log_file("supervisor"))
        ).run()
        if outcome.end is not RunEnd.FINISHED:
            raise SystemExit(f"{name}: {outcome.end}: {outcome.message}")
        return directory, wall_seconds(directory)

    async def generation_alone(self, *, steps: int, step_s: float) -> float:
        """Ledger, policy server and dispatcher as in a run, with a stand-in for the trainer that does not compute."""
        directory = self.directory("generation", steps=steps, step_s=step_s, max_head_offpolicy_versions=2)
        await Supervisor(
            load_config(directory.config_file, source_dir=self.home).config, directory, log=EventLog("prepare")
        ).run_once("prepare")
        sockets = {name: listening_socket("127.0.0.1", 0) for name in ("ledger", "policy")}
        urls = {name: url_of(sock) for name, sock in sockets.items()}
        processes = [
            SupervisedProcess(
                ProcessStart(
                    name=name,
                    role=name,
                    directory=directory,
                    addresses=urls,
                    listening=sockets.get(name),
                    environment={"OMP_NUM_THREADS": "1"},
                )
            )
            for name in ("ledger", "policy", "rollout")
        ]
        running = []
        try:
            for process in processes:
                running.append(asyncio.create_task(process.run()))
                await asyncio.wait_for(process.ready.wait(), 120)
            await run_stand_in(directory, urls, steps)
        finally:
            for process in reversed(processes):
                process.request_stop()
            await asyncio.wait(running, timeout=10)
            for process in processes:
                process.kill()
            for sock in sockets.values():
                sock.close()
        return wall_seconds(directory)

    def training_alone(self, recorded: RunDirectory, steps: int) -> float:
        with open_run(recorded.path) as run:
            learner = initial_learner(recorded.initial_model, run.config.trainer)
            batches = list(run.batches(steps))
        began = time.perf_counter()
        for batch in batches:
            learner.run(batch)
        return time.perf_counter() - began


async def run_stand_in(directory: RunDirectory, urls: dict[str, str], steps: int) -> None:
    """Take each batch, acknowledge it and publish the initial weights again: generation never waits for training."""
    with open_run(directory.path) as run:
        weights = dict(initial_learner(directory.initial_model, run.config.trainer).model.weights())
    digest = digest_of(weights)
    path = directory.weights / "initial.safetensors"
    write_weights(weights, path, digest=digest)
    log, token = EventLog("stand-in"), read_token(directory.token_file)
    async with (
        open_ledger_client(urls["ledger"], RunId("overlap"), request_s=60, log=log, token=token) as ledger,
        WeightTransferClient([urls["policy"]], request_s=60, api_key=token, log=log) as receiver,
    ):
        await ledger.take_role(restored_step=0)
        for step in range(steps + 1):
            if step:
                while (batch := await ledger.batch(step, wait_s=20)) is None:
                    pass
                assert not isinstance(batch, EndOfRun)
                await ledger.acknowledge(step, digest)
            publication = await ledger.register(step, digest)
            await receiver.receive(publication, str(path))
            await ledger.confirm(publication)
        await ledger.finish(EndOfRun.MAX_STEPS)


def wall_seconds(directory: RunDirectory) -> float:
    """From the start of the first group to the end of the last step."""
    with open_run(directory.path) as run:
        first = run.groups(limit=1)[0].opened_at
        return run.steps()[-1].at - first


async def measure(home: Path, steps: int) -> int:
    bench = Bench(home)
    print_status("calibrating the time of a training step and of an episode")
    trial, _ = await bench.whole_run("trial", steps=6, step_s=0.1, max_head_offpolicy_versions=0)
    train_s = bench.training_alone(trial, 6) / 6
    quick_s = await bench.generation_alone(steps=6, step_s=0.0) / 6
    step_s = max(0.0, train_s - quick_s)
    print_status(
        f"training {train_s:.3f} s a step, generation {quick_s:.3f} s a step without sleep; the environment sleeps {step_s:.3f} s"
    )
    sync_run, sync_s = await bench.whole_run("sync", steps=steps, step_s=step_s, max_head_offpolicy_versions=0)
    training_s = bench.training_alone(sync_run, steps)
    shutil.rmtree(bench.home / "generation")
    generation_s = await bench.generation_alone(steps=steps, step_s=step_s)
    async_run, async_s = await bench.whole_run("async", steps=steps, step_s=step_s, max_head_offpolicy_versions=2)
    with open_run(async_run.path) as run:
        audit = run.audit()
    ideal_s = max(training_s, generation_s)
    print_status(
        f"alone: training {training_s:.2f} s, generation {generation_s:.2f} s over {steps} steps; ideal {ideal_s:.2f} s"
    )
    print_status(
        f"staleness bound 0: {sync_s:.2f} s; staleness bound 2: {async_s:.2f} s; lag at most {audit.max_lag}; audit ok: {audit.ok}"
    )
    common = {"steps": steps, "training_alone_s": round(training_s, 3), "generation_alone_s": round(generation_s, 3)}
    figures = [
        Figure(
            name="overlap_of_ideal",
            ours=async_s,
            peer=ideal_s,
            unit="s",
            ratio=ideal_s / async_s,
            floor=FLOOR,
            more={**common, "max_lag": audit.max_lag, "audit_ok": audit.ok},
        ),
        Figure(name="async_over_sync", ours=async_s, peer=sync_s, unit="s", ratio=sync_s / async_s, more=common),
        Figure(
            name="sync_of_sum",
            ours=sync_s,
            peer=training_s + generation_s,
            unit="s",
            ratio=(training_s + generation_s) / sync_s,
            more=common,
        ),
    ]
    return print_figures(figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollbook-overlap-") as home:
        return asyncio.run(measure(Path(home), args.steps))


if __name__ == "__main__":
    sys.exit(main())
