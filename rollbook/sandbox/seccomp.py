"""The system calls that code in a sandbox may not make, as a program for the kernel's filter (seccomp, classic BPF).

A list of refusals, not of permissions: ordinary programs run unchanged. Refused is what could reach the kernel outside the sandbox
(modules, mounts, namespaces, keys, tracing, other families of sockets), what could disturb process 1 of the sandbox (see
`guest.py`), memory that does not belong to a process and so would escape the limits, and what the kernel counts for the user of the
machine, so that code inside could exhaust it for all other processes (inotify).
"""

import errno
import platform
import struct
from collections.abc import Iterable, Mapping

# Offsets in struct seccomp_data.
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
AND = 0x54
ALLOW, KILL, FAIL, NOTIFY = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
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
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
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
MISSING = {
    "clone3": (435, 435),
    "inotify_init": (253, 26),  # 64-bit ARM has only the second
    "inotify_init1": (294, 26),
    "memfd_create": (319, 279),
}
"""Reported as not implemented, so that programs use another way. The arguments of `clone3` cannot be filtered."""
OWN_PROCESS_ONLY = {
    "ioprio_set": ((251, 30), 1),
    "prlimit64": ((302, 261), 0),
    "sched_setattr": ((314, 274), 0),
    "sched_setparam": ((142, 118), 0),
    "sched_setscheduler": ((144, 119), 0),
    "setpriority": ((141, 140), 1),
}
"""Refused unless the argument with this index, the process, is 0: the caller itself."""
OF_A_USER = {"ioprio_set": 3, "setpriority": 2}
"""Refused if the first argument has this value: all processes of the user, and process 1 is one of them."""
CLONE, IOCTL, SETSOCKOPT, SETAFFINITY = (56, 220), (16, 29), (54, 208), (203, 122)
SOCKET, SOCKETPAIR = (41, 198), (53, 199)
FAMILIES = (1, 2, 10, 16)
"""Unix, IPv4, IPv6, netlink. Others reach the hypervisor (vsock), or kernel code that few machines use."""
MAX_FAMILY = 64
SOL_SOCKET, ENLARGE = 1, (7, 8)
"""SO_SNDBUF and SO_RCVBUF succeed without an effect, as the kernel may do too: the limits assume buffers of the usual size."""


# For commands whose end by a SIGKILL is watched: the calls that send a signal, and which argument it is.
SENDS_SIGNAL = {
    "kill": ((62, 129), 1),
    "rt_sigqueueinfo": ((129, 138), 1),
    "rt_tgsigqueueinfo": ((297, 240), 2),
    "tgkill": ((234, 131), 2),
    "tkill": ((200, 130), 1),
}
SECCOMP, PIDFD_SEND_SIGNAL, FCNTL = (317, 277), (424, 424), (72, 25)
F_SETSIG, SIGKILL, SIGNAL_BITS = 10, 9, 0xFF


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
    for name, (numbers, index) in OWN_PROCESS_ONLY.items():
        of_a_user = [] if name not in OF_A_USER else [_load(0), _step(EQUAL, OF_A_USER[name], if_false=1), fail]
        program += _checked(numbers[column], [_load(index), _step(EQUAL, 0, if_true=1), fail, *of_a_user])
    program += _checked(SETAFFINITY[column], [_load(0), _step(EQUAL, 1, if_false=1), fail])
    program += _checked(CLONE[column], [_load(0), _step(HAS_BITS, NEW_NAMESPACES, if_false=1), fail])
    refused_requests = [_step(EQUAL, TIOCSTI, if_true=1), _step(EQUAL, TIOCLINUX, if_false=1), fail]
    program += _checked(IOCTL[column], [_load(1), *refused_requests])
    allowed = [_step(EQUAL, family, if_true=len(FAMILIES) - index) for index, family in enumerate(FAMILIES)]
    for call in (SOCKET, SOCKETPAIR):
        program += _checked(call[column], [_load(0), *allowed, _step(RETURN, FAIL | errno.EAFNOSUPPORT)])
    ignored = [_step(EQUAL, ENLARGE[0], if_true=1), _step(EQUAL, ENLARGE[1], if_false=1), _step(RETURN, FAIL)]
    of_socket = [_load(1), _step(EQUAL, SOL_SOCKET, if_true=1), _step(RETURN, ALLOW)]
    program += _checked(SETSOCKOPT[column], [*of_socket, _load(2), *ignored])
    program.append(_step(RETURN, ALLOW))
    return b"".join(program)


