"""Asks tokamax's own tests about the drop-in of site/howto_model.md, over a sharded cache.

    pip install . tokamax flax chex pytest && python conformance/peers.py [a test's name …]

tokamax's wheel has its tests, as a class that takes the function to test. Its inputs and
tolerances stay as they are. `subject` says tokamax's arguments in the drop-in's. Prints the page's
table; the exit code is 1 if a test failed.
"""

import functools
import sys
import unittest
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp

import treeattn

try:
    from tokamax._src import quantization
    from tokamax._src.ops.attention import base, test_base
except ImportError as error:
    raise SystemExit(f"{__doc__}\n{error}") from None

PAGE = Path(__file__).parents[1] / "site" / "howto_model.md"
DEVICES = 4


class Refused(Exception):
    """An option that the drop-in does not have."""


def drop_in():
    """The page's function, for a cache over the devices."""
    code = PAGE.read_text(encoding="utf-8").partition("```python\n")[2]
    names: dict = {}
    exec(compile(code.partition("\n\nsimulate_devices")[0], str(PAGE), "exec"), names)
    cache = jax.NamedSharding(treeattn.kv_mesh(), jax.P(None, "kv"))
    return functools.partial(names["dot_product_attention"], sharding=cache)


def subject(attention, q, k, v, *, bias=None, mask=None, is_causal=False, **options):
    """tokamax's arguments: any batch axes, its Mask, indices, a soft-cap, residuals."""
    if options.get("dropout_mask") is not None:
        raise Refused("dropout")
    if not (options.get("normalize_output", True) or options.get("return_residuals")):
        raise Refused("an output that is not divided")
    q, k, v = map(quantization.as_array, (q, k, v))
    *rows, q_len, _, d = q.shape
    kv_len = k.shape[-3]
    room = -kv_len % DEVICES  # keys that no query sees, because shards are equal

    at = (
        length if options.get(name) is None else options[name]
        for name, length in (("q_indices", q_len), ("k_indices", kv_len))
    )
    mask = mask if isinstance(mask, base.Mask) else base.Mask(mask)
    mask = (mask & base.Mask(is_causal=is_causal)).as_array(*at)
    scale = options.get("logits_scale", d**-0.5)
    if cap := options.get("logits_soft_cap"):  # as site/variants.md caps them
        scores = scale * jnp.einsum("...lhd,...nhd->...hln", q, k)
        bias = cap * jnp.tanh((scores if bias is None else scores + bias) / cap) - scores

    def over_rows(x):
        """A mask's or a bias's one batch axis."""
        if x is not None:
            heads = x.shape[-3] if x.ndim > 2 else 1
            x = jnp.broadcast_to(x, (*rows, heads, x.shape[-2], kv_len))
            x = jnp.pad(x.reshape(-1, *x.shape[-3:]), ((0, 0), (0, 0), (0, 0), (0, room)))
        return x

    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    k, v = (jnp.pad(x, ((0, 0), (0, room), (0, 0), (0, 0))) for x in (k, v))
    out, lse = attention(
        q,
        k,
        v,
        over_rows(bias),
        over_rows(mask),
        scale=scale,
        key_value_seq_lengths=jnp.full(len(k), kv_len),
        return_residual=True,
    )
    out, lse = (x.reshape(*rows, *x.shape[1:]) for x in (out, lse))
    if options.get("return_residuals"):  # (m, d): an output that is divided has d = 1 at m = lse
        return out, (lse.mT, jnp.ones_like(lse.mT))
    return out


class Ours(test_base.AttentionTestBase):
    def __init__(self, *names):
        attention = functools.partial(subject, drop_in())
        super().__init__(*names, attention_fn=attention, supports_precisions=False)


def main(names: list[str]) -> int:
    treeattn.simulate_devices(DEVICES)
    counts = {"passed": [], "refused": [], "skipped": [], "failed": []}
    for name in names or unittest.TestLoader().getTestCaseNames(Ours):
        result = unittest.TestResult()
        Ours(name)(result)
        said = "".join(text for _, text in (*result.errors, *result.failures, *result.skipped))
        kind = "skipped" if result.skipped else "failed" if said else "passed"
        kind = "refused" if "Refused: " in said else kind
        counts[kind].append(name)
        print(f"{kind}: {name} {said.strip().splitlines()[-1:]}", file=sys.stderr, flush=True)
    versions = ", ".join(f"{x} {metadata.version(x)}" for x in ("tokamax", "jax", "flax"))
    print(f"| versions | {' | '.join(counts)} |\n|{'---|' * 5}")
    print(f"| {versions} | {' | '.join(str(len(x)) for x in counts.values())} |")
    return bool(counts["failed"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
