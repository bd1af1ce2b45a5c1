"""A Slurm of its own in one folder: munged, slurmctld and slurmd on 127.0.0.1, without systemd.

Nothing outside the folder is written and no port is fixed. Debian and Ubuntu:
apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.parts import until

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


def missing_programs() -> list[str]:
    """Return the programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=PLACES) is None]


class Slurm:
    """A controller and nodes, each with so many CPUs."""

    def __init__(self, folder: Path, *, nodes: int = 2, cpus: int = 1) -> None:
        self.folder, self.cpus = folder, cpus
        self.nodes = [f"n{k}" for k in range(nodes)]
        self.env = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Slurm:
        """Start all of them, and wait until the nodes take jobs."""
        try:
            self._start_all(self.folder)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_all(self, folder: Path) -> None:
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

    def _idle(self) -> int:
        """Count the nodes that answer: one that does not is `idle*`."""
        text = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False)
        return text.split().count("idle")

    def __exit__(self, *_: object) -> None:
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

    def run(self, *command: str, check: bool = True, timeout: float = 60) -> str:
        """Run a command of Slurm and return what it prints."""
        done = subprocess.run(
            command, env=self.env, text=True, timeout=timeout, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert not (check and done.returncode), f"{' '.join(command)}: {done.stdout}"
        return done.stdout

    def lose_node_of(self, job: str) -> str:
        """Kill a node with everything that a job has there, like a power cut; return its name."""
        records = self.run("scontrol", "--oneliner", "show", "job", job).splitlines()
        (record,) = [one for one in records if one.startswith(f"JobId={job} ")]
        (node,) = re.findall(r" NodeList=(\S+)", record)
        self._daemons[node].kill()
        self._daemons[node].wait()
        steps = [one for one in psutil.process_iter() if f"[{job}." in " ".join(_words(one))]
        lost = [*steps, *(child for one in steps for child in one.children(recursive=True))]
        for end in (signal.SIGSTOP, signal.SIGKILL):  # at once: none reports how another ended
            for process in lost:
                with suppress(psutil.Error):
                    process.send_signal(end)
        return str(node)

    def return_node(self, node: str) -> None:
        """Start a node that was lost, and wait until it takes jobs."""
        self._start("slurmd", "-D", "-N", node, name=node)
        until(lambda: self._idle() == len(self.nodes), 60)

    def _start(self, *command: str, name: str = "") -> None:
        program = shutil.which(command[0], path=PLACES)
        assert program is not None
        with (self.folder / f"{name or command[0]}.out").open("wb") as log:
            self._daemons[name or command[0]] = subprocess.Popen(
                [program, *command[1:]], env=self.env, stdout=log, stderr=log
            )


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
