"""Two hosts on one machine: each has its own network, name, clock and process numbers, and a cable joins them.

    first  10.77.0.1 ───── cable ───── 10.77.0.2  second, whose clock is half an hour ahead

Linux namespaces make them, so only root can; `missing` says what else there has to be.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import processes

ADDRESSES = {"first": "10.77.0.1", "second": "10.77.0.2"}
AHEAD_SECONDS = {"first": 0, "second": 1800}
PORT = 29511


@dataclass(frozen=True)
class Host:
    """One of them."""

    name: str
    network: str
    names: Path
    """What it has for /etc/hosts."""

    def start(self, *command: str, said: Path) -> subprocess.Popen[bytes]:
        """Start a command on it, which says everything into a file. Killing what comes back kills all its processes."""
        own = ("--uts", "--pid", "--mount-proc", "--kill-child", "--time", "--monotonic", str(AHEAD_SECONDS[self.name]))
        setup = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
        line = ["ip", "netns", "exec", self.network, "unshare", *own, "--fork", "sh", "-c", setup, "sh"]
        with said.open("w") as file:
            return subprocess.Popen(
                [*line, str(self.names), self.name, *command],
                env=processes.environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def torchrun(self, script: Path, *arguments: str, ranks: int, said: Path) -> subprocess.Popen[bytes]:
        """Start torchrun's agent on it, with so many processes, to meet the other's at the first host."""
        meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES['first']}:{PORT}", "--rdzv-id", "pipelab")
        size = ("--nnodes", "2", "--nproc-per-node", str(ranks))
        command = (sys.executable, "-m", "torch.distributed.run", *size, *meeting, str(script), *arguments)
        return self.start(*command, said=said)

    def unplug(self) -> None:
        """Pull out its cable: nothing says goodbye, nothing arrives any more."""
        _ip("-n", self.network, "link", "set", "cable", "down")

    def plug(self) -> None:
        """Put its cable in again."""
        _ip("-n", self.network, "link", "set", "cable", "up")


def missing(folder: Path) -> str:
    """Return what is needed to make two hosts and is not here; nothing if they can be made."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux, to make hosts out of namespaces"
    if absent := [name for name in ("ip", "unshare", "mount", "hostname") if shutil.which(name) is None]:
        return f"needs {', '.join(absent)}: sudo apt install iproute2 util-linux hostname"
    with (
        contextlib.suppress(subprocess.CalledProcessError),
        two_hosts(folder) as (first, _),
        first.start("true", said=folder / "true.txt") as process,
    ):
        if process.wait() == 0:
            return ""
    return "needs a machine that lets root make namespaces"


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Make them; afterwards nothing is left."""
    names = folder / f"hosts-{os.getpid()}"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in ADDRESSES.items()))
    hosts = [Host(name, f"pipelab-{os.getpid()}-{name}", names) for name in ADDRESSES]
    with contextlib.ExitStack() as cleaning:
        cleaning.callback(names.unlink)
        for host in hosts:
            _ip("netns", "add", host.network)
            cleaning.callback(_ip, "netns", "del", host.network)
        _ip("-n", hosts[0].network, "link", "add", "cable", "type", "veth", "peer", "cable", "netns", hosts[1].network)
        for host in hosts:
            _ip("-n", host.network, "addr", "add", f"{ADDRESSES[host.name]}/24", "dev", "cable")
            for device in ("cable", "lo"):
                _ip("-n", host.network, "link", "set", device, "up")
        yield hosts[0], hosts[1]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
