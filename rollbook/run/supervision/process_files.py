"""The files of the run directory that describe a running supervisor: `addresses.json` and `processes.json`.

A supervisor that was cut off and replaced by one on another machine leaves them alone: they describe its successor.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence

from rollbook.contracts.admission import Member
from rollbook.run.directory import RunDirectory, write_json
from rollbook.run.supervision.process import SupervisedProcess


class ProcessFiles:
    def __init__(self, directory: RunDirectory, addresses: Mapping[str, str]) -> None:
        self._directory = directory
        self._addresses = dict(addresses)

    def write_addresses(self) -> None:
        """For members, and for programs outside of the run, such as Atropos environments."""
        write_json(self._directory.addresses_file, self._addresses)

    def remove_addresses(self) -> None:
        with contextlib.suppress(OSError):  # a disk that cannot be written must not hide why the run ended
            if not self._is_replaced():
                self._directory.addresses_file.unlink(missing_ok=True)

    def write_processes(
        self, processes: Sequence[SupervisedProcess], members: Sequence[Member], *, template: int | None
    ) -> None:
        """`template`: the pid of the process template."""
        rows = {
            p.name: {"pid": p.pid, "state": p.state, "restarts": p.restarts, "ready": p.ready.is_set()}
            for p in processes
        }
        joined = {
            member.name: {
                "role": member.role,
                "node": member.node,
                "address": member.address,
                "in_service": member.in_service,
                "publication": member.publication,
                "load": member.load,
            }
            for member in members
            if member.name not in rows
        }
        found = {"supervisor": os.getpid(), "template": template, "processes": rows, "members": joined}
        with contextlib.suppress(OSError):
            if not self._is_replaced():
                write_json(self._directory.processes_file, found)

    def _is_replaced(self) -> bool:
        """Whether another supervisor has written its addresses since."""
        try:
            text = self._directory.addresses_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return False
        return bool(json.loads(text) != self._addresses)
