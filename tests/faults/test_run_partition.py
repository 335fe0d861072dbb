"""The machine of a run is cut off and replaced by another. When it returns, ledger and policy servers refuse its trainer.

The ledger service and a policy server run on a third machine. The machines share the run directory, but not its lock, as on a
network file system without locks.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollbook.access.tokens import read_token
from rollbook.contracts.batch import EndOfRun
from rollbook.contracts.policy import Publication, PublicationId
from rollbook.ledger.http.verb import Verb
from rollbook.ledger.http.verbs import VERBS, Acknowledge, Batch, Checkpointed, Confirm, Finish, Register
from rollbook.run.directory import RunDirectory
from tests.parts.run.network import Machine, machines
from tests.parts.run.small import REPOSITORY, SmallRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LEDGER_PORT = 8000
BOOT_ID = "/proc/sys/kernel/random/boot_id"
STEPS = 3
"""That are trained before the machine is cut off, by its successor, and after its return."""
# Runs on one of the machines. Sends each request and prints its status.
SEND = """
import json, sys, urllib.request
for method, url, token, body in json.load(sys.stdin):
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=60) as reply:
            print(json.dumps([url, reply.status, json.load(reply)]))
    except urllib.error.HTTPError as error:
        print(json.dumps([url, error.code, json.load(error)]))
"""


@pytest.fixture
def nodes() -> Iterator[Sequence[Machine]]:
    with machines(3) as made:
        yield made


@contextmanager
def program(machine: Machine, output: Path, *arguments: str) -> Iterator[None]:
    command = machine.command(sys.executable, "-m", "rollbook", *arguments)
    with output.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=REPOSITORY)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def send(machine: Machine, *requests: tuple[str, str, str, Any]) -> list[tuple[str, int, Any]]:
    """Send requests from a machine: method, URL, token and body. Returns URL, status and reply of each."""
    sent = subprocess.run(
        machine.command(sys.executable, "-c", SEND),
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=False,
    )
    assert sent.returncode == 0, sent.stdout + sent.stderr
    return [tuple(json.loads(line)) for line in sent.stdout.splitlines()]


def run_on(machine: Machine, directory: Path, ledger: Machine) -> SmallRun:
    settings = [
        f'ledger.url="http://{ledger.address}:{LEDGER_PORT}"',
        'ledger.token_file="ledger-token"',
        f'cluster.host="{machine.address}"',
        "cluster.allow_join=true",
        "trainer.max_steps=10_000",
    ]
    run = SmallRun(directory, settings)
    run.machine = machine
    run.outputs = directory / machine.address
    run.outputs.mkdir()
    return run


def separate(machine: Machine, directory: Path, run: SmallRun) -> None:
    """Give a machine its own lock of the run directory and its own identity."""
    for name, path in (("lock", str(RunDirectory(run.directory).lock_file)), ("boot-id", BOOT_ID)):
        own = directory / machine.address / name
        own.write_text(f"{name} of {machine.address}", encoding="ascii")
        subprocess.run(machine.command("mount", "--bind", str(own), path), check=True)


def require_refused(machine: Machine, directory: RunDirectory, ledger: str, token: str, status: dict[str, Any]) -> None:
    """Every request of the trainer of this status, sent from its machine, is refused as outdated."""
    step, epoch = status["acknowledged_step"], status["epoch"]
    publication = Publication(id=PublicationId(1_000_000), epoch=epoch, step=step, digest="f" * 32)
    requests: list[Verb[Any]] = [
        Batch(step=step + 1, epoch=epoch, wait_s=0.0),
        Acknowledge(step=step, epoch=epoch, weights_digest="f" * 32),
        Register(step=step, epoch=epoch, weights_digest="f" * 32),
        Confirm(publication=publication, epoch=epoch),
        Checkpointed(step=step, epoch=epoch, oldest_kept=0),
        Finish(reason=EndOfRun.STOPPED, epoch=epoch),
    ]
    assert {type(request) for request in requests} == {
        verb.request for verb in VERBS if "epoch" in verb.request.__struct_fields__
    }
    urls = [f"{ledger}/{request.declaration.path.removeprefix('/v1/runs/{run}/')}" for request in requests]
    replies = send(
        machine, *(("POST", url, token, msgspec.to_builtins(r)) for url, r in zip(urls, requests, strict=True))
    )
    assert [(url, code) for url, code, _ in replies] == [(url, 409) for url in urls], replies

    members = send(machine, ("GET", f"{ledger}/members", token, None))[0][2]
    own = json.loads(directory.addresses_file.read_text(encoding="utf-8"))["policy"].split(",")
    servers = [*own, *(member["address"] for member in members if member["role"] == "policy")]
    assert len(servers) == 2
    update = {"publication": publication.id, "step": step, "epoch": epoch, "digest": "f" * 32, "path": "/nowhere"}
    key = read_token(directory.token_file)
    replies = send(machine, *(("POST", f"{url}/update_weights", key, {"update_info": update}) for url in servers))
    assert [(code, reply["error"]["type"]) for _, code, reply in replies] == [(409, "outdated_update")] * 2, replies


def test_a_trainer_that_was_cut_off_and_replaced_is_refused_everywhere_when_it_returns(
    nodes: Sequence[Machine], tmp_path: Path
) -> None:
    first, second, third = nodes
    run, successor = (run_on(machine, tmp_path, third) for machine in (first, second))
    ledger, token_file = f"http://{third.address}:{LEDGER_PORT}/v1/runs/small", tmp_path / "ledger-token"
    serve = ["--store", f"sqlite:///{tmp_path / 'ledger'}", "--host", third.address, "--port", str(LEDGER_PORT)]
    join = ["join", str(run.directory), "--role", "policy", "--host", third.address]
    try:
        with program(third, tmp_path / "ledger.out", "ledger", "serve", *serve, "--token-file", str(token_file)):
            run.start()
            run.until(lambda: run.step() >= STEPS, what="the first steps")
            separate(second, tmp_path, run)
            ((_, _, before),) = send(third, ("GET", f"{ledger}/status", read_token(token_file), None))

            first.set_link("down")
            successor.start()
            await_steps(successor)
            with program(third, tmp_path / "policy.out", *join):
                is_joined = lambda: "has joined" in (tmp_path / "policy.out").read_text()  # noqa: E731
                successor.until(is_joined, what="a policy server joined")
                await_steps(successor)

                first.set_link("up")
                ended = run.wait()
                assert (ended["exit_code"], ended["end"]) == (1, "failed"), ended
                assert "lost the run" in ended["stderr"] or "took over" in ended["stderr"], ended["stderr"]
                require_refused(first, RunDirectory(run.directory), ledger, read_token(token_file), before)
                await_steps(successor)
            successor.process.terminate()
            assert successor.wait()["exit_code"] in (0, 130)
            audit = json.loads(rollbook_on(third, "audit", str(run.directory), "--json").stdout)
            assert audit["ok"], audit["violations"]
            assert audit["max_lag"] <= audit["max_head_offpolicy_versions"]
            replayed = rollbook_on(third, "replay", str(run.directory), "--verify")
            assert replayed.returncode == 0, replayed.stderr
    finally:
        run.stop()
        successor.stop()


def await_steps(run: SmallRun) -> None:
    """Steps that are trained from now on."""
    step = run.step()
    run.until(lambda: run.step() >= step + STEPS, what=f"{STEPS} steps after step {step}")


def rollbook_on(machine: Machine, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = machine.command(sys.executable, "-m", "rollbook", *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
