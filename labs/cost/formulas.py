"""The papers' formulas for what decoding sends and holds, for any number of key heads.

Everything here counts *elements*, as the papers do: multiply by the bytes of an element. The
symbols are theirs: batch b, chunk t = N/p, head dimension d_h, n_h query heads and d = d_h n_h.
They assume as many key heads as query heads; here the keys' and values' width is
d_kv = d_h n_kv, which is d in their case. Where p does not divide N, t is the longest chunk's.

The 2024 text's eq. 29-35 are the 2025 text's eq. 8-14.
"""

from dataclasses import dataclass, fields

from treeattn.idea.arrays import integer

Number = int | float

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
STORED_BYTES = DTYPE_BYTES | {"int8": 1}  # of what is stored and not computed with; no scales


@dataclass(frozen=True)
class Workload:
    """One decode step: what attends to what.

    context:     keys and values in the cache, N
    batch:       sequences, b
    heads:       query heads, n_h
    kv_heads:    key and value heads, n_kv; as many as query heads when None
    head_dim:    d_h
    queries:     new tokens that attend at once: 1, or more for speculative decoding
    dtype:       of the queries and outputs, one of `DTYPE_BYTES`
    layers:      attention layers, each with its own cache
    value_dim:   of a value and an output; d_h when None
    latent:      whether a value is the first `value_dim` numbers of its key, as in MLA (arXiv
                 2405.04434): then the cache holds keys alone
    cache_dtype: of the cache, one of `STORED_BYTES`; as `dtype` when None

    Raises TypeError for a size that is not a whole number, ValueError for one below 1, for heads
    that the key heads do not divide, for latent values longer than their keys, and for an unknown
    dtype.
    """

    context: int
    batch: int = 1
    heads: int = 16
    kv_heads: int | None = None
    head_dim: int = 128
    queries: int = 1
    dtype: str = "bfloat16"
    layers: int = 1
    value_dim: int | None = None
    latent: bool = False
    cache_dtype: str | None = None

    def __post_init__(self):
        usual = {"kv_heads": self.heads, "value_dim": self.head_dim, "cache_dtype": self.dtype}
        for name, value in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for field in fields(self):
            if field.name not in ("dtype", "cache_dtype", "latent"):
                size = integer(field.name, getattr(self, field.name), 1)
                object.__setattr__(self, field.name, size)  # NumPy's would overflow
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: expected a divisor of {self.heads} heads, got {self.kv_heads}"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if self.cache_dtype not in STORED_BYTES:
            known = ", ".join(STORED_BYTES)
            raise ValueError(f"cache_dtype: expected one of {known}, got {self.cache_dtype!r}")
        if self.latent and self.value_dim > self.head_dim:
            raise ValueError(
                f"value_dim: a latent value is a part of its key, of {self.head_dim} numbers, "
                f"got {self.value_dim}"
            )

    @property
    def d(self) -> int:
        """Width of a token's queries, d = d_h n_h."""
        return self.heads * self.head_dim

    @property
    def d_kv(self) -> int:
        """Width of a token's keys, d_kv = d_h n_kv."""
        return self.kv_heads * self.head_dim

    @property
    def d_out(self) -> int:
        """Width of a token's output: d, where values are as long as keys."""
        return self.heads * self.value_dim

    @property
    def kv_width(self) -> int:
        """Numbers of a token in the cache: 2 d_kv, where values are as long as keys."""
        values = 0 if self.latent else self.kv_heads * self.value_dim
        return self.d_kv + values

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of the queries and the outputs."""
        return DTYPE_BYTES[self.dtype]

    @property
    def cache_bytes(self) -> int:
        """Bytes of an element of the cache."""
        return STORED_BYTES[self.cache_dtype]

    def chunk(self, p: int) -> int:
        """Keys on a device, t = ⌈N/p⌉: the longest chunk where p does not divide N."""
        return -(-self.context // integer("p", p, 1))


def mem_ring(w: Workload, p: int) -> int:
    """Mem_ring = 4 b t d_kv + 2 b d: peak elements on a device in a ring.

    (2024 eq. 29, 2025 eq. 8.)

    Its own keys and values, those that are coming in, the queries and the output.
    """
    return 2 * numel_kv(w, p) + w.batch * w.queries * (w.d + w.d_out)


def mem_tree(w: Workload, p: int) -> int:
    """Mem_tree = 2 b t d_kv + 2 b d + 2 b n_h: peak elements on a device.

    (2024 eq. 30, 2025 eq. 9.)

    Its own keys and values, the queries and the state (numerator, denominator, max).
    """
    return numel_kv(w, p) + w.batch * w.queries * w.d + numel_state(w)


def v_ring(w: Workload, p: int) -> int:
    """V_ring = 2 b t d_kv p: elements that *all* devices send in *one* step.

    (2024 eq. 31, 2025 eq. 10.)

    A whole round of the ring is p − 1 such steps, in which each device sends
    (p − 1) `numel_kv`. The papers set this sum over the devices beside `v_tree`, which is one
    device's share.
    """
    return numel_kv(w, p) * integer("p", p, 1)


def numel_kv(w: Workload, p: int) -> int:
    """numel(k, v) = 2 b t d_kv: elements of one chunk. (2024 eq. 32, 2025 eq. 11.)"""
    return w.batch * w.chunk(p) * w.kv_width


def v_allreduce(numel: Number, p: int) -> float:
    """V_Allreduce = 2 (p − 1)/p numel: elements that each device sends. (2024 eq. 33, 2025 eq. 12.)

    What a ring Allreduce sends, the least that any can. Other algorithms send more in fewer
    rounds.
    """
    p = integer("p", p, 1)
    return 2 * (p - 1) / p * numel


def numel_state(w: Workload) -> int:
    """numel(n, d, m) = b d + 2 b n_h: elements of a state. (2024 eq. 34, 2025 eq. 13.)"""
    return w.batch * w.queries * (w.d_out + 2 * w.heads)


def v_tree(w: Workload, p: int) -> float:
    """V_Tree = 2 (p − 1)/p (b d + 2 b n_h): elements that each device sends.

    (2024 eq. 35, 2025 eq. 14.)
    """
    return v_allreduce(numel_state(w), p)
