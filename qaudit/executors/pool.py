"""Parts on this machine: a process for each, on the next free GPU or worker.

A process of its own for each part has a CUDA context of its own: what is killed or runs out of
memory takes nothing with it. There are several parts for each worker, taken as they come, so that
no worker waits for long at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from qaudit.errors import MachineError, OtherIdentityError
from qaudit.executors.cut import parts_of
from qaudit.executors.events import Executor
from qaudit.executors.records import state_of
from qaudit.executors.standing import show
from qaudit.host import default_stream_limit
from qaudit.saved.parts import FOLDER
from qaudit.types import SILENT, Run, Watch, WorkUnit

PARTS_PER_WORKER = 4
TRIES = 2  # of a part in one run
SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_BARS = 0.5, 5.0
_ENDED = (0, 3)  # done; done, and some subjects cannot be measured


@dataclass(frozen=True, eq=False)
class Worker:
    """Where a part can run: the variables of its process."""

    name: str
    variables: Mapping[str, str]


def cpu_workers(count: int) -> tuple[Worker, ...]:
    """Return so many workers without a GPU of their own."""
    return tuple(Worker(f"worker {k}", {}) for k in range(count))


def gpu_workers(text: str) -> tuple[Worker, ...]:
    """Return a worker for each GPU that is asked for: a number, or `all` that are visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = [name.strip() for name in visible.split(",")] if visible is not None else _gpus()
    # CUDA sees none of those behind the first that is none.
    names = [*dict.fromkeys(takewhile(lambda name: name not in ("", "-1"), listed))]
    count = len(names) if text == "all" else int(text)
    if not names or count > len(names):
        raise MachineError(
            f"`--gpus {text}` asks for more GPUs than the {len(names)} that are visible here",
            hint=f"ask for at most {len(names)}" if names else "use `--executor local --workers 2`",
        )
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return tuple(
        Worker(f"GPU {name}", {**order, "CUDA_VISIBLE_DEVICES": name}) for name in names[:count]
    )


def _gpus() -> list[str]:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    whole = [line for line in listed.splitlines() if line.startswith("GPU ")]  # others are MIG's
    return [str(place) for place, _ in enumerate(whole)]


class Pool(Executor):
    """The executor of one machine with several GPUs."""

    def __init__(
        self,
        run: Run,
        out: Path,
        workers: Sequence[Worker],
        options: Sequence[str] = (),
        watch: Watch = SILENT,
    ) -> None:
        """Run parts on workers; `options` go to each `qaudit part`."""
        super().__init__(run, out, watch)
        self._workers = list(workers)
        self._options = [*options]
        if "--stream-memory" not in options:  # each process would take as much as one alone
            self._options += ["--stream-memory", f"{default_stream_limit() // len(workers)}B"]

    def await_units(self, number: int, units: Sequence[WorkUnit]) -> None:
        """Run the parts that lack something, until each has ended or failed twice."""
        count = PARTS_PER_WORKER * len(self._workers)
        state = state_of(self.run, self.out, number)
        missing = {unit.content for unit in (*state.missing, *state.failed)}
        parts = parts_of(self.run, units, count)
        waiting = deque(k for k, p in enumerate(parts) if any(u.content in missing for u in p))
        tries = dict.fromkeys(waiting, 0)
        running: dict[Worker, tuple[int, subprocess.Popen[bytes]]] = {}
        free, shown = list(self._workers), 0.0
        try:
            while (waiting and free) or running:
                while waiting and free:
                    worker, part = free.pop(0), waiting.popleft()
                    tries[part] += 1
                    running[worker] = part, self._start(worker, part, count)
                time.sleep(SECONDS_BETWEEN_LOOKS)
                for worker, (part, process) in list(running.items()):
                    code = process.poll()
                    if code is None:
                        continue
                    del running[worker]
                    if code != OtherIdentityError.code:  # this device gets no other part
                        free.append(worker)
                    if code not in _ENDED:
                        self.watch.note(f"part {part}/{count} on {worker.name} ended with {code}")
                        if tries[part] < TRIES:
                            waiting.append(part)
                if time.monotonic() - shown > SECONDS_BETWEEN_BARS:
                    shown = time.monotonic()
                    show(self.out, self.watch)
        finally:
            _stop([process for _, process in running.values()])

    def _start(self, worker: Worker, part: int, count: int) -> subprocess.Popen[bytes]:
        folder = self.out / FOLDER
        command = [sys.executable, "-m", "qaudit", "part", str(self.out.absolute()), "--part"]
        with (folder / f"{part}-of-{count}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, f"{part}/{count}", *self._options],
                env={**os.environ, **worker.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # an interrupt comes to this process, which stops them
            )


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask processes to end, which keeps what they measured; kill those that do not."""
    for process in processes:
        with suppress(OSError):
            process.terminate()
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
