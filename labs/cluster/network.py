"""A network of two levels inside one machine: a bridge for each node, a switch between the nodes.

    rank 0: eth0 ── r0 ┐                                     ┌ r2 ── eth0: rank 2
                       ├ node0 ── up0 ·· switch ·· up1 ── node1
    rank 1: eth0 ── r1 ┘                                     └ r3 ── eth0: rank 3

Each rank has its own network namespace. Links inside a node are veth pairs. The uplinks are TAP
devices, which `switch.py` connects. A token bucket (`tbf`) at each sending end sets a link's rate.

All of this is in namespaces that end with their last process. Nothing outside changes, so nothing
has to be cleaned up, even after SIGKILL.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

INSIDE = "TREEATTN_CLUSTER_INSIDE"
LIBC = ctypes.CDLL(None, use_errno=True)
NEW_NETWORK_AND_HOST_NAME = 0x40000000 | 0x04000000
SIGNAL_AT_PARENTS_DEATH = 1
MTU = 9000
QUEUE_BYTES = 49152
UNITS = {"": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "s": 1.0, "ms": 1e-3}
SYSTEM = {
    "ipv6/conf/all/disable_ipv6": "1",  # no neighbour discovery in the counters
    "ipv4/tcp_congestion_control": "reno",  # bbr would pace by its own estimate of the rate
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
}
PROBE = f"""ip link add name a mtu {MTU} type veth peer name b
ip link add name c type bridge
ip tuntap add dev d mode tap
tc qdisc add dev d root tbf rate 1mbit burst 18000 limit 100000"""


def why_not() -> str:
    """The reason why this machine cannot make such a network; "" if it can."""
    for tool in ("unshare", "ip", "tc", "ss"):
        if not shutil.which(tool):
            return f"the command {tool!r} is missing (Debian: iproute2, util-linux)"
    tried = subprocess.run([*_unshare(), "sh", "-ec", PROBE], capture_output=True, text=True)
    return f"namespaces or links cannot be made here: {tried.stderr.strip()}" * bool(
        tried.returncode
    )


def _unshare() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def enter(limit: float) -> None:
    """Start this program again in new namespaces and exit with its status; return once inside.

    Ends all processes inside after `limit` seconds, or when this process ends. Exits with a message
    if namespaces cannot be made.
    """
    if os.environ.get(INSIDE):
        return
    if reason := why_not():
        sys.exit(f"labs.cluster: {reason}. With --plain it runs over loopback.")
    command = [*_unshare(), sys.executable, *sys.orig_argv[1:]]
    environment = {**os.environ, INSIDE: "1"}
    inside = subprocess.Popen(command, env=environment, preexec_fn=end_with_parent)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(inside.wait(limit))
    except subprocess.TimeoutExpired:
        sys.exit(f"labs.cluster: stopped after {limit:g} s")
    finally:
        inside.kill()


def end_with_parent() -> None:
    """The kernel will kill this process when its parent ends."""
    LIBC.prctl(SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)


def run(command: str) -> str:
    """The output of a command; RuntimeError, with what it printed, when it fails."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
    return done.stdout


def leave_network() -> None:
    """Move this process into a new network without links, where it can set the host name."""
    if LIBC.unshare(NEW_NETWORK_AND_HOST_NAME):
        raise OSError(ctypes.get_errno(), "unshare")


def settle(address: str, rate: float, window: int) -> None:
    """Set up a rank's end of its link: the host name, TCP, the address, and the rate.

    window: bytes that a sender may have in flight
    """
    socket.sethostname(address)  # gloo listens where the machine's own name resolves
    buffers = {"ipv4/tcp_rmem": f"4096 {2 * window} {2 * window}"}
    for name, value in {**SYSTEM, **buffers}.items():
        Path("/proc/sys/net", name).write_text(value)
    run("ip link set dev lo up")
    run(f"ip addr add {address}/16 dev eth0")
    run("ip link set dev eth0 up")
    limit("eth0", rate)


def limit(device: str, rate: float) -> None:
    """Limit `device` to sending `rate` bits a second; no limit if 0."""
    if not rate:
        return
    burst = max(2 * MTU, int(rate / 8 * 200e-6))
    bucket = f"tbf rate {int(rate)}bit burst {burst} limit {32 << 20}"
    run(f"tc qdisc replace dev {device} root {bucket}")


class Network:
    """Bridges and uplinks of `nodes` nodes, in a new namespace, which this process enters.

    intra, inter: bits a second, inside a node and between nodes
    delay:        seconds that a frame takes between nodes
    """

    def __init__(self, nodes: int, per_node: int, intra: float, inter: float, delay: float):
        leave_network()
        self.per_node, self.intra = per_node, intra
        # One and a half round trips of bytes, so that the window does not limit the rate, and a
        # short queue, because gloo's few bytes before each message wait in it.
        self.window = QUEUE_BYTES // 2 + int(3 * delay * inter / 8)
        uplinks = [f"up{j}" for j in range(nodes)]
        command = [sys.executable, str(Path(__file__).with_name("switch.py")), str(delay), *uplinks]
        switch = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=end_with_parent)
        if not switch.stdout.readline():
            raise RuntimeError("the switch did not start: /dev/net/tun is needed")
        for j, uplink in enumerate(uplinks):
            run(f"ip link add name node{j} mtu {MTU} type bridge mcast_snooping 0")
            run(f"ip link set dev node{j} up")
            run(f"ip link set dev {uplink} mtu {MTU} txqueuelen 10000 master node{j} up")
            limit(uplink, inter)

    def address(self, rank: int) -> str:
        return f"10.77.{rank // self.per_node}.{rank % self.per_node + 1}"

    def join(self, rank: int, pid: int) -> None:
        """Link the network of process `pid` to its node."""
        run(f"ip link add name r{rank} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {pid}")
        run(f"ip link set dev r{rank} master node{rank // self.per_node} up")
        limit(f"r{rank}", self.intra)

    def sent(self) -> dict[str, int]:
        """Bytes on the wire so far: from each rank ("r0", …), and up from each node ("up0", …)."""
        links = {x["ifname"]: x["stats64"] for x in json.loads(run("ip -s -j link"))}
        ends = {"r": "rx", "u": "tx"}  # a rank's sent bytes are received by its node
        return {
            name: stats[ends[name[0]]]["bytes"] for name, stats in links.items() if name[0] in ends
        }


def parse(text: str) -> float:
    """A number with a unit: "400mbit" is 4e8 bits a second, "5ms" 0.005 s; "0" means no limit."""
    number, unit = re.fullmatch(r"([0-9.]*)(.*)", text).groups()
    if unit not in UNITS:
        raise ValueError(f"expected a number with one of {', '.join(UNITS)}, got {text!r}")
    return float(number) * UNITS[unit]
