"""The system calls that code in a sandbox may not make, as a program for the kernel's filter (seccomp, classic BPF).

A list of refusals, not of permissions: ordinary programs run unchanged. Refused is what could reach the kernel outside the sandbox
(modules, mounts, namespaces, keys, tracing), what could disturb process 1 of the sandbox (see `guest.py`), and memory that does not
belong to a process and so would escape the limits.
"""

import errno
import platform
import struct

# Offsets in struct seccomp_data.
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
X32_CALLS = 0x40000000
NEW_NAMESPACES = 0x7E020000
"""The flags of `clone` that create namespaces: mount, cgroup, host name, IPC, user, process, network."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
"""Terminal requests that type input for other processes."""

# Architecture of the kernel's header audit.h, then the number of each call: x86-64, 64-bit ARM.
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
MISSING = {"clone3": (435, 435), "memfd_create": (319, 279)}
"""Reported as not implemented, so that programs use the older call. The arguments of `clone3` cannot be filtered."""
OWN_PROCESS_ONLY = {
    "prlimit64": ((302, 261), 0),
    "sched_setattr": ((314, 274), 0),
    "sched_setparam": ((142, 118), 0),
    "sched_setscheduler": ((144, 119), 0),
    "setpriority": ((141, 140), 1),
}
"""Refused unless the argument with this index, the process, is 0: the caller itself."""
CLONE, IOCTL = (56, 220), (16, 29)


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """The filter for a machine (`platform.machine()`). None: its system calls are not listed here, and there is no filter."""
    known = ARCHITECTURES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, column = known
    fail = _step(RETURN, FAIL | errno.EPERM)
    program = [
        _step(LOAD, ARCHITECTURE),
        _step(EQUAL, architecture, if_true=1),
        _step(RETURN, KILL),
        _step(LOAD, NUMBER),
        _step(AT_LEAST, X32_CALLS, if_false=1),
        _step(RETURN, KILL),
    ]
    for numbers in REFUSED.values():
        program += [_step(EQUAL, numbers[column], if_false=1), fail]
    for numbers in MISSING.values():
        program += [_step(EQUAL, numbers[column], if_false=1), _step(RETURN, FAIL | errno.ENOSYS)]
    for numbers, index in OWN_PROCESS_ONLY.values():
        program += _with_argument(numbers[column], index, [_step(EQUAL, 0, if_true=1), fail])
    program += _with_argument(CLONE[column], 0, [_step(HAS_BITS, NEW_NAMESPACES, if_false=1), fail])
    refused_requests = [_step(EQUAL, TIOCSTI, if_true=1), _step(EQUAL, TIOCLINUX, if_false=1), fail]
    program += _with_argument(IOCTL[column], 1, refused_requests)
    program.append(_step(RETURN, ALLOW))
    return b"".join(program)


def _with_argument(number: int, index: int, checks: list[bytes]) -> list[bytes]:
    """Checks of one argument of a call, by its low 32 bits."""
    body = [_step(LOAD, ARGUMENTS + 8 * index), *checks, _step(RETURN, ALLOW)]
    return [_step(EQUAL, number, if_false=len(body)), *body]


def _step(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction. A comparison skips the next `if_true` or `if_false` instructions."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
