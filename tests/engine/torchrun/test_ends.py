"""Whom a job listens to, and how it ends where its launcher, or what it should meet, does not answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import processes
import pytest
from forking import CAN_FORK, fork

pytestmark = pytest.mark.dist

LAUNCH = ("-m", "pipelab", "launch", "--ranks", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="sockets are found in Linux's /proc")


def wait_until(there):
    """Wait until something is there; return it."""
    deadline = time.monotonic() + 60
    while not (found := there()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.fixture
def start(tmp_path):
    """Start a command of Python; afterwards, neither it nor what it started is left."""
    started = []

    def begin(*command, **more):
        env = {name: value for name, value in processes.environment(**more).items() if "SOCKET_IFNAME" not in name}
        with (tmp_path / f"said-{len(started)}").open("w") as said:
            process = subprocess.Popen([sys.executable, *command], env=env, stdout=said, stderr=subprocess.STDOUT)
        started.append(process)
        return process

    yield begin
    for process in started:
        for each in reversed(family(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait()
    for pid in workers(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def family(pid):
    """Return a process and all that it, and they, have started."""
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended since the folder was listed
                found += [each for child in (task / "children").read_text().split() for each in family(int(child))]
    return found


def runs(pid):
    """Return whether a process is there, and is not only waiting to be counted out."""
    with suppress(OSError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def workers(folder):
    """Return the ranks that have trained a step, as process numbers."""
    return [int(text) for file in folder.iterdir() if file.name.isdecimal() and (text := file.read_text())]


def listening(pids):
    """Return the addresses at which processes listen."""
    held = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed since the folder was listed
                held.add(os.readlink(descriptor))
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in held:
                host = bytes.fromhex(words[1].partition(":")[0])
                parts = [host[at : at + 4][::-1] for at in range(0, len(host), 4)]  # words of the machine's own order
                addresses.append(ip_address(b"".join(parts)))
    return addresses


ENDLESS = str(processes.SCRIPTS / "endless.py")


@pytest.mark.thorough
@LINUX
@pytest.mark.parametrize("launcher", [LAUNCH, (*TORCHRUN, "PORT")], ids=["launch", "torchrun"])
def test_the_processes_of_a_launcher_that_is_killed_end_too(start, tmp_path, launcher):
    port = str(processes.free_port())
    process = start(*(word.replace("PORT", port) for word in launcher), ENDLESS, str(tmp_path))
    trained = wait_until(lambda: len(workers(tmp_path)) == 2 and workers(tmp_path))
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(runs, trained)))


@pytest.mark.thorough
@LINUX
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_job_listens_to_this_machine_alone_and_a_signal_to_its_launcher_ends_it(start, tmp_path, stop):
    launcher = start(*LAUNCH, ENDLESS, str(tmp_path))
    trained = wait_until(lambda: len(workers(tmp_path)) == 2 and workers(tmp_path))
    everyone = family(launcher.pid)
    assert {launcher.pid, *trained} <= set(everyone)
    found = listening(everyone)
    assert len(found) >= 3  # the store, and gloo on both ranks
    assert [address for address in found if not address.is_loopback] == []
    launcher.send_signal(stop)
    assert launcher.wait(40) == 128 + stop
    assert not any(map(runs, trained))


@LINUX
@pytest.mark.parametrize(
    "interrupted",
    [pytest.param(False, id="another rank is killed"), pytest.param(True, id="Ctrl-C", marks=pytest.mark.thorough)],
)
def test_a_stopped_rank_ends_by_the_signal_that_the_launcher_sends_to_all(start, tmp_path, interrupted):
    launcher = start(*LAUNCH, ENDLESS, str(tmp_path))
    wait_until(lambda: len(workers(tmp_path)) == 2)
    killed, stopped = (int((tmp_path / str(rank)).read_text()) for rank in range(2))
    os.kill(stopped, signal.SIGSTOP)
    if interrupted:
        launcher.send_signal(signal.SIGINT)
    else:
        os.kill(killed, signal.SIGKILL)
    launcher.wait(100)
    assert not runs(stopped)
    said = (tmp_path / "said-0").read_text()
    assert f"Sending process {stopped} closing signal" in said
    assert "forcefully" not in said  # as PyTorch says after half a minute, of a process that did not end


@pytest.fixture
def silent():
    """A listener that accepts connections and says nothing; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.fixture
def meet(tmp_path):
    """Start a rank of two processes that meet at a port; afterwards, none is left."""
    started = []

    def begin(port, seconds, rank=1):
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
        said = [tmp_path / f"{kind}-{len(started)}" for kind in ("said", "warned")]
        said[0].touch()
        start = fork if CAN_FORK else processes.Started
        started.append(start(processes.SCRIPTS / "meeting.py", [str(seconds)], processes.environment(**job), *said))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.join()


def code_of(process, seconds):
    """Return how a process ended, within so many seconds."""
    process.join(seconds)
    return process.exitcode


def test_an_address_that_never_answers_is_given_up_after_the_timeout(meet, silent, tmp_path):
    assert code_of(meet(silent, 1), 60) == 0
    kind, seconds, told = (tmp_path / "said-0").read_text().removeprefix("connecting\n").split(maxsplit=2)
    assert kind == "RankError"
    assert 1 <= float(seconds) < 20
    assert f"127.0.0.1:{silent}" in told


def test_a_wait_for_an_address_that_never_answers_can_be_interrupted(meet, silent, tmp_path):
    process = meet(silent, 100)
    wait_until(lambda: "connecting" in (tmp_path / "said-0").read_text())
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    assert code_of(process, 30) == 0
    assert "KeyboardInterrupt" in (tmp_path / "said-0").read_text()


@LINUX
def test_processes_of_a_torchrun_that_was_stopped_before_they_connect_end(start, tmp_path):
    port = str(processes.free_port())
    agent = start(*TORCHRUN, port, str(processes.SCRIPTS / "meeting.py"), "1", str(tmp_path))
    ranks = wait_until(lambda: len(workers(tmp_path)) == 2 and workers(tmp_path))
    agent.send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    wait_until(lambda: not any(map(runs, ranks)))
    said = (tmp_path / "said-0").read_text()
    assert said.count("RankError") == 2, said
    assert said.count(f"127.0.0.1:{port}") == 2, said


def test_a_rank_of_another_job_on_the_same_port_is_refused(meet, tmp_path):
    port = str(processes.free_port())
    first = [meet(port, 20, rank) for rank in range(2)]
    wait_until(lambda: all("made" in (tmp_path / f"said-{at}").read_text() for at in range(2)))
    second = [meet(port, 20, rank) for rank in range(2)]
    assert [code_of(process, 60) for process in second] == [0, 0]
    told = [(tmp_path / f"said-{at}").read_text() for at in (2, 3)]
    assert "RankError" in told[0]
    assert f"127.0.0.1:{port}" in told[0]
    assert "RankError" in told[1]
    assert f"process {first[1].pid} on " in told[1]
    assert "another job" in told[1]
    assert [process.exitcode for process in first] == [None, None]  # and the first job goes on
