"""Which device `auto` takes, and why; and what a host gives: memory in cgroups, file systems."""

from pathlib import Path

import psutil
import pytest
import torch

from qaudit import host
from qaudit.engine.tasks import open_device
from qaudit.errors import MachineError, UsageError
from qaudit.planning import machine
from tests.support.pretended_device import pretended


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    """Name a driver that is there."""
    node = tmp_path / "dxg"
    node.touch()
    monkeypatch.setattr(host, "GPU_NODES", (str(node),))
    monkeypatch.setattr(machine, "_torch_build", lambda: "cu128")
    monkeypatch.setattr(machine.sys, "platform", "linux")


def test_auto_is_a_gpu_where_torch_sees_one_and_one_left_unused_is_named(nodes, monkeypatch):
    with pretended():
        assert machine.choose_device("auto", "auto") == ("cuda", "bfloat16")
        assert machine.device_notes("auto") == ()
    assert machine.device_notes("cuda") == ()
    for build, reason in (
        ("cu128", "this torch sees no device"),  # the driver is there
        ("rocm6.4", "ROCm is not tested"),
        ("xpu", "XPU is not supported"),
        ("cpu", None),
    ):
        monkeypatch.setattr(machine, "_torch_build", lambda build=build: build)
        assert machine.choose_device("auto", "auto") == ("cpu", "float32")
        notes = machine.device_notes("auto")
        assert [reason in note for note in notes] == [True] * bool(reason)
        assert machine.device_notes("cuda") == ()
        monkeypatch.setattr(host, "GPU_NODES", (str(Path("/nowhere")),))


def test_fast_is_bfloat16_where_the_processor_has_instructions_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "cpuinfo")
    for cpuinfo, environment, dtype in (
        ("flags\t: fpu avx2 avx512f avx512_bf16", {}, "bfloat16"),
        ("flags\t: fpu avx512f amx_bf16 amx_tile", {}, "bfloat16"),
        ("Features\t: fp asimd i8mm bf16", {}, "bfloat16"),
        ("flags\t: fpu avx2 avx512f avx512_vnni", {}, "float32"),
        ("model name\t: bf16 by name alone\nflags\t: fpu", {}, "float32"),
        ("", {}, "float32"),
        (None, {}, "float32"),
        ("flags: avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "float32"),
        ("flags: avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, "float32"),
        ("flags: avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, "bfloat16"),
        ("flags: avx512_bf16", {"ATEN_CPU_CAPABILITY": "avx2"}, "float32"),
    ):
        for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        host.CPUINFO.unlink(missing_ok=True)
        if cpuinfo is not None:
            host.CPUINFO.write_text(f"processor: 0\n{cpuinfo}\n", encoding="utf-8")
        assert machine.choose_device("cpu", "fast") == ("cpu", dtype)
        assert machine.choose_device("cpu", "auto") == ("cpu", "float32")


@pytest.mark.skipif(not host.CPUINFO.is_file(), reason="this system lists no instructions")
def test_instructions_are_those_that_torch_finds(monkeypatch):
    for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    if "Features" not in host.CPUINFO.read_text(encoding="utf-8"):
        units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        assert host.has_bf16_units() is units


def test_cuda_is_the_device_with_most_free_memory_and_mps_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="MPS has no float64") as refused:
        machine.choose_audited("mps", "auto")
    assert refused.value.hint == "use `--device cpu`"
    with pretended():
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda k: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda k: (10 + 10 * k, 30))
        assert open_device("cuda", "float32")[0] == torch.device("cuda:1")
        assert open_device("cuda:0", "float32")[0] == torch.device("cuda:0")
        with pytest.raises(MachineError, match="no `cuda:2`") as refused:
            open_device("cuda:2", "float32")
        assert refused.value.hint == "use `--device cuda`, or a number up to 1"
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda k: 5 * (k == 0))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda k: (10 + k, 30))
        assert open_device("cuda", "float32")[0] == torch.device("cuda:0")


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


def test_the_mount_around_a_folder_decides(tmp_path, monkeypatch):
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


def cgroup(folder, names, limit, used, pages):
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
    tmp_path, monkeypatch, names, line,
    below,
):  # fmt: skip
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
