"""All plans for so many devices, which of them is fastest, and how many devices would do."""

from collections.abc import Iterator

from labs.cost.merges import MERGES, SCATTERING
from labs.cost.models import Model
from labs.cost.placement import lies_well
from labs.cost.sharding import HEADROOM, Plan, Step, held_bytes, step_cost
from labs.cost.topology import Topology
from treeattn.idea.arrays import integer


def plans(model: Model, batch: int, p: int, merges=MERGES) -> Iterator[Plan]:
    """All plans that come to p devices.

    No more shares of the batch than sequences, of the heads than query heads, no more stages than
    layers; a sequence is split where each device has whole key heads. Copies of the weights take
    merges that end with everything on every device.
    """
    p = integer("p", p, 1)
    for shares in divisors(p):
        for stages in divisors(p // shares):
            if shares > batch or stages > model.layers:
                continue
            for heads in divisors(p // shares // stages):
                sequence = p // shares // stages // heads
                if heads <= model.heads:
                    yield from _of_group(model, shares, heads, sequence, stages, merges)


def _of_group(
    model: Model, shares: int, heads: int, sequence: int, stages: int, merges
) -> Iterator[Plan]:
    """Plans with these shares: every merge, and every way to split the weights."""
    if sequence == 1:
        yield Plan(shares, heads, 1, None, True, 1, stages)
    elif heads <= model.kv_heads:
        for copies in divisors(sequence):
            for merge in merges:
                if heads * sequence > copies and not (copies > 1 and merge in SCATTERING):
                    yield Plan(shares, heads, sequence, merge, True, copies, stages)
        for merge in merges:
            if heads == 1 and merge not in SCATTERING:
                yield Plan(shares, heads, sequence, merge, False, 1, stages)


def divisors(n: int) -> list[int]:
    """1, …, n: those that divide n."""
    return [k for k in range(1, n + 1) if n % k == 0]


def can_run(plan: Plan, topology: Topology) -> bool:
    """Whether a plan's parts lie well on the nodes, and its merge is one that devices there have.

    Merges by one kernel that reads its peers' memory are for devices of one node that let it.
    """
    inner = plan.heads if plan.copies > 1 else plan.sequence
    blocks = (inner, plan.weights_over, plan.group, plan.group * plan.stages)
    within = plan.group if plan.copies > 1 else plan.sequence
    if plan.merge == "one-shot" and not (topology.peers and within <= topology.node_size):
        return False
    return all(lies_well(block, plan.devices, topology) for block in blocks)


def advise(
    model: Model,
    batch: int,
    context: int,
    p: int,
    topology: Topology,
    merges=MERGES,
    *,
    exactly: bool = False,
    **dtypes: str,
) -> list[Step]:
    """Steps of all plans for p devices or fewer, the fastest first; those that do not fit, last.

    Fewer are numbers that divide p, so that p / devices replicas run, and powers of two; none, if
    exactly. dtypes: weight_dtype and cache_dtype as in `step_cost`.

    Raises ValueError for more devices than the topology joins.
    """
    topology.check_devices(p)
    steps = [
        step_cost(model, plan, batch, context, topology, **dtypes)
        for n in ([p] if exactly else numbers_of_devices(p))
        for plan in plans(model, batch, n, merges)
        if can_run(plan, topology)
    ]
    return sorted(steps, key=lambda step: (not step.fits, step.seconds, step.plan.devices))


def numbers_of_devices(p: int) -> list[int]:
    """The divisors of p, and the powers of two below it."""
    powers = {1 << k for k in range(p.bit_length())}
    return sorted(powers | set(divisors(p)))


def least_devices(
    model: Model, batch: int, context: int, topology: Topology, **dtypes: str
) -> int | None:
    """The least devices on which some plan fits, beyond a node whole nodes; None if none do.

    dtypes as in `step_cost`.
    """
    room = (1 - HEADROOM) * topology.device.memory_bytes
    whole = held_bytes(model, Plan(1, 1, 1, None, True), batch, context, **dtypes)
    node = topology.node_size
    for p in [*range(1, node), *range(node, topology.capacity + 1, node)]:
        if 2 * p * room < whole:  # a pipeline's ends have one embedding each: at least half
            continue
        for plan in plans(model, batch, p, merges=("gather",)):
            held = held_bytes(model, plan, batch, context, **dtypes)
            if held <= room and can_run(plan, topology):
                return p
    return None
