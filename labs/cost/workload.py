"""The sizes of one layer's attention in a decode step, and the bytes that follow from them."""

from dataclasses import dataclass, fields

Number = int | float

# Bytes of a number that is stored; scales of small formats are not counted.
STORED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1, "int4": 0.5}


def whole(name: str, value, least: int = 1) -> int:
    """value as an int. Raises TypeError if it is not whole, ValueError if it is below least."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    return value.__index__()


def stored_bytes(name: str, dtype: str) -> Number:
    """Bytes of a number of this dtype. Raises ValueError for an unknown dtype."""
    if dtype not in STORED_BYTES:
        raise ValueError(f"{name}: expected one of {', '.join(STORED_BYTES)}, got {dtype!r}")
    return STORED_BYTES[dtype]


@dataclass(frozen=True)
class Workload:
    """One layer of a decode step.

    context:     keys and values in the cache of each sequence
    batch:       sequences
    heads:       query heads
    kv_heads:    key and value heads; as many as query heads when None
    head_dim:    of a query and a key
    queries:     new tokens of each sequence, which attend at once
    dtype:       of queries and outputs; states are float32
    value_dim:   of a value and an output; head_dim when None
    latent:      whether a value is a part of its key (MLA, arXiv 2405.04434), so that the cache
                 holds keys alone
    cache_dtype: as `dtype` when None

    Raises TypeError for a size that is not a whole number, ValueError for one below 1, for heads
    that the key heads do not divide, and for an unknown dtype.
    """

    context: int
    batch: int = 1
    heads: int = 16
    kv_heads: int | None = None
    head_dim: int = 128
    queries: int = 1
    dtype: str = "bfloat16"
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
                size = whole(field.name, getattr(self, field.name))
                object.__setattr__(self, field.name, size)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: expected a divisor of {self.heads} heads, got {self.kv_heads}"
            )
        stored_bytes("dtype", self.dtype)
        stored_bytes("cache_dtype", self.cache_dtype)

    @property
    def rows(self) -> int:
        """Queries of all heads and sequences. Each has a maximum and a denominator."""
        return self.batch * self.queries * self.heads

    @property
    def query_bytes(self) -> Number:
        return self.rows * self.head_dim * STORED_BYTES[self.dtype]

    @property
    def output_bytes(self) -> Number:
        return self.rows * self.value_dim * STORED_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """Numerators, denominators and maxima, in float32: 2024 eq. 34 (2025 eq. 13) in bytes."""
        return 4 * self.rows * (self.value_dim + 2)

    def keys_on(self, p: int) -> int:
        """Keys of a sequence on each of p devices; the longest share where p does not divide."""
        return -(-self.context // p)

    def bytes_of(self, keys: int) -> Number:
        """Bytes of so many keys and values of each sequence: 2024 eq. 32 (2025 eq. 11)."""
        width = self.head_dim + (0 if self.latent else self.value_dim)
        return self.batch * keys * self.kv_heads * width * STORED_BYTES[self.cache_dtype]

    def cache_bytes(self, p: int = 1) -> Number:
        """Keys and values on each of p devices."""
        return self.bytes_of(self.keys_on(p))

    def flops(self, keys: int) -> int:
        """Operations of attending to so many keys: two products, with queries and with values."""
        return 2 * self.rows * keys * (self.head_dim + self.value_dim)
