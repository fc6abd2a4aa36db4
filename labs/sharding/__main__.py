"""python -m labs.sharding: what one step of a layer sends on eight simulated devices, and holds."""

import argparse

import jax
import numpy as np
from jax.sharding import NamedSharding

import treeattn
from labs.sharding.layer import Cache, Sizes, Weights, cache_specs, layer_step, weight_specs

LLAMA_8B = Sizes(width=4096, heads=32, kv_heads=8, head_dim=128, mlp_width=14336)
SLOTS = 8192  # of each row's cache


def described(sizes: Sizes, batch: int, n: int, mesh) -> tuple[Weights, Cache]:
    """The shapes and shardings of a layer and its cache, without numbers."""
    w, h, h_kv, d, m = sizes
    shapes = Weights(
        query=(w, h * d),
        key=(w, h_kv * d),
        value=(w, h_kv * d),
        output=(h * d, w),
        gate=(w, m),
        up=(w, m),
        down=(m, w),
        attention_norm=(w,),
        mlp_norm=(w,),
    )

    def array(shape, spec, dtype=np.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = Weights(*map(array, shapes, weight_specs()))
    k, v, lengths = cache_specs()
    keys = (batch, n, h_kv, d)
    return weights, Cache(array(keys, k), array(keys, v), array((batch,), lengths, np.int32))


def program(sizes: Sizes, batch: int, n: int, mesh):
    """The compiled step of a layer."""
    weights, cache = described(sizes, batch, n, mesh)
    spec = NamedSharding(mesh, cache_specs().lengths)
    x = jax.ShapeDtypeStruct((batch, sizes.width), np.float32, sharding=spec)
    step = jax.jit(lambda *given: layer_step(*given, sizes=sizes, mesh=mesh), donate_argnums=2)
    return step.lower(x, weights, cache).compile()


def axes_crossed(collective, mesh) -> list[str]:
    """The axes along which the devices of a group have different places."""
    shape = tuple(mesh.shape.values())
    together = [np.unravel_index(group, shape) for group in collective.groups or [range(mesh.size)]]
    return [
        name
        for i, name in enumerate(mesh.axis_names)
        if any(np.ptp(places[i]) for places in together)
    ]


def crossings(found, mesh) -> str:
    """A line for each collective: the axes that it crosses, and the bytes that a device puts in."""
    lines = [f"{'collective':12}{'crosses':12}{'bytes put in':>12}  operands"]
    for c in found:
        axes = ", ".join(axes_crossed(c, mesh))
        lines.append(f"{c.kind:12}{axes:12}{c.total_bytes:12,}  {' '.join(c.shapes)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for axis in ("batch", "heads", "kv"):
        parser.add_argument(f"--{axis}", type=int, default=2, help=f"devices along {axis} (2)")
    asked = parser.parse_args()
    treeattn.simulate_devices(asked.batch * asked.heads * asked.kv)
    mesh = treeattn.kv_mesh(batch=asked.batch, heads=asked.heads)
    compiled = program(LLAMA_8B, asked.batch, SLOTS, mesh)
    held = treeattn.memory(compiled)
    print(f"A layer of Llama 3.1 8B's sizes, float32, one token a row, on {dict(mesh.shape)}\n")
    print(crossings(treeattn.collectives(compiled), mesh))
    print(f"\na device holds {held.argument_bytes / 1e6:.0f} MB of weights and cache")


if __name__ == "__main__":
    main()
