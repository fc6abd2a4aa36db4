"""Programs for a described GPU: compiled from shapes alone, their kernels, and a Llama's step."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp

from treeattn_llama import Config, Layer, Llama, Weights, rotary_frequencies

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


def zero_weights(config: Config) -> Weights:
    """Weights of those sizes in bfloat16: of a program, only shapes matter."""

    def zeros(*shape: int):
        return jnp.zeros(shape, jnp.bfloat16)

    q = config.heads * config.head_dim
    kv = config.kv_heads * config.head_dim
    layer = Layer(
        attention_norm=zeros(config.width),
        qkv=zeros(q + 2 * kv, config.width),
        output=zeros(config.width, q),
        mlp_norm=zeros(config.width),
        gate_up=zeros(2 * config.mlp_width, config.width),
        down=zeros(config.width, config.mlp_width),
    )
    embedding = zeros(config.vocabulary, config.width)
    frequencies = jnp.asarray(rotary_frequencies(config))
    norm = zeros(config.width)
    return Weights(embedding, (layer,) * config.layers, norm, embedding, frequencies)


def llama_step(config: Config, device, rows: int, tokens: int, capacity: int, implementation: str):
    """The program of a step of one token a row, or of a tree of so many, over a cache."""
    of = functools.partial(array, device)

    def shapes(f):
        return jax.tree.map(lambda x: of(*x.shape, dtype=x.dtype), jax.eval_shape(f))

    weights = shapes(lambda: zero_weights(config))
    model = Llama(config, weights, implementation=implementation)
    cache = shapes(lambda: model.new_cache(rows, capacity))
    mask = of(1, tokens, tokens, dtype=jnp.bool_) if tokens > 1 else None

    def step(weights, new, cache, mask):
        return dataclasses.replace(model, weights=weights).extend(new, cache, mask=mask)

    return compiled(step, weights, of(rows, tokens, dtype=jnp.int32), cache, mask)
