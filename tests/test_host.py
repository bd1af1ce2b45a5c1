"""What a host gives: memory within cgroups of both versions, and file systems by their mounts."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from qaudit import host

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
scratch@tcp:/l /scratch lustre rw,flock 0 0
/dev/gpfs /p/data\\040one gpfs rw 0 0
/dev/nvme0 /scratch/local xfs rw 0 0
//server/x /mnt/x cifs rw 0 0
beegfs_nodev /mnt/b beegfs rw 0 0
"""


def test_the_mount_around_a_folder_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(host, "MOUNTS", mounts)
    assert host.shared_file_system(Path("/home")) is None  # a system without a list of mounts
    mounts.write_text(MOUNTS)
    for folder, kind in (
        ("/home/ana/.cache/huggingface/hub", "nfs4"),
        ("/scratch/ana", "lustre"),
        ("/scratch", "lustre"),
        ("/scratch/local/ana", None),
        ("/scratchy", None),
        ("/p/data one/x", "gpfs"),
        ("/mnt/x", "cifs"),
        ("/mnt/b/c", "beegfs"),
        ("/tmp/job.17", None),
        ("/var/x", None),
    ):
        assert host.shared_file_system(Path(folder)) == kind, folder
    mounts.write_text(MOUNTS + "server:/t /tmp nfs rw 0 0\n")
    assert host.shared_file_system(Path("/tmp/x")) == "nfs"  # of two at one place the last


def cgroup(folder: Path, names: tuple[str, str, str], limit: str, used: int, pages: int) -> None:
    folder.mkdir(parents=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {pages}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    ("names", "line", "below"),
    [(V2, "0::/slurm/job_1/step_0", ""), (V1, "4:cpu,memory:/slurm/job_1/step_0", "memory")],
)
def test_memory_is_what_the_tightest_cgroup_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str, str], line: str,
    below: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "cgroup")
    free = psutil.virtual_memory().available
    assert abs(host.available_nbytes() - free) < 2**30  # no cgroups
    (tmp_path / "cgroup").write_text(f"2:pids:/x\n{line}\n")
    monkeypatch.setattr(host, "CGROUP_ROOT", tmp_path / "fs")
    root = tmp_path / "fs" / below
    unlimited = "max" if names is V2 else "9223372036854771712"
    cgroup(root / "slurm", names, unlimited, 1, 0)
    assert abs(host.available_nbytes() - free) < 2**30  # no limit
    cgroup(root / "slurm/job_1", names, "9000000", 5_000_000, 1_000_000)
    assert host.available_nbytes() == 5_000_000
    cgroup(root / "slurm/job_1/step_0", names, "8000000", 6_000_000, 0)
    assert host.available_nbytes() == 2_000_000
    (root / "slurm/job_1/step_0" / names[1]).write_text("9000000")
    assert host.available_nbytes() == 0
