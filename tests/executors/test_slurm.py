"""Job arrays on a real Slurm: preemption, requeue, kill -9, resubmission, the same audit.

It runs in one folder, munged, slurmctld and slurmd on 127.0.0.1, without systemd: nothing outside
the folder is written and no port is fixed. Debian and Ubuntu:
apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
"""

import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from qaudit.errors import UsageError
from qaudit.executors.queues import _jobs, _quoted, _ranges
from tests.support.parts import ROOT, demo, same_audit, start, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
PLACES = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

CONF = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
ReturnToService=2
KillWait=3
MinJobAge=3600
MessageTimeout=10
SlurmdTimeout=10
MailProg=/bin/true
MpiDefault=none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=5
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """A controller and nodes, each with so many CPUs."""

    def __init__(self, folder, *, nodes=2, cpus=1):
        self.folder, self.cpus = folder, cpus
        self.nodes = [f"n{k}" for k in range(nodes)]
        self.env = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"}
        self._daemons = {}

    def __enter__(self):
        """Start all of them, and wait until the nodes take jobs."""
        try:
            self._start_all(self.folder)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_all(self, folder):
        for place in (folder, folder / "state"):
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(0o755)  # munged refuses a socket below a folder that others may write
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        ctld_port, *ports = _free_ports(1 + len(self.nodes))
        shape = f"CPUs={self.cpus} RealMemory=8000"
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {shape}"
            for node, port in zip(self.nodes, ports, strict=True)
        ]
        user = pwd.getpwuid(os.getuid()).pw_name
        text = CONF.format(
            host=host, user=user, folder=folder, nodes="\n".join(nodes), ctld_port=ctld_port
        )
        (folder / "slurm.conf").write_text(text)
        names = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid"}
        names |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        options = [f"--{option}={folder / name}" for option, name in names.items()]
        self._start("munged", "--foreground", "--force", *options)
        until((folder / "munge.sock").exists, 10)
        self._start("slurmctld", "-D", "-i")
        for node in self.nodes:
            self._start("slurmd", "-D", "-N", node, name=node)
        until(lambda: self._idle() == len(self.nodes), 30)

    def _idle(self):
        """Count the nodes that answer: one that does not is `idle*`."""
        text = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False)
        return text.split().count("idle")

    def __exit__(self, *_):
        """Kill jobs, then the daemons."""
        user = pwd.getpwuid(os.getuid()).pw_name
        with suppress(subprocess.SubprocessError, AssertionError):
            self.run("scancel", "--user", user, "--signal=KILL", check=False, timeout=10)
            self.run("scancel", "--user", user, check=False, timeout=10)
            until(lambda: not self.run("squeue", "-h", check=False).strip(), 15)
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, *command, check=True, timeout=60):
        """Run a command of Slurm and return what it prints."""
        done = subprocess.run(
            command, env=self.env, text=True, timeout=timeout, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert not (check and done.returncode), f"{' '.join(command)}: {done.stdout}"
        return done.stdout

    def lose_node_of(self, job):
        """Kill a node with everything that a job has there, like a power cut; return its name."""
        records = self.run("scontrol", "--oneliner", "show", "job", job).splitlines()
        (record,) = [one for one in records if one.startswith(f"JobId={job} ")]
        (node,) = re.findall(r" NodeList=(\S+)", record)
        self._daemons[node].kill()
        self._daemons[node].wait()
        found = psutil.process_iter(["cmdline"])
        steps = [one for one in found if f"[{job}." in " ".join(one.info["cmdline"] or ())]
        lost = [*steps, *(child for one in steps for child in one.children(recursive=True))]
        for end in (signal.SIGSTOP, signal.SIGKILL):  # at once: none reports how another ended
            for process in lost:
                with suppress(psutil.Error):
                    process.send_signal(end)
        return str(node)

    def return_node(self, node):
        """Start a node that was lost, and wait until it takes jobs."""
        self._start("slurmd", "-D", "-N", node, name=node)
        until(lambda: self._idle() == len(self.nodes), 60)

    def _start(self, *command, name=""):
        program = shutil.which(command[0], path=PLACES)
        assert program is not None
        with (self.folder / f"{name or command[0]}.out").open("wb") as log:
            self._daemons[name or command[0]] = subprocess.Popen(
                [program, *command[1:]], env=self.env, stdout=log, stderr=log
            )


def _free_ports(count):
    with ExitStack() as held:
        some = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in some]


MISSING = [name for name in PROGRAMS if shutil.which(name, path=PLACES) is None]
slurm_only = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def slurm():
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:  # a short path, for sockets
        Path(folder).chmod(0o755)
        with Slurm(Path(folder), cpus=3) as running:  # room for every part at once
            yield running


def test_a_damaged_list_has_no_jobs_and_a_script_quotes_paths(tmp_path):
    for text in ("[]", "7", '{"round": 1, "parts": 2, "jobs": 3}', "{"):
        (tmp_path / "slurm.json").write_text(text)
        assert _jobs(tmp_path / "slurm.json", 1, 2) == []
    assert _ranges([0]) == "0"
    assert _ranges([5, 3, 4, 0, 9]) == "0,3-5,9"
    assert _quoted("/a/b-1.log") == "/a/b-1.log"
    assert _quoted('/my runs/"b"') == '"/my runs/\\"b\\""'
    with pytest.raises(UsageError, match="control character"):
        _quoted("/a\n#SBATCH --account=x")


def lines_of(log):
    return list(map(json.loads, log.read_text().splitlines())) if log.exists() else []


