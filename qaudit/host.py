"""What this host lets a process use: memory within its cgroup, disks of its own, locks.

Containers and batch systems limit memory by cgroups, which the free memory of the host does not
show. A folder on a network file system is shared with hosts whose processes and locks are not
visible here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

MOUNTS, CGROUPS = Path("/proc/self/mounts"), Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
CPUINFO, FLAGS = Path("/proc/cpuinfo"), ("flags", "Features")  # of x86, and of ARM
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
BF16_ISA = re.compile("BF16|FP16|AMX")  # names of oneDNN for what has these instructions

GPU_NODES = ("/dev/nvidiactl", "/dev/dxg")  # of the CUDA driver on Linux, and in WSL2

SHARED = frozenset({
    "afs", "beegfs", "ceph", "cifs", "fhgfs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs",
    "fuse.juicefs", "fuse.mount-s3", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "glusterfs",
    "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "quobyte",
    "smb3", "smbfs", "wekafs",
})  # fmt: skip
"""Types of file systems that several hosts write to at once."""

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""How a file system answers that it has no locks."""


_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3  # of glibc's malloc.h
_LARGE_NBYTES = 4 * 2**20


@cache
def _set_malloc(parameter: int, value: int) -> None:
    """Set what glibc takes, which is made for many small objects; batches are few and large."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(parameter, value)


share_one_arena = partial(_set_malloc, _M_ARENA_MAX, 1)
"""Let all threads allocate in one place; a thread that began before keeps one of its own."""

return_large_blocks = partial(_set_malloc, _M_MMAP_THRESHOLD, _LARGE_NBYTES)
"""Give large blocks back to the system the moment they are freed.

That halves what a pass holds, but each is then faulted in anew, a tenth or more of the time
(benchmarks/README.md).
"""


def available_nbytes() -> int:
    """Return the memory that this process may still take: of the host, and of its cgroups."""
    import psutil  # locks are needed where it is not installed

    return max(0, min([int(psutil.virtual_memory().available), *_left_in_cgroups()]))


def default_stream_limit() -> int:
    """Return the memory hidden states may take before they are spilled: a quarter of the free."""
    return available_nbytes() // 4


def has_bf16_units() -> bool:
    """Return whether torch multiplies in bfloat16 here by instructions for it, as Linux lists them.

    What `ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA` forbid torch, it has not.
    """
    if os.environ.get("ATEN_CPU_CAPABILITY", "").lower() in {"default", "avx2"}:
        return False
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    if not most.startswith(("ALL", "DEFAULT", "AVX10")) and not BF16_ISA.search(most):
        return False
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = (line.partition(":")[2].split() for line in lines if line.startswith(FLAGS))
    return bool(BF16_FLAGS & {*next(flags, [])})


def has_gpu_driver() -> bool:
    return any(Path(node).exists() for node in GPU_NODES)


def is_running(pid: int) -> bool:
    """Return whether this host has a process of that number, as far as it is visible here."""
    import psutil

    return bool(psutil.pid_exists(pid))


def free_disk_nbytes(folder: Path) -> int:
    """Return the free space where a folder is or will be made."""
    return shutil.disk_usage(_existing(folder)).free


def shares_disk(one: Path, other: Path) -> bool:
    """Return whether two folders are on one disk, or will be made on one."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def _existing(folder: Path) -> Path:
    whole = folder.absolute()
    return next(place for place in (whole, *whole.parents) if place.exists())


def shared_file_system(folder: Path) -> str | None:
    """Return the type of the network file system that a folder is on, or will be made on.

    None: it is on a disk of this host, or the system does not list its mounts.
    """
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    real = folder.absolute().resolve()
    around = [real, *real.parents]
    kind, depth = "", -1
    for _, place, name, *_ in (fields for line in lines if len(fields := line.split()) > 2):
        mount = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), place))
        if mount in around and len(mount.parts) >= depth:  # of equal places the last is in use
            kind, depth = name, len(mount.parts)
    return kind if kind in SHARED else None


def _left_in_cgroups() -> Iterator[int]:
    """Yield what the limit of each cgroup around this process leaves; pages of files may go."""
    try:
        lines = CGROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            root, names = CGROUP_ROOT, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in kinds.split(","):
            root = CGROUP_ROOT / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        place = root / path.lstrip("/")
        for folder in (place, *place.parents):
            if folder.is_relative_to(root) and (left := _left(folder, *names)) is not None:
                yield left


def _left(folder: Path, limit: str, used: str, file_pages: str) -> int | None:
    """Return the memory that one cgroup leaves; None without a limit."""
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        nbytes_used = int((folder / used).read_text(encoding="ascii"))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    stat = dict(line.split()[:2] for line in lines if len(line.split()) > 1)
    return int(most) - nbytes_used + int(stat.get(file_pages, 0)) if most.isdecimal() else None
