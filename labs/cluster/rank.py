"""One process of the cluster. Its commands are the names of `Rank`'s methods, with arguments."""

import functools
import os
import resource
import time
from multiprocessing.connection import Connection

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeattn
from labs.cluster import network

HEADS, KV_HEADS, HEAD_DIM = 16, 4, 128
BYTES_OF_A_KEY = 2 * 4 * KV_HEADS * HEAD_DIM  # a key and its value, in float32
METHODS = {"ring": treeattn.ring_decode, "tree": treeattn.tree_decode}
METHODS |= {
    name: functools.partial(treeattn.tree_decode, method=name)
    for name, way in treeattn.METHODS.items()
    if name != "allreduce" and not way.shards_heads
}
# gloo's messages in a group of q devices, for n operands. An Allreduce sends each operand around a
# ring twice, in q chunks of two segments each; an all-to-all has an operand for each device.
MESSAGES = {
    "all-reduce": lambda q, n: 4 * (q - 1) * n,
    "all-gather": lambda q, n: 2 * (q - 1) * n,
    "all-to-all": lambda q, n: n - 1,
    "collective-permute": lambda q, n: n,
}


def random_array(rank: int, which: str, keys: int = 1) -> np.ndarray:
    """A rank's part of the keys "k" or values "v", or the query "q", which all take from rank 0."""
    rng = np.random.default_rng([rank, "qkv".index(which)])
    heads = HEADS if which == "q" else KV_HEADS
    return rng.standard_normal((1, keys, heads, HEAD_DIM), np.float32)


class Rank:
    def __init__(self, rank: int, p: int, nodes: int, coordinator: str):
        self.rank, self.p = rank, p
        treeattn.simulate_devices(1)
        patience = {"initialization_timeout": 60}  # many processes start on few cores
        treeattn.initialize(coordinator, p, rank, coordinator_bind_address=coordinator, **patience)
        one, two = treeattn.kv_mesh(), treeattn.kv_mesh(nodes=nodes)
        self.one_level = NamedSharding(one, P(None, "kv"))
        self.two_levels = NamedSharding(two, P(None, ("node", "device")))

    def prepare(self, keys: int, methods: list[str]) -> dict:
        """Make `keys` keys of the cache, and compile; returns each program's stated messages."""
        self.programs, self.arguments = {}, {}
        local = [jax.device_put(random_array(self.rank, x, keys)) for x in "kv"]
        shape = (1, keys * self.p, KV_HEADS, HEAD_DIM)
        said = {}
        for method in methods:
            sharding = self.two_levels if method == "hierarchical" else self.one_level
            k, v = (jax.make_array_from_single_device_arrays(shape, sharding, [x]) for x in local)
            arguments = random_array(0, "q"), k, v
            decode = functools.partial(METHODS[method], sharding=sharding)
            self.programs[method] = jax.jit(decode).lower(*arguments).compile()
            self.arguments[method] = arguments
            said[method] = self._said(self.programs[method])
        return said

    def _said(self, program) -> dict:
        found = treeattn.collectives(program)
        return {
            "said": sum(c.sent_bytes for c in found),
            "messages": sum(
                c.count * MESSAGES[c.kind](c.devices or self.p, len(c.shapes)) for c in found
            ),
            "collectives": [(c.kind, c.count, c.shapes, c.groups) for c in found],
        }

    def decode(self, method: str, at: float) -> tuple[float, np.ndarray]:
        """Decode one token from time `at` of the shared clock on; returns (end, output)."""
        time.sleep(max(0.0, at - time.monotonic()))
        out = jax.block_until_ready(self.programs[method](*self.arguments[method]))
        end = time.monotonic()
        return end, np.asarray(out.addressable_shards[0].data)

    def sockets(self, port: int) -> int:
        """Bytes that this rank's sockets sent, without retransmitted and coordination bytes."""
        total = 0
        for line in network.run("ss -tinHO").splitlines():
            words = line.split()
            if any(address.endswith(f":{port}") for address in words[3:5]):
                continue
            counts = dict(word.split(":", 1) for word in words[5:] if ":" in word)
            total += int(counts.get("bytes_sent", 0)) - int(counts.get("bytes_retrans", 0))
        return total


def serve(connection: Connection, log: int, networked: bool, data_limit: int, **options) -> None:
    """Run a rank: enter its network, join the other ranks, then obey one command after another."""
    network.end_with_parent()
    os.dup2(log, 1)
    os.dup2(log, 2)
    if data_limit:
        resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))
    if networked:
        network.leave_network()
        connection.send(os.getpid())
        network.settle(*connection.recv())
    worker = Rank(**options)
    connection.send("joined")
    while True:
        command, arguments = connection.recv()
        connection.send(getattr(worker, command)(**arguments))