def kill_watch_filter() -> tuple[bytes, int, dict[int, str]] | None:
    """The filter of a command that is watched (`kill_watch.py`), the number of the call that installs it, and by their numbers the
    names of the calls that it passes on. None: there is none for this machine."""
    known = ARCHITECTURES.get(platform.machine())
    if known is None:
        return None
    _, column = known  # the first filter refuses other architectures
    fail = _step(RETURN, FAIL | errno.EPERM)
    is_kill = _step(EQUAL, SIGKILL, if_false=1)
    program = [_step(LOAD, NUMBER)]
    for numbers, index in SENDS_SIGNAL.values():
        program += _checked(numbers[column], [_load(index), is_kill, _step(RETURN, NOTIFY)])
    # For every signal: programs try it once, and use the calls above. Its target is not an argument.
    program += [_step(EQUAL, PIDFD_SEND_SIGNAL[column], if_false=1), _step(RETURN, FAIL | errno.ENOSYS)]
    # The signal that reports input of a file to a process, and the one that a process sends to its parent when it ends.
    set_signal = [_load(1), _step(EQUAL, F_SETSIG, if_true=1), _step(RETURN, ALLOW)]
    program += _checked(FCNTL[column], [*set_signal, _load(2), is_kill, fail])
    program += _checked(CLONE[column], [_load(0), _step(AND, SIGNAL_BITS), is_kill, fail])
    program.append(_step(RETURN, ALLOW))
    names = {numbers[column]: name for name, (numbers, _) in SENDS_SIGNAL.items()}
    return b"".join(program), SECCOMP[column], names


def seccomp_profile() -> dict[str, object]:
    """The same refusals in the format of container engines."""

    def refuse(names: Iterable[str], error: int, *args: Mapping[str, object]) -> dict[str, object]:
        return {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": error, "args": list(args)}

    def argument(index: int, operator: str, value: int) -> dict[str, object]:
        return {"index": index, "value": value, "op": f"SCMP_CMP_{operator}"}

    sockets = ("socket", "socketpair")
    others = [family for family in range(MAX_FAMILY) if family not in FAMILIES]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [
            refuse(REFUSED, errno.EPERM),
            refuse(MISSING, errno.ENOSYS),
            *(refuse([name], errno.EPERM, argument(index, "NE", 0)) for name, (_, index) in OWN_PROCESS_ONLY.items()),
            *(refuse([name], errno.EPERM, argument(0, "EQ", which)) for name, which in OF_A_USER.items()),
            refuse(["sched_setaffinity"], errno.EPERM, argument(0, "EQ", 1)),
            *(refuse(sockets, errno.EAFNOSUPPORT, argument(0, "EQ", family)) for family in others),
            refuse(sockets, errno.EAFNOSUPPORT, argument(0, "GE", MAX_FAMILY)),
            *(
                refuse(["setsockopt"], 0, argument(1, "EQ", SOL_SOCKET), argument(2, "EQ", option))
                for option in ENLARGE
            ),
            *(refuse(["clone"], errno.EPERM, _has_bit(1 << bit)) for bit in range(32) if NEW_NAMESPACES >> bit & 1),
            *(refuse(["ioctl"], errno.EPERM, argument(1, "EQ", request)) for request in (TIOCSTI, TIOCLINUX)),
        ],
    }


def _has_bit(bit: int) -> dict[str, object]:
    return {"index": 0, "value": bit, "valueTwo": bit, "op": "SCMP_CMP_MASKED_EQ"}


def _checked(number: int, checks: list[bytes]) -> list[bytes]:
    """Checks of the arguments of a call, which is allowed unless one of them returns."""
    return [_step(EQUAL, number, if_false=len(checks) + 1), *checks, _step(RETURN, ALLOW)]


def _load(index: int) -> bytes:
    """Load the low 32 bits of an argument."""
    return _step(LOAD, ARGUMENTS + 8 * index)


def _step(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction. A comparison skips the next `if_true` or `if_false` instructions."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
