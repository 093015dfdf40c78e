"""Nodes on one machine: network namespaces on a bridge, each with a limit on what it sends.

Needs root and Debian's `iproute2` (ip, tc).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

INTERFACE = "eth0"  # of every node
MTU = 9000  # jumbo frames, as a cluster's network has


class NotPermitted(Exception):
    """This machine makes no namespaces; the message says why."""


@dataclass(frozen=True)
class Nodes:
    """Namespaces that reach each other through `INTERFACE`.

    Attributes:
        names: of the namespaces.
    """

    names: tuple[str, ...]

    def address(self, node: int) -> str:
        """The node's IPv4 address."""
        return f"10.77.0.{node + 1}"

    def command(self, node: int, *words: str) -> list[str]:
        """A command line that runs on a node."""
        return ["ip", "netns", "exec", self.names[node], *words]


@contextmanager
def nodes(count: int) -> Iterator[Nodes]:
    """So many nodes, removed afterwards.

    Raises:
        NotPermitted: no root, no iproute2, or a kernel without namespaces, veth or bridges.
    """
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise NotPermitted(f"no {program}: apt-get install iproute2")
    made = Nodes(tuple(f"fp8train-{os.getpid()}-{node}" for node in range(count)))
    switch = f"fp8train-{os.getpid()}-switch"
    begun: list[str] = []
    try:
        for name in (switch, *made.names):
            run("ip", "netns", "add", name)
            begun.append(name)
        run("ip", "-n", switch, "link", "add", "br0", "mtu", str(MTU), "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for node, name in enumerate(made.names):
            inside, outside = ("ip", "-n", name), ("ip", "-n", switch)
            port = f"port{node}"
            ends = ("netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            run("ip", "link", "add", INTERFACE, *ends)
            run(*outside, "link", "set", port, "master", "br0", "mtu", str(MTU), "up")
            run(*inside, "address", "add", f"{made.address(node)}/24", "dev", INTERFACE)
            run(*inside, "link", "set", INTERFACE, "mtu", str(MTU), "up")
            run(*inside, "link", "set", "lo", "up")
        yield made
    finally:
        for name in begun:
            subprocess.run(["ip", "netns", "del", name], check=False)


def limit(rate: str) -> None:
    """Limit what the node that this process runs on sends, to 1gbit or the like."""
    # A burst of more than a segment, so that segments stay whole and bytes are those of TCP.
    bucket = ("tbf", "rate", rate, "burst", "128kb", "latency", "200ms")
    run("tc", "qdisc", "replace", "dev", INTERFACE, "root", *bucket)


def bytes_sent() -> int:
    """What has left the node that this process runs on, headers included."""
    found = json.loads(run("ip", "-json", "-stats", "link", "show", INTERFACE))
    return int(found[0]["stats64"]["tx"]["bytes"])


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise NotPermitted(f"{' '.join(words)}: {said}")
    return done.stdout
