"""A described network on which collectives take what they were measured to take.

Where a file of `treeattn.measured` has a plan's group of devices, its times count; else the
description does, and `network_text` says which of the two a plan rests on.
"""

from labs.cost.formulas import Workload
from labs.cost.merges import merge_messages
from labs.cost.network import is_measured
from labs.cost.placement import every_nth
from labs.cost.sharding import Plan, stage_stride
from labs.cost.topology import Topology


def network_text(plan: Plan, topology: Topology, p: int) -> list[str]:
    """Lines that say on which network a plan was priced, of plans for p devices or fewer.

    None for a network that is described alone.
    """
    times = topology.measured
    if times is None:
        return []
    versions = ", ".join(f"{name} {version}" for name, version in times.versions.items())
    lines = [
        f"network: as measured on {times.count} × {times.device} on {times.date} ({versions}),",
        f"  and as {topology.name} is described among groups of devices that were not measured;",
        "  without kernels of one's own and sums in the switch, which are not in the file",
    ]
    told = []
    for what, kind, devices, stride in _sent(plan, topology):
        how = "measured" if is_measured(kind, devices, every_nth(topology, stride)) else "described"
        apart = "" if stride == 1 else f", every {stride},"
        text = f"{what} among {devices}{apart} {how}"
        if text not in told:
            told.append(text)
    if told:
        lines.append(f"  of this plan: {'; '.join(told)}")
    if p > times.count:
        lines.append(f"  measured and described times do not compare: calibrate on all {p} devices")
    return lines


def _sent(plan: Plan, topology: Topology) -> list[tuple[str, str, int, int]]:
    """(what is sent, by which kind, among how many devices, how far apart) in a plan's step."""
    found = []
    if plan.merge:
        apart = plan.merge_stride
        node_size = every_nth(topology, apart).node_size
        for x in merge_messages(plan.merge, Workload(1), plan.sequence, node_size=node_size):
            found.append(("merges", x.kind, x.devices or plan.sequence, x.stride * apart))
    if plan.weights_over > 1:
        found.append(("Allreduces", "allreduce", plan.weights_over, 1))
    if plan.stages > 1:
        found.append(("what stages send", "butterfly", 2, stage_stride(plan, topology)))
    return found
