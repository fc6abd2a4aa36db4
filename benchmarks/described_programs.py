"""Programs for a described GPU: compiled from shapes alone, their kernels, and a Llama's step."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp

from treeattn.llama import Config, Layer, Llama, Weights

KIND = "NVIDIA H100 80GB HBM3"


def array(device, *shape: int, dtype=jnp.bfloat16):
    """An array on the described device, of which there is the shape only."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compiled(f, *arguments):
    """The program of f for the arguments' device."""
    about = jax.sharding.AbstractDevice(KIND, 132, "cuda")
    auto = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(auto,), abstract_device=about)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(f).trace(*arguments).lower().compile()


def kernels(program) -> list[str]:
    """The lines of a program's text that start a kernel."""
    entry = program.as_text().split("\nENTRY ")[1].split("\n}")[0]
    return [x for x in entry.splitlines() if re.search(r" (fusion|custom-call|copy)\(", x)]


def llama_step(config: Config, device, rows: int, tokens: int, capacity: int, implementation: str):
    """The program of a step of one token a row, or of a tree of so many, over a cache."""
    c = config
    of = functools.partial(array, device)
    q = c.heads * c.head_dim
    kv = c.kv_heads * c.head_dim
    layer = Layer(
        attention_norm=of(c.width),
        qkv=of(q + 2 * kv, c.width),
        output=of(c.width, q),
        mlp_norm=of(c.width),
        gate_up=of(2 * c.mlp_width, c.width),
        down=of(c.width, c.mlp_width),
    )
    embedding = of(c.vocabulary, c.width)
    frequencies = of(c.head_dim // 2, dtype=jnp.float32)
    weights = Weights(embedding, (layer,) * c.layers, of(c.width), embedding, frequencies)
    model = Llama(config, weights, implementation=implementation)
    cache = jax.eval_shape(lambda: model.new_cache(rows, capacity))
    cache = jax.tree.map(lambda x: of(*x.shape, dtype=x.dtype), cache)

    mask = of(1, tokens, tokens, dtype=jnp.bool_) if tokens > 1 else None

    def step(weights, new, cache, mask):
        return dataclasses.replace(model, weights=weights).extend(new, cache, mask=mask)

    return compiled(step, weights, of(rows, tokens, dtype=jnp.int32), cache, mask)
