"""Says whether the SIGKILL that ended a command was sent inside of its sandbox.

The kernel does not report who sent a SIGKILL. The command and all that it starts therefore have one more filter of system calls
(`kill_watch_filter` in `seccomp.py`): the kernel passes their requests to send a SIGKILL to the guest, which notes whether one
reaches the command, and sends the signal in their place. Only so do the decision and the signal have the same target: between them,
the caller could join another process group. The filter refuses all else by which one process ends another with a SIGKILL.

The guest gets this module as source, with a command that needs it: `ctypes` takes as long to import as the guest to start.
"""

import _signal  # type: ignore[import-not-found]
import ctypes
import errno
import fcntl
import os
import struct
import sys
from _socket import CMSG_LEN, SCM_RIGHTS, SOL_SOCKET, socketpair
from contextlib import suppress

SIGKILL, NO_LISTENER = 9, -1
SET_FILTER, NEW_LISTENER = 1, 8
"""Arguments of the system call `seccomp`."""
RECEIVE, SEND, CONTINUE = 0xC0502100, 0xC0182101, 1
"""Requests to a listener, and the flag by which the kernel performs the call of the caller."""
REQUEST, ANSWER = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
"""struct seccomp_notif: id, thread of the caller, flags, number of the call, architecture, instruction, arguments; and
struct seccomp_notif_resp: id, value, error, flags."""


class FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


class KillWatch:
    """A running command, and what was asked to kill it."""

    def __init__(self, pid: int, listener: int, names: "dict[int, str]", is_trusted: bool) -> None:
        """`names`: of the system calls that the filter passes on, by number. `is_trusted`: see `Sandbox.exec`."""
        self.pid = pid
        self.listener = listener
        self._names = names
        self._is_trusted = is_trusted
        self._is_hit_by_others = self._is_hit_by_itself = self._is_others_request = False

    @property
    def is_killed_inside(self) -> bool:
        """An agent that is a small program around another one repeats the signal that ended the other one: if nothing else inside
        has sent a SIGKILL, that one came from outside. Code of a policy has no such excuse."""
        by_itself = self._is_hit_by_itself and (self._is_others_request or not self._is_trusted)
        return self._is_hit_by_others or by_itself

    def serve(self) -> None:
        """Handle one request."""
        buffer = bytearray(REQUEST.size)
        try:
            fcntl.ioctl(self.listener, RECEIVE, buffer)
        except OSError:
            return  # the caller has ended
        request, caller, _, number, _, _, *arguments = REQUEST.unpack(buffer)
        error = flags = 0
        try:
            flags = self._perform(caller, self._names[number], [_signed(one) for one in arguments])
        except OSError as failure:
            error = -(failure.errno or errno.EPERM)
        with suppress(OSError):  # the caller killed itself
            fcntl.ioctl(self.listener, SEND, ANSWER.pack(request, 0, error, flags))

    def _perform(self, caller: int, name: str, arguments: "list[int]") -> int:
        """Returns the flags of the answer."""
        target = arguments[0]
        if name == "kill" and target == -1:
            # All but the caller and the guest.
            self._note(caller, reaches=not self._has_thread(caller))
            return CONTINUE
        if name == "kill" and target <= 0:
            group = os.getpgid(caller) if target == 0 else -target
            self._note(caller, reaches=group == self.pid)
            os.kill(-group, SIGKILL)
            return 0
        if "tg" in name:
            process, target = arguments[:2]
            if not os.path.exists(f"/proc/{process}/task/{target}"):
                raise OSError(errno.ESRCH, name)
        if target <= 0:
            raise OSError(errno.EINVAL, name)
        self._note(caller, reaches=self._has_thread(target))
        os.kill(target, SIGKILL)
        return 0

    def _note(self, caller: int, *, reaches: bool) -> None:
        if self._has_thread(caller):
            self._is_hit_by_itself |= reaches
        else:
            self._is_others_request = True
            self._is_hit_by_others |= reaches

    def _has_thread(self, thread: int) -> bool:
        """A SIGKILL to any thread ends its process."""
        return os.path.exists(f"/proc/{self.pid}/task/{thread}")


def _signed(value: int) -> int:
    """Process ids have 32 bits."""
    return (value & 0xFFFFFFFF) - ((value & 0x80000000) << 1)


def start(  # noqa: PLR0917 - one caller
    path: str,
    argv: "list[str]",
    env: "dict[str, str]",
    fds: "list[int]",
    reset_signals: "tuple[int, ...]",
    setting: "tuple[bytes, int, dict[int, str]]",
    is_trusted: bool,
) -> "tuple[int, KillWatch | None]":
    """The process id of a command with its streams, in a session of its own, and what watches it: None, if the kernel cannot.
    `setting`: the filter, the number of the system call that installs it, and the names. Raises `OSError`."""
    code, number, names = setting
    ours, theirs = socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for target, fd in enumerate(fds):
                os.dup2(fd, target)
            for one in reset_signals:
                _signal.signal(one, _signal.SIG_DFL)
            listener = _install(code, number)
            sent = [] if listener < 0 else [(SOL_SOCKET, SCM_RIGHTS, listener.to_bytes(4, sys.byteorder))]
            theirs.sendmsg([b"."], sent)
            os.execve(path, argv, env)
        except (OSError, ValueError, TypeError) as error:
            theirs.send(b"%d" % (getattr(error, "errno", None) or errno.EINVAL))
        finally:
            os._exit(127)
    theirs.close()
    printed, received, _, _ = ours.recvmsg(16, CMSG_LEN(4))
    printed += ours.recv(16)  # a start closes the other end
    ours.close()
    if not printed:
        # Killed before it began, so by nothing that it started.
        return pid, KillWatch(pid, NO_LISTENER, names, is_trusted)
    error_number = int(printed.lstrip(b".") or 0)
    watch = KillWatch(pid, int.from_bytes(received[0][2], sys.byteorder), names, is_trusted) if received else None
    if error_number:
        os.waitpid(pid, 0)
        if watch is not None:
            os.close(watch.listener)
        raise OSError(error_number, os.strerror(error_number))
    return pid, watch


def _install(code: bytes, number: int) -> int:
    """Install a filter for this process and all that it starts. Returns its listener, or -1."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program = FilterProgram(len(code) // 8, ctypes.addressof(buffer))
    return int(ctypes.CDLL(None).syscall(number, SET_FILTER, NEW_LISTENER, ctypes.byref(program)))
