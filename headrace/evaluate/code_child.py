"""Runs a program that a model wrote, after this process has given up all but thinking and reading files.

`python -I -B code_child.py PROGRAM SECONDS BYTES` exits with PASSED if the program came to its end. It uses Python's
own library alone, because it is run without any other.

What holds: the kernel refuses every system call that is not in ALLOWED, so there are no sockets, processes, threads or
signals to others, and no file can be made, opened for writing, renamed or removed. Memory, processor time and what is
written to standard error are limited. What does not hold: the program can read whatever the user can read.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import runpy
import struct
import sys

PASSED = 77
"""A program that merely exits, with 0 or any status of its own, has not passed."""
REFUSED = 78
"""The kernel would not hold the program in, so that it was not run."""
MAX_FILES, MAX_OUTPUT_BYTES = 32, 1 << 16
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> its place in the tables of calls, and the mark by which the kernel tells its calls."""
ABSENT = 0xFFFFFFFF
LOOKED_AT = {"open": (2, ABSENT), "openat": (257, 56), "fcntl": (72, 25), "ioctl": (16, 29)}
"""Calls that depend on their arguments -> their numbers, which are ABSENT where a machine has no such call."""
ALLOWED = """
read 0 63, write 1 64, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, lseek 8 62, mmap 9 222, mprotect 10 226,
munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67,
readv 19 65, writev 20 66, access 21 -, sched_yield 24 124, mremap 25 216, madvise 28 233, dup 32 23,
nanosleep 35 101, getpid 39 172, exit 60 93, uname 63 160, getcwd 79 17, readlink 89 -, gettimeofday 96 169,
getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176, geteuid 107 175,
getegid 108 177, getppid 110 173, sigaltstack 131 132, gettid 186 178, futex 202 98, sched_getaffinity 204 123,
getdents64 217 61, restart_syscall 219 128, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
exit_group 231 94, newfstatat 262 79, readlinkat 267 78, faccessat 269 48, getrandom 318 278, statx 332 291,
rseq 334 293, faccessat2 439 439
"""
"""Calls that are allowed whatever their arguments: name, number on x86_64, number on aarch64."""
WRITING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND
HARMLESS_FCNTL = (1, 2, 3, 1030)  # F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER_MODE, PR_SET_PDEATHSIG, SIGKILL = 38, 22, 2, 1, 9
LOAD, EQUALS, ANY_BIT, GIVE = 0x20, 0x15, 0x45, 0x06  # instructions of a classic BPF program
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOTTY = 1, 25
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # where they stand in what the filter reads; an argument takes 8 bytes


def filter_program(machine: str) -> bytes:
    """Return the filter of system calls as the kernel reads it. Raises KeyError for a machine that is not listed."""
    place, arch = MACHINES[machine]
    looked_at = {name: numbers[place] for name, numbers in LOOKED_AT.items()}
    allowed = [row.split()[1 + place] for row in ALLOWED.split(",")]
    steps = [(LOAD, 0, 0, ARCH), (EQUALS, 1, 0, arch), (GIVE, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    for number in (int(text) for text in allowed if text != "-"):
        steps += [(EQUALS, 0, 1, number), (GIVE, 0, 0, ALLOW)]
    steps += [(EQUALS, 0, 1, looked_at["ioctl"]), (GIVE, 0, 0, ERROR | ENOTTY)]
    for name, argument in (("open", 1), ("openat", 2)):
        steps += [(EQUALS, 0, 4, looked_at[name]), (LOAD, 0, 0, ARGUMENTS + 8 * argument)]
        steps += [(ANY_BIT, 0, 1, WRITING), (GIVE, 0, 0, ERROR | EPERM), (GIVE, 0, 0, ALLOW)]
    steps += [(EQUALS, 0, 2 * len(HARMLESS_FCNTL) + 1, looked_at["fcntl"]), (LOAD, 0, 0, ARGUMENTS + 8)]
    for command in HARMLESS_FCNTL:
        steps += [(EQUALS, 0, 1, command), (GIVE, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in [*steps, (GIVE, 0, 0, ERROR | EPERM)])


def give_up(seconds: int, size: int) -> None:
    """Limit this process for good. Raises OSError or KeyError where the kernel or machine cannot."""
    for kind, limit in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_FSIZE, MAX_OUTPUT_BYTES),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    steps = filter_program(platform.machine())
    buffer = ctypes.create_string_buffer(steps, len(steps))
    program = struct.pack("HP", len(steps) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0),
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, FILTER_MODE, program, 0, 0),
    ):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    program, seconds, size = sys.argv[1:]
    try:
        give_up(int(seconds), int(size))
    except (OSError, KeyError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    runpy.run_path(program)  # not under the name __main__
    os._exit(PASSED)


if __name__ == "__main__":
    main()
