"""All plans for a number of devices, the fastest plan, and the least devices that suffice."""

from collections.abc import Iterator, Sequence

from labs.cost.merges import SCATTERING
from labs.cost.models import Model
from labs.cost.steps import HEADROOM, REPAIRED, Plan, Rates, Step, held_bytes, step_cost
from labs.cost.topology import Topology
from labs.cost.workload import whole

# The fastest of these is within a hundredth of the fastest merge (tests/test_cost_advice.py).
FASTEST = ("gather", "one-shot", "hierarchical", "butterfly", "a2a", "helix")


def plans(model: Model, batch: int, p: int, merges: Sequence[str] = FASTEST) -> Iterator[Plan]:
    """All plans for exactly p devices that serving engines could run.

    The batch has no more shares than sequences, a pipeline no more stages than layers. Heads and
    feed-forward weights divide evenly (`divides`). A sequence is split only if each device has
    whole key heads. With copies of the weights, a merge leaves all heads on every device.
    """
    for shares in divisors(whole("devices", p)):
        for stages in divisors(p // shares):
            if shares > batch or stages > model.layers:
                continue
            for heads in divisors(p // shares // stages):
                sequence = p // shares // stages // heads
                for plan in _of_group(model, heads, sequence, merges):
                    plan = plan._replace(batch=shares, stages=stages)
                    if divides(model, plan):
                        yield plan


def _of_group(model: Model, heads: int, sequence: int, merges) -> Iterator[Plan]:
    """Plans with these shares: every merge, and every way to split the weights."""
    if sequence == 1:
        yield Plan(heads=heads)
    elif heads <= model.kv_heads:
        for copies in divisors(sequence):
            for merge in merges:
                if heads * sequence > copies and not (copies > 1 and merge in SCATTERING):
                    yield Plan(1, heads, sequence, merge, True, copies)
        if heads == 1:
            for merge in merges:
                if merge not in SCATTERING:
                    yield Plan(1, 1, sequence, merge, False)


def divides(model: Model, plan: Plan) -> bool:
    """Whether all devices get equal parts, as serving engines require.

    The shares of heads divide the query heads; they divide the key heads or are a multiple of
    them, so that every key head is on as many devices. The devices that share the weights divide
    the query heads and the feed-forward network's inner width.
    """
    more, fewer = max(plan.heads, model.kv_heads), min(plan.heads, model.kv_heads)
    hidden = model.expert_hidden or model.hidden
    over = plan.weights_over
    return not (more % fewer or model.heads % plan.heads or model.heads % over or hidden % over)


def divisors(n: int) -> list[int]:
    """The divisors of n, from 1 to n."""
    return [k for k in range(1, n + 1) if n % k == 0]


def lies_well(plan: Plan, topology: Topology) -> bool:
    """Whether no part of a plan straddles nodes needlessly, and its merge can run there.

    A part is inside one node or fills whole nodes. Otherwise the first part, whose times are
    calculated, might not be the slowest. A kernel that reads its peers' memory stays in a node.
    """
    node = topology.node_size
    if plan.merge == "one-shot":
        reach = plan.group if plan.copies > 1 else plan.sequence
        if reach > node:
            return False
    inner = plan.heads if plan.copies > 1 else plan.sequence
    blocks = (inner, plan.weights_over, plan.group, plan.group * plan.stages)
    return plan.devices <= node or all(
        block in (1, plan.devices) or not (node % block and block % node) for block in blocks
    )


def advise(
    model: Model,
    batch: int,
    context: int,
    p: int,
    topology: Topology,
    rates: Rates = REPAIRED,
    *,
    merges: Sequence[str] = FASTEST,
    exactly: bool = False,
    **dtypes: str,
) -> list[Step]:
    """Steps of all plans for p devices or fewer, the fastest first, those that do not fit last.

    Fewer devices are divisors of p (p / devices replicas run), powers of two and whole nodes.
    With exactly=True there are none of these. dtypes: as in `step_cost`.

    Raises ValueError if p is more than the topology joins.
    """
    topology.check_devices(p)
    steps = [
        step_cost(model, plan, batch, context, topology, rates, **dtypes)
        for n in ([p] if exactly else numbers_of_devices(p, topology.node_size))
        for plan in plans(model, batch, n, merges)
        if lies_well(plan, topology)
    ]
    return sorted(steps, key=_rank)


def _rank(step: Step) -> tuple:
    """Plans that fit come first, then by microseconds, devices and shares of a sequence."""
    plan = step.plan
    return not step.fits, round(step.seconds, 6), plan.devices, plan.sequence


def numbers_of_devices(p: int, node_size: int) -> list[int]:
    """p, its divisors, and the powers of two and whole nodes below p."""
    powers = {1 << k for k in range(p.bit_length())}
    return sorted(powers | set(divisors(p)) | set(range(node_size, p, node_size)))


def least_devices(
    model: Model,
    batch: int,
    context: int,
    topology: Topology,
    *,
    weight_dtype: str = "bfloat16",
    cache_dtype: str = "bfloat16",
) -> int | None:
    """The least devices on which a plan fits, in whole nodes beyond one; None if no plan fits."""
    room = (1 - HEADROOM) * topology.device.memory_bytes
    dtypes = ((weight_dtype, weight_dtype), cache_dtype)
    everything = held_bytes(model, Plan(), batch, context, *dtypes)
    node = topology.node_size
    for p in [*range(1, node), *range(node, topology.capacity + 1, node)]:
        if 2 * p * room < everything:  # a pipeline's ends have one embedding each: at least half
            continue
        for plan in plans(model, batch, p, merges=("gather",)):
            held = held_bytes(model, plan, batch, context, *dtypes)
            if held <= room and lies_well(plan, topology):
                return p
    return None


# ------------------------------------------------------------------------------------ as text


def best_of_each(steps: Sequence[Step]) -> list[Step]:
    """The best plan of each kind, in the order of the steps. All pipelines are one kind."""
    best: dict[tuple | str, Step] = {}
    for step in steps:
        plan = step.plan
        kind = (plan.family, plan.split_weights, plan.copies > 1)
        best.setdefault("a pipeline" if plan.stages > 1 else kind, step)
    return list(best.values())


def advice_table(steps: Sequence[Step]) -> str:
    """The best plan of each kind: its parts in milliseconds.

    held: bytes of weights and cache on a device; on: devices that the plan uses.
    """
    parts = ("step", "weights", "attend", "merge", "sums", "kernels", "held", "on")
    rows = [("ms", *parts, "plan")]
    for step in best_of_each(steps):
        times = (f"{1e3 * x:.2f}" for x in (step.seconds, *step[1:6]))
        where = (f"{step.memory_bytes / 1e9:.3g} GB", str(step.plan.devices))
        text = f"{step.plan}{'' if step.fits else ': does not fit'}"
        rows.append((step.plan.family, *times, *where, text))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *middle, last in rows:
        middle = [text.rjust(width) for text, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *middle, last]).rstrip())
    return "\n".join(lines)
