"""05's task: Algorithm 3, on eight devices."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import treeattn
from course.plane import PLACES, SCORES, plane
from course.verdict import FEW_DIGITS, Mistake, call, verdict

GIVEN = "q (2, 1, 8, 64), k and v (2, 125, 4, 64), so attend's m and d (2, 1, 8), n (2, 1, 8, 64)"


def on_devices(mine):
    """The program that runs `mine` on eight devices, keys and values sharded along the keys."""
    mesh = treeattn.kv_mesh(jax.devices()[:8])
    keys = P(None, "kv")
    specs = {"in_specs": (P(), keys, keys), "out_specs": P()}
    return jax.jit(jax.shard_map(mine, mesh=mesh, check_vma=False, **specs))


@cache
def inputs() -> tuple:
    """q, k, v and the attention: two texts, 8 query heads on 4 key heads, 1,000 keys."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 1, 8, 64)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 1000, 4, 64)), jnp.float32) for _ in "kv")
    return q, k, v, treeattn.attention(q, k, v)


def words_on_devices() -> tuple:
    """Five words, a device each, but milk: two eighths of its mass on each of four devices."""
    some = [0, 1, 2, 3, 4, 4, 4, 4]
    scores = SCORES[some] - np.log(np.where(np.array(some) == 4, 4, 1))
    q = jnp.ones((1, 1, 1, 1), "float32")
    return (
        q,
        jnp.asarray(scores, "float32").reshape(1, 8, 1, 1),
        jnp.asarray(PLACES[some])[None, :, None],
    )


def explanations() -> dict:
    """The mistake -> what comes out."""
    q, k, v, _ = inputs()
    pieces = zip(jnp.split(k, 8, axis=1), jnp.split(v, 8, axis=1), strict=True)
    states = [treeattn.attend(q, *shard) for shard in pieces]
    m, d, n = (jnp.stack(x) for x in zip(*states, strict=True))  # with an axis of devices
    d, weight = d[..., None], jnp.exp(m - m.max(0))[..., None]
    of_heads = jnp.exp(m - m.max(-1, keepdims=True))[..., None]
    outs = n / d
    made = {  # of n, or of d
        "weighted and added": lambda x: (x * weight).sum(0),
        "added without weights": lambda x: x.sum(0),
        "weighted upside down by exp(max - m)": lambda x: (x / weight).sum(0),
        "weighted and not added": lambda x: (x * weight)[0],
        "neither weighted nor added": lambda x: x[0],
        "weighted and averaged, not added": lambda x: (x * weight).mean(0),
        "weighted twice": lambda x: (x * weight**2).sum(0),
    }
    largest = "the largest m was taken over the device's own heads: pmax takes it over the devices"
    groups = (jnp.tile(x, (1, 1, 2, 1)) for x in (k, v))
    return {
        "the scores were divided by √dim twice: treeattn.attend does so": treeattn.attention(
            q / 8, k, v
        ),
        "the scores were not divided by √dim": treeattn.attention(q, k, v, scale=1.0),
        "query heads met other heads' keys: share keys as jnp.repeat does": treeattn.attention(
            q, *groups
        ),
        "keys and values are swapped": treeattn.attention(q, v, k),
        "nothing was reduced: this is the first device's answer": outs[0],
        "the devices' answers were added, not their sums": outs.sum(0),
        "the devices' answers were averaged, whatever they weigh": outs.mean(0),
        "the devices' answers were weighted by m alone": (outs * weight).sum(0) / weight.sum(0),
        "n was divided by the local d before it was added": (outs * weight).sum(0),
        "n was divided twice: by the local d, and by the d of all": (outs * weight).sum(0)
        / (d * weight).sum(0),
        "n was not divided by d": (n * weight).sum(0),
        "n was neither weighted nor divided": n.sum(0),
        largest: (n * of_heads).sum(0) / (d * of_heads).sum(0),
        **{f"n and d were {x}": made[x](n) / made[x](d) for x in made},
        **{f"n was {x}, but d was {y}": made[x](n) / made[y](d) for x in made for y in made},
    }


def run(program, q, k, v) -> jax.Array:
    found = call(program, q, k, v, given=GIVEN)
    if not isinstance(found, jax.Array):
        raise Mistake(f"it returned {type(found).__name__}, not n / d")
    return found


def picture(program):
    """What draws the answer to five words; None if there is none to draw."""
    try:
        found = run(program, *words_on_devices())
        place = np.asarray(found, np.float64).reshape(2)
    except (Mistake, ValueError):
        return None
    return partial(plane, right=(None, np.array([1.25, 2.25])), yours=(None, place))


@verdict
def check_algorithm_3(mine):
    """The mistake that explains what Algorithm 3 gives on eight devices."""
    q, k, v, exact = inputs()
    program = on_devices(mine)
    compiled = call(lambda *x: program.lower(*x).compile(), q, k, v, given=GIVEN)
    found = run(compiled, q, k, v)
    if found.shape != exact.shape:
        raise Mistake(f"the shape is {found.shape}, expected {exact.shape}")
    drawn = picture(program)
    if not jnp.allclose(found, exact, atol=1e-5):
        close = (x for x, y in explanations().items() if jnp.allclose(found, y, atol=1e-5))
        few = jnp.linalg.norm(found - exact) < 0.02 * jnp.linalg.norm(exact)
        other = FEW_DIGITS if few else f"wrong by up to {abs(found - exact).max():.2g}"
        raise Mistake(next(close, other), drawn)
    for device, shard in enumerate(found.addressable_shards):
        if not jnp.allclose(shard.data, exact, atol=1e-5):
            raise Mistake(f"right on device 0, wrong on device {device}: all need it")
    one_head = run(compiled, q.at[:, :, 0].multiply(1000), k, v)[:, :, 1:]
    if not jnp.allclose(one_head, exact[:, :, 1:], atol=1e-5):
        raise Mistake("one maximum for all heads: each head has its own largest m")
    one_text = run(compiled, q.at[0].multiply(1000), k, v)[1]
    if not jnp.allclose(one_text, exact[1], atol=1e-5):
        raise Mistake("one maximum for all texts: each text has its own largest m")
    if not jnp.isfinite(run(compiled, 1000 * q, k, v)).all():
        raise Mistake(
            "large scores overflow: before exp, subtract from m the largest m of all devices"
        )
    if sum(c.total_bytes for c in treeattn.collectives(compiled)) >= k.nbytes / 8:
        raise Mistake("right, but keys or values travel: send the state alone")
    return drawn
