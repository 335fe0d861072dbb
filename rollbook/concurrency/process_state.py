"""What the kernel says about a process that says nothing itself."""

from pathlib import Path

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}


def process_state(pid: int | None) -> str:
    """`stopped by a signal`, `running`, … `unknown` where the kernel does not tell (it is Linux's own)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown"
    # The name in brackets may itself hold brackets and blanks.
    letter = text.rpartition(")")[2].split()[:1]
    return STATES.get(letter[0], letter[0]) if letter else "unknown"
