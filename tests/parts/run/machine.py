"""A machine whose clock and disk a test controls while a run uses them. See the C file next to this one."""

import struct
import subprocess
from pathlib import Path
from unittest import SkipTest

SOURCE = Path(__file__).with_suffix(".c")
FAULTS = struct.Struct("=qq")


class Machine:
    """Pass `environment` to the processes. Changes take effect in running processes at once."""

    def __init__(self, directory: Path, *, watched: Path) -> None:
        """`watched`: writes below it fail while `write_error` is set. Raises `SkipTest` if there is no C compiler."""
        library = directory / "machine.so"
        try:
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"],
                check=True,
                capture_output=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise SkipTest(f"the library cannot be built here: {error}") from error
        self._file = directory / "machine-faults"
        self._values = [0, 0]
        self._write()
        self.environment = {
            "LD_PRELOAD": str(library),
            "MACHINE_FAULTS": str(self._file),
            "MACHINE_DIRECTORY": str(watched),
        }

    def set_clock(self, shift_s: int) -> None:
        """Shift the system's clock from now on."""
        self._values[0] = shift_s
        self._write()

    def set_write_error(self, number: int) -> None:
        """The `errno` of every write; 0: writes work again."""
        self._values[1] = number
        self._write()

    def _write(self) -> None:
        # Processes map this file, so it must be changed in place.
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(FAULTS.pack(*self._values))
