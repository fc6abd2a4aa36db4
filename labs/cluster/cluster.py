"""Starts, commands and measures all processes of the cluster."""

import multiprocessing
import os
import socket
import statistics
import sys
import time
from multiprocessing.connection import wait

import numpy as np

from labs.cluster.network import Network
from labs.cluster.rank import HEAD_DIM, KV_HEADS, random_array, serve

PORT = 7777  # of the coordinator, in its own network
MOST_PRINTED = 1 << 20


class Failed(RuntimeError):
    """A rank ended, with the end of its output, or did not answer in time."""


class Cluster:
    """nodes × per_node processes, in the given network, or on this machine's loopback.

    Ranks are forked from this process, because importing JAX again would take longer than the rest
    of a small rank's work.

    data_limit: bytes of memory that each process may have; 0 for no limit
    """

    def __init__(
        self, nodes: int, per_node: int, network: Network | None = None, data_limit: int = 0
    ):
        self.nodes, self.p, self.network = nodes, nodes * per_node, network
        self.port = PORT if network else _free_port()
        host = network.address(0) if network else "127.0.0.1"
        options = {"p": self.p, "nodes": nodes, "coordinator": f"{host}:{self.port}"}
        self.logs = [os.memfd_create(f"rank {rank}") for rank in range(self.p)]
        self.processes, self.connections = [], []
        context = multiprocessing.get_context("fork")
        for rank in range(self.p):
            ours, theirs = context.Pipe()
            arguments = theirs, self.logs[rank], network is not None, data_limit
            process = context.Process(
                target=serve, args=arguments, kwargs={**options, "rank": rank}, daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        if network:
            for rank, pid in enumerate(self.answers()):
                network.join(rank, pid)
                link = network.address(rank), network.intra, network.window
                self.connections[rank].send(link)
        self.answers()

    def printed(self, rank: int) -> str:
        """A rank's output so far, with warnings and errors."""
        return os.pread(self.logs[rank], MOST_PRINTED, 0).decode(errors="replace")

    def ask(self, command: str, within: float = 120.0, **arguments) -> list:
        """Send a command to all ranks and return their answers. Raises Failed."""
        for connection in self.connections:
            connection.send((command, arguments))
        return self.answers(within)

    def answers(self, within: float = 120.0) -> list:
        """One answer of each rank. A rank that ends ends the waiting, though it has answered."""
        until = time.monotonic() + within
        rank_of = {connection: rank for rank, connection in enumerate(self.connections)}
        ended = {process.sentinel: rank for rank, process in enumerate(self.processes)}
        answers = {}
        while len(answers) < self.p:
            late = set(rank_of) - set(answers)
            ready = wait([*late, *ended], max(0.0, until - time.monotonic()))
            if not ready:
                ranks = sorted(rank_of[x] for x in late)
                raise Failed(f"no answer from ranks {ranks} within {within:g} s")
            for source in ready:
                try:
                    if source in ended:
                        raise EOFError
                    answers[source] = source.recv()
                except (EOFError, ConnectionResetError):
                    rank = (ended | rank_of)[source]
                    raise Failed(f"rank {rank} ended: {self.printed(rank)[-1500:]}") from None
        return [answers[connection] for connection in self.connections]

    def prepare(self, keys: int, methods: list[str]) -> None:
        """Shard `keys` keys over the ranks, and compile the methods' programs."""
        self.keys = keys // self.p
        self.said = self.ask("prepare", keys=self.keys, methods=methods)[0]

    def decode(self, method: str, within: float = 120.0) -> tuple:
        """(seconds from the common start to the last rank's end, the ranks' outputs)."""
        at = time.monotonic() + 0.05
        ends, outputs = zip(*self.ask("decode", within, method=method, at=at), strict=True)
        return max(ends) - at, outputs

    def measure(self, method: str, repeats: int, expected: np.ndarray) -> dict:
        """A row: warms up, checks the answers, then times decodes and counts the bytes of one."""
        _, outputs = self.decode(method)
        error = float(np.max(np.abs(np.array(outputs) - expected)))
        before = self._counted()
        times = [self.decode(method)[0] for _ in range(repeats)]
        counted = self._counted()
        bytes_sent = {name: (n - before[name]) / repeats for name, n in counted.items()}
        return {
            "nodes": self.nodes,
            "p": self.p,
            "method": method,
            "keys": self.p * self.keys,
            "error": error,
            "seconds": statistics.median(times),
            "least": min(times),
            "load": os.getloadavg()[0],
            "bytes": bytes_sent,
            **self.said[method],
        }

    def _counted(self) -> dict[str, int]:
        """Bytes so far, by link ("r0", "up0", …) and by each rank's sockets ("s0", …)."""
        if not self.network:
            return {}
        sockets = self.ask("sockets", port=self.port)
        return self.network.sent() | {f"s{rank}": n for rank, n in enumerate(sockets)}

    def expected(self) -> np.ndarray:
        """Dense attention in float64, a shard at a time; scores are small, so exp is safe."""
        q = random_array(0, "q").reshape(KV_HEADS, -1, HEAD_DIM).astype(np.float64)
        total, weighted = 0.0, 0.0
        for rank in range(self.p):
            k, v = (random_array(rank, x, self.keys)[0].astype(np.float64) for x in "kv")
            weights = np.exp(np.einsum("hgd,nhd->hgn", q, k) / np.sqrt(HEAD_DIM))
            total += weights.sum(axis=-1, keepdims=True)
            weighted += np.einsum("hgn,nhd->hgd", weights, v)
        return (weighted / total).reshape(1, 1, -1, HEAD_DIM)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
