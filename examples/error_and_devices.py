"""Why does the error grow with the number of devices? Because of what is rounded on the way.

    python examples/error_and_devices.py

Attention of one query to 2,048 keys, dealt to p devices, merged in a chain as a ring does, or in a
tree. The ways differ only in the numbers kept between two merges: float32, or 16 bits of `out`, of
`lse`, or of sums that were not divided yet. Plain NumPy; errors are relative, against float64.
"""

import argparse

import numpy as np

from treeattn_conformance import attend, bfloat16

DEVICES = 1, 2, 4, 8, 16, 32, 64, 128, 256


def shards(p, keys=2048, heads=16, dim=64, seed=0):
    """([(out, lse) of each of p shards], out of all keys), in float64."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(1, 1, heads, dim))
    k = rng.normal(size=(1, keys, heads, dim))
    v = 1 + rng.normal(size=(1, keys, heads, dim))
    cuts = zip(np.split(k, p, axis=1), np.split(v, p, axis=1), strict=True)
    return [attend(q, *cut) for cut in cuts], attend(q, k, v)[0]


def merged(a, b):
    """The pair of both sets of keys."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = np.logaddexp(lse_a, lse_b)
    out = out_a * np.exp(lse_a - lse)[..., None] + out_b * np.exp(lse_b - lse)[..., None]
    return out, lse


def chain(parts, keep):
    """One after the other, as they come round a ring; `keep` rounds what is kept of each merge."""
    kept = keep(*parts[0])
    for part in parts[1:]:
        kept = keep(*merged(kept, keep(*part)))
    return kept[0]


def tree(parts, keep):
    """In pairs, then pairs of pairs."""
    parts = [keep(*part) for part in parts]
    while len(parts) > 1:
        parts = [keep(*merged(*pair)) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0][0]


def sums(parts, keep):
    """A chain of sums Σ eˢv and Σ eˢ, which are divided at the end."""
    top = max(lse.max() for _, lse in parts)
    numerator, denominator = 0.0, 0.0
    for out, lse in parts:
        weight = np.exp(lse - top)
        numerator, denominator = keep(numerator + out * weight[..., None], denominator + weight)
    return numerator / denominator[..., None]


def float32(out, lse):
    return out.astype("float32"), lse.astype("float32")


def out_in_16_bits(out, lse):
    return bfloat16(out), lse.astype("float32")


def lse_in_16_bits(out, lse):
    return out.astype("float32"), bfloat16(lse)


def both_in_16_bits(a, b):
    return bfloat16(a), bfloat16(b)


WAYS = {
    "all in float32, chain": (chain, float32),
    "all in float32, tree": (tree, float32),
    "out in bfloat16, chain": (chain, out_in_16_bits),
    "out in bfloat16, tree": (tree, out_in_16_bits),
    "lse in bfloat16, chain": (chain, lse_in_16_bits),
    "lse in bfloat16, tree": (tree, lse_in_16_bits),
    "sums in bfloat16, chain": (sums, both_in_16_bits),
}


def errors() -> dict[str, list[float]]:
    """For each way the error at each number of devices: relative, in the 2-norm."""
    dealt = [shards(p) for p in DEVICES]
    found = {}
    for name, (way, keep) in WAYS.items():
        outs = [(way(parts, keep), right) for parts, right in dealt]
        norm = np.linalg.norm
        found[name] = [float(norm(out - right) / norm(right)) for out, right in outs]
    return found


def main() -> None:
    print(f"{'devices':24}" + "".join(f"{p:>9}" for p in DEVICES))
    for name, row in errors().items():
        print(f"{name:24}" + "".join(f"{error:9.0e}" for error in row))


if __name__ == "__main__":
    as_written = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=as_written).parse_args()
    main()
