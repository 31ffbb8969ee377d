"""Runs processes on hosts that are network namespaces of this machine, on links of a limited rate.

    python bench/netns.py --hosts 2 --mbit 1000 -- python train.py

A host is a namespace whose only way out is a veth pair into a switch, a bridge in a namespace of its own. A
token bucket at both ends of the pair limits the rate each way, so that a message costs what it costs on a
network of that rate. Needs root and iproute2.

[Note: Own cores] A host has cores of its own, as far as there are as many, and its processes stay on them, as if the others' were
elsewhere. Where they may go anywhere, two computations are now and then on one core while threads that only move bytes have the other:
what a step then waits for no network of machines would have it wait for.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

SUBNET = "10.83.0"
# A burst of 2 ms at 1 Gbit/s: long enough for timer granularity, short against a step's megabytes.
BURST = "256kb"
QUEUE = "100ms"
POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0
TIMED_OUT = 124


class NetworkError(RuntimeError):
    """The namespaces or links could not be made."""


@dataclass(frozen=True)
class Job:
    """What runs on every host, in so many processes. mbit: megabits a second on each host's link, each way; 0: unlimited. own_cores:
    whether hosts share none, see [Note: Own cores]."""

    command: Sequence[str]
    hosts: int = 2
    mbit: int = 0
    port: int = 29541
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 1800.0
    per_host: int = 1
    own_cores: bool = True


def _ip(*arguments: str) -> None:
    """Runs `ip` or, through `ip netns exec`, `tc`; NetworkError with its message if it fails."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"ip {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")


def why_impossible() -> str:
    """Why this process cannot make namespaces; "" if it can. Makes one and removes it to find out."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (iproute2)"
    if os.geteuid() != 0:
        return "not root"
    try:
        with network(hosts=1, mbit=1000):
            return ""
    except NetworkError as error:
        return str(error)


@contextlib.contextmanager
def network(hosts: int, mbit: int) -> Iterator[list[str]]:
    """The names of the hosts' namespaces, linked; all removed at the end, whatever happened."""
    base = f"bench{os.getpid()}"
    switch, names = f"{base}s", [f"{base}h{i}" for i in range(hosts)]
    made: list[str] = []
    try:
        for name in (switch, *names):
            _ip("netns", "add", name)
            made.append(name)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for i, name in enumerate(names):
            _plug_in(switch, name, i, mbit)
        yield names
    finally:
        for name in reversed(made):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def address(host: int) -> str:
    """The address of a host by its number."""
    return f"{SUBNET}.{host + 1}"


def _plug_in(switch: str, host: str, number: int, mbit: int) -> None:
    """Joins a host to the switch."""
    port = f"port{number}"
    _ip("-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-n", host, "address", "add", f"{address(number)}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", host, "link", "set", device, "up")
    _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
    if mbit > 0:
        _limit(host, "eth0", mbit)
        _limit(switch, port, mbit)


def _limit(namespace: str, device: str, mbit: int) -> None:
    """Holds what leaves `device` to a rate; done at both ends of a link, that is both directions."""
    bucket = ["rate", f"{mbit}mbit", "burst", BURST, "latency", QUEUE]
    _ip("netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root", "tbf", *bucket)


def rank_variables(rank: int, job: Job, master: str) -> dict[str, str]:
    """torchrun's variables."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(job.hosts * job.per_host),
        "LOCAL_RANK": str(rank % job.per_host),
        "LOCAL_WORLD_SIZE": str(job.per_host),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(job.port),
    }


def run(job: Job) -> int:
    """Runs the job on linked namespaces; the first failure's status, 124 after the timeout, or 0."""
    with _terminated_as_exit(), network(job.hosts, job.mbit) as names:
        prefixes = [["ip", "netns", "exec", name] for name in names]
        return _run_all(job, prefixes, {"GLOO_SOCKET_IFNAME": "eth0"}, address(0))


def run_on_loopback(job: Job) -> int:
    """The same processes without namespaces; there is no limit on the rate."""
    if job.mbit:
        raise NetworkError(f"the loopback cannot be limited to {job.mbit} Mbit/s")
    with _terminated_as_exit():
        return _run_all(job, [[] for _ in range(job.hosts)], {"GLOO_SOCKET_IFNAME": "lo"}, "127.0.0.1")


def all_cores() -> list[int]:
    """This machine's cores that this process may be on; none where there is no telling."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def cores_of(host: int, hosts: int, cores: Sequence[int]) -> list[int]:
    """Which of this machine's cores a host has: as many as any other, or where there are fewer cores than hosts one, which others may
    have too."""
    begin, end = (len(cores) * i // hosts for i in (host, host + 1))
    return list(cores[begin:end]) if len(cores) >= hosts else [cores[host % len(cores)]]


@contextlib.contextmanager
def _on(cores: Sequence[int]) -> Iterator[None]:
    """What starts inside stays on these cores."""
    before = all_cores()
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _run_all(job: Job, prefixes: list[list[str]], extra: Mapping[str, str], master: str) -> int:
    processes: list[subprocess.Popen[bytes]] = []
    cores = all_cores()
    try:
        for rank in range(job.hosts * job.per_host):
            host = rank // job.per_host
            env = {**os.environ, "OMP_NUM_THREADS": "1", **job.env, **extra}
            env |= rank_variables(rank, job, master)
            with _on(cores_of(host, job.hosts, cores)) if cores and job.own_cores else contextlib.nullcontext():
                # A session of its own, so that compile workers that it forks end with it.
                started = subprocess.Popen([*prefixes[host], *job.command], env=env, start_new_session=True)
            processes.append(started)
        return _first_failure(processes, time.monotonic() + job.timeout)
    finally:
        _end(processes)


def _first_failure(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> int:
    """Waits for all, or for the first that fails."""
    while time.monotonic() < deadline:
        codes = [p.poll() for p in processes]
        failed = [c for c in codes if c]
        if failed or None not in codes:
            return failed[0] if failed else 0
        time.sleep(POLL_SECONDS)
    return TIMED_OUT


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs: first asked, then killed."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # its whole session is gone: that is the aim
                os.killpg(process.pid, signal_number)
        deadline = time.monotonic() + GRACE_SECONDS
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """SIGTERM raises SystemExit inside, so that `finally` clauses remove the namespaces."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1, help="processes on each")
    parser.add_argument("--mbit", type=int, default=int(os.environ.get("MBIT", "0")), help="0: unlimited")
    parser.add_argument("--shared-cores", action="store_true", help="the hosts' processes may run on all")
    parser.add_argument("--port", type=int, default=29541)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds")
    parser.add_argument("command", nargs="+", help="after --")
    asked = parser.parse_args()
    own_cores = not asked.shared_cores
    return run(Job(asked.command, asked.hosts, asked.mbit, asked.port, timeout=asked.timeout, per_host=asked.per_host, own_cores=own_cores))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NetworkError as error:
        sys.exit(f"netns: {error}")