def of_each_start(log, key):
    return [line[key] for line in lines_of(log) if line.get("began")]


def measuring(log):
    """Return whether the process that wrote last has begun a subject and not ended."""
    lines = lines_of(log)
    began = max((k for k, one in enumerate(lines) if one.get("began")), default=len(lines))
    return any(one.get("subject") for one in lines[began:]) and "ended" not in lines[-1]


HOLD = """
import sys

if "part" in sys.orig_argv:
    import time
    from pathlib import Path
    import numpy as np

    savez = np.savez_compressed

    def held(file, **arrays):
        while Path("hold").exists():
            time.sleep(0.05)
        savez(file, **arrays)

    np.savez_compressed = held
"""


class Job:
    """`qaudit scan --set executor=slurm` in one folder, as often as it is run.

    Parts write no evidence while there is a file `hold`, so that a test finds them measuring.
    """

    def __init__(self, slurm, place, *more):
        self.slurm, self.place, self.heard = slurm, place, ""
        (place / "site").mkdir()
        (place / "site" / "sitecustomize.py").write_text(HOLD)
        self.hold = place / "hold"
        self.asked = ("scan", *demo(place), "--out", "out", "--set", "executor=slurm", *more)
        self.asked = (*self.asked, "--set", "slurm=--mem=100 --cpus-per-task=1")
        self.parts = place / "out" / "parts"

    def run(self, *more):
        """Run it to its end; what it submits is heard."""
        code, err = self.command(*self.asked, *more)
        self.heard += err
        return code

    def run_until_complete(self):
        """Run it again while it exits with 3; return how often."""
        for runs in range(1, 5):
            code = self.run()
            if code == 0:
                return runs
            assert code == 3, self.heard
        raise AssertionError(self.heard)

    def command(self, *command):
        path = f"{self.place / 'site'}:{ROOT}"
        conf = self.slurm.env["SLURM_CONF"]
        process = start(self.place, *command, SLURM_CONF=conf, PYTHONPATH=path)
        out, err = process.communicate(timeout=600)
        return process.returncode, out + err

    def submitted(self):
        return re.findall(r"submitted parts (\S+ of \d+) as job", self.heard)

    def measuring(self):
        """Wait until any part measures, and return its log."""
        until(lambda: any(measuring(log) for log in self.parts.glob("*.jsonl")))
        return next(log for log in sorted(self.parts.glob("*.jsonl")) if measuring(log))

    def must_be_as_in_one_process(self):
        found = [k for k, one in enumerate(self.asked) if one == "--soup"][1:]
        soups = [self.asked[k + more] for k in found for more in (0, 1)]
        code, err = self.command("scan", *demo(self.place), *soups, "--out", "whole")
        assert code == 0, err
        same_audit(self.place / "whole", self.place / "out")


class TestOnSlurm:
    pytestmark = slurm_only

    def test_preempted_and_killed_parts_give_the_audit_of_one_process(self, slurm, tmp_path):
        job = Job(slurm, tmp_path, "--set", "parts=5", "--soup", "step200+step1000")
        job.hold.touch()
        assert job.run("--set", "detach=true") == 0, job.heard
        (first,) = job.submitted()
        assert re.fullmatch("0-[34] of 5", first)  # of five subjects two may be in one part
        victim = job.measuring()
        code, text = job.command("status", "out")
        assert (code, "running" in text) == (3, True), text
        slurm.run("sbatch", "-p", "urgent", "--mem=100", f"--chdir={tmp_path}", "-N", "2",
                  "--exclusive", "--wrap", "sleep 2")  # fmt: skip
        until(lambda: len(of_each_start(victim, "pid")) > 1)  # preempted, and requeued
        until(lambda: measuring(victim))
        os.kill(of_each_start(victim, "pid")[-1], signal.SIGKILL)
        job.hold.unlink()
        job.run_until_complete()
        number = victim.name.partition("-")[0]
        assert f"{number} of 5" in job.submitted()[1:]  # it alone, of the first round
        assert first not in job.submitted()[1:]
        job.must_be_as_in_one_process()
        job.heard = ""
        assert job.run() == 0
        assert job.submitted() == []

    def test_a_node_that_is_gone_is_replaced_by_another(self, slurm, tmp_path):
        job = Job(slurm, tmp_path, "--set", "parts=2")
        job.hold.touch()
        assert job.run("--set", "detach=true") == 0, job.heard
        assert job.submitted() == ["0-1 of 2"]
        victim = job.measuring()
        node = slurm.lose_node_of(of_each_start(victim, "job")[-1])
        try:
            until(lambda: len(of_each_start(victim, "pid")) > 1, 200)  # requeued, unanswered
            job.hold.unlink()
            job.run_until_complete()
        finally:
            slurm.return_node(node)
        job.must_be_as_in_one_process()

    def test_a_search_is_a_job_of_one_part(self, slurm, tmp_path):
        job = Job(slurm, tmp_path, "--set", "parts=2", "--soup", "greedy(step10+step200+step1000)")
        job.run_until_complete()
        assert job.submitted()[:2] == ["0-1 of 2", "0 of 1"]
        job.must_be_as_in_one_process()


def test_without_slurm_it_says_so(tmp_path, qaudit, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = qaudit("scan", *demo(tmp_path), "--out", "out", "--set", "executor=slurm")
    assert done.code == 4
    assert "`sbatch` failed: " in done.err
    assert "sbatch --array=" in (tmp_path / "out" / "parts" / "job.sbatch").read_text()
