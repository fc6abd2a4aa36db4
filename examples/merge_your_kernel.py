"""A kernel of your own over a sharded cache: what it needs to return, and how its parts merge.

    python examples/merge_your_kernel.py

A kernel that returns its output and the logarithm of its softmax's denominator can be run on any
shard of the keys. `from_output` makes a state of the two, and states merge.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import treeattn
from treeattn_conformance import check_attention


def my_kernel(q, k, v, mask):
    """Stands for yours. q (b, l, h, d), k and v (b, n, h, d), mask (b, 1, l, n) of bool.

    Returns out (b, l, h, d) and lse (b, h, l), in the axes of FlashAttention, natural logarithm.
    """
    s = jnp.einsum("blhd,bnhd->bhln", q, k) / jnp.sqrt(q.shape[-1])
    lse = jax.nn.logsumexp(s, axis=-1, where=mask)
    p = jnp.where(mask, jnp.exp(s - jnp.where(jnp.isinf(lse), 0, lse)[..., None]), 0)
    return jnp.einsum("bhln,bnhd->blhd", p, v), lse


def decode(mesh, q, k, v, mask):
    """(out, lse) of q over keys in shards: my_kernel on every device, and one merge."""

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(None, "kv"), P(None, "kv"), P(None, None, None, "kv")),
        out_specs=P(),
    )
    def on_a_device(q, k, v, mask):
        out, lse = my_kernel(q, k, v, mask)
        state = treeattn.from_output(out, lse.swapaxes(1, 2))  # lse (b, l, h), and in float32
        return treeattn.finalize(treeattn.merge_across(state, "kv"))

    return on_a_device(q, k, v, mask)


def main() -> None:
    treeattn.simulate_devices(4)  # leave out where there are real devices
    mesh = treeattn.kv_mesh()
    decode_jit = jax.jit(functools.partial(decode, mesh))

    def asked(q, k, v, *, mask=None, **options):
        """The kernel and its merge, as the conformance suite asks for them."""
        if options or k.shape[2] < q.shape[2] or k.shape[1] % mesh.size:
            raise NotImplementedError("masks only")
        shape = q.shape[0], 1, q.shape[1], k.shape[1]
        return decode_jit(q, k, v, np.ones(shape, bool) if mask is None else mask)

    report = check_attention(asked)
    print(report)
    print("conforms:", not report.names("failed"))


if __name__ == "__main__":
    as_written = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=as_written).parse_args()
    main()
