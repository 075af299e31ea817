#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Network namespaces as hosts of their own: a switch, a link to each, and a relay in one link that delays or drops frames.

Needs root, `ip` and Open MPI. As a program it is what runs inside: the remote shell of mpirun, or the relay.
"""

import ctypes
import fcntl
import heapq
import os
import pathlib
import select
import socket
import struct
import subprocess
import sys
import time

NETWORK = "10.77.0"
MPI_FLAGS = ["--mca", "oob_tcp_if_include", f"{NETWORK}.0/24", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", f"{NETWORK}.0/24",
             "--mca", "btl_tcp_links", "1"]
RELAYED = 1  # the host whose link the relay is in


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def inside(namespace: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *command]


def available() -> str:
    """Why there can be no hosts here; empty: there can."""
    if os.geteuid() != 0:
        return "needs root"
    try:
        run("ip", "netns", "add", "lode-probe")
        run("ip", "netns", "del", "lode-probe")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces: {error}"
    return ""


def without_offload(interface: str) -> None:
    """Frames as they would be on a wire: checksummed, and no larger than the link takes."""
    sio_ethtool, commands = 0x8946, (0x17, 0x1F, 0x24, 0x2C)  # tx checksums, TSO, GSO, GRO
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in commands:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), ctypes.addressof(value))
            try:
                fcntl.ioctl(control, sio_ethtool, request)
            except OSError:
                pass


class Hosts:
    """Some hosts on one switch; use as a context."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.relay: subprocess.Popen | None = None

    def __enter__(self) -> "Hosts":
        self.remove()
        run("ip", "netns", "add", "lode-sw")
        run(*inside("lode-sw", "ip", "link", "add", "br0", "type", "bridge"))
        run(*inside("lode-sw", "ip", "link", "set", "br0", "up"))
        for host in range(self.count):
            self.connect(host)
        program = [sys.executable, __file__, "relay", f"p{RELAYED}", f"q{RELAYED}"]
        self.relay = subprocess.Popen(inside("lode-sw", *program), stdin=subprocess.PIPE, text=True)
        return self

    def connect(self, host: int) -> None:
        name = f"lode-h{host}"
        run("ip", "netns", "add", name)
        run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"p{host}", "netns", "lode-sw")
        port = f"p{host}"
        if host == RELAYED:  # h1 - p1 relay q1 - b1 switch
            run(*inside("lode-sw", "ip", "link", "add", f"q{host}", "type", "veth", "peer", "name", f"b{host}"))
            for interface in (port, f"q{host}"):
                run(*inside("lode-sw", "ip", "link", "set", interface, "up"))
            port = f"b{host}"
        run(*inside("lode-sw", "ip", "link", "set", port, "master", "br0"))
        run(*inside("lode-sw", "ip", "link", "set", port, "up"))
        run(*inside(name, "ip", "addr", "add", f"{NETWORK}.{10 + host}/24", "dev", "eth0"))
        run(*inside(name, sys.executable, __file__, "plain", "eth0"))
        # How long mpirun itself waits for a host out of reach: 13 s in place of 15 minutes. Fewer, and MPI gives up before a silent
        # rank is named.
        run(*inside(name, "sysctl", "-w", "net.ipv4.tcp_retries2=5"))
        run(*inside(name, "ip", "link", "set", "eth0", "up"))
        run(*inside(name, "ip", "link", "set", "lo", "up"))

    def __exit__(self, *_: object) -> None:
        if self.relay is not None:
            self.relay.kill()
            self.relay.wait()
        self.remove()

    def remove(self) -> None:
        known = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        for line in known.splitlines():
            if line.startswith("lode-"):
                run("ip", "netns", "del", line.split()[0])

    def say(self, what: str) -> None:
        """"pass", "drop" or "delay SECONDS": what the relay does with frames from now on."""
        assert self.relay is not None and self.relay.stdin is not None
        self.relay.stdin.write(what + "\n")
        self.relay.stdin.flush()

    def launch(self, ranks: int, *command: str) -> list[str]:
        """mpirun on the first host, ranks on all in turn."""
        hosts = ",".join(f"{NETWORK}.{10 + host}:{(ranks + self.count - 1) // self.count}" for host in range(self.count))
        mpirun = ["mpirun", "--mca", "plm_rsh_agent", f"{__file__}", *MPI_FLAGS, "--host", hosts, "--map-by", "node", "-n", str(ranks), *command]
        return inside("lode-h0", "unshare", "--uts", "sh", "-c", 'hostname lode-h0; exec "$@"', "sh", *mpirun)


def remote_shell(host: str, command: list[str]) -> None:
    name = f"lode-h{int(host.rsplit('.', 1)[1]) - 10}"
    shell = inside(name, "unshare", "--uts", "sh", "-c", f"hostname {name}; {' '.join(command)}")
    os.execvp(shell[0], shell)


def relay(one: str, other: str) -> None:
    """Passes frames between two interfaces until its standard input ends."""
    ends = {}
    for name in (one, other):
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        end.bind((name, 0))
        ends[end] = name
    across = dict(zip(ends, reversed(list(ends)), strict=True))
    delay, drop, number = 0.0, False, 0
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([*ends, sys.stdin], [], [], timeout)
        for end in ready:
            if end is sys.stdin:
                line = sys.stdin.readline().split()
                if not line:
                    return
                drop, delay = line[0] == "drop", float(line[1]) if line[0] == "delay" else 0.0
                continue
            frame, address = end.recvfrom(65536)
            if address[2] == socket.PACKET_OUTGOING or drop:
                continue
            number += 1
            heapq.heappush(waiting, (time.monotonic() + delay, number, across[end], frame))
        while waiting and (drop or waiting[0][0] <= time.monotonic()):
            _, _, to, frame = heapq.heappop(waiting)
            if not drop:
                try:
                    to.send(frame)
                except OSError:
                    pass


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "relay":
        relay(*rest)
    elif what == "plain":
        without_offload(*rest)
    else:
        remote_shell(what, rest)


if __name__ == "__main__":
    if pathlib.Path(sys.argv[0]).name == pathlib.Path(__file__).name:
        main()
