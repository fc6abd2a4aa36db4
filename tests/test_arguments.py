"""What calls take: each wrong argument raises a ValueError or a TypeError that names it, and says
what was expected and what came."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from attentions import OTHERS, over
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from treeattn import (
    AttentionState,
    attend,
    attention,
    causal_energy,
    cumulant,
    energy,
    from_output,
    kv_mesh,
    log_likelihood,
    merge,
    merge_across,
    pack,
    packed_token_indices,
    prefix_encoding,
    reduce_chain,
    reduce_tree,
    ring_attention,
    ring_decode,
    scan_states,
    shard_lengths,
    simulate_devices,
    striped_position,
    striped_slot,
    tree_decode,
    ulysses_attention,
    unpack,
)

# What each argument is not
NO_INTEGER = (2.5, 2.0, "2", None, [2], True, np.array([2]), np.float32(2), np.bool_(True), 1j)
POSITIVE = (*NO_INTEGER, 0, -1)

STATES = AttentionState(np.zeros(3), np.ones(3), np.ones((3, 2)))
BEAM = np.zeros((1, 2, 3), int)
Q, K = np.ones((2, 3, 4, 8), np.float32), np.ones((2, 5, 2, 8), np.float32)


def takes(function, given, error=(ValueError, TypeError), **wrong):
    """(argument, call, error) for each wrong value of each argument, beside what is given."""
    for argument, values in wrong.items():
        for value in values:
            call = functools.partial(function, **given | {argument: value})
            shown = re.sub(" at 0x[0-9a-f]+", "", repr(value))  # the same in every process
            name = f"{getattr(function, '__name__', 'call')} {argument}={shown:.30}"
            yield pytest.param(argument, call, error, id=name)


def across(**options):
    """`merge_across` on a device of a mesh of two."""
    body = functools.partial(merge_across, **{"state": STATES, "axis_name": "keys"} | options)
    return jax.shard_map(lambda: body(), mesh=over(keys=2).mesh, in_specs=(), out_specs=P())()


NO_HEADS = AttentionState.identity((), 2)
SLOTS = {"kv_len": (10,), "devices": POSITIVE}
EIGHT = {"kv_len": 8, "devices": 4}
SIX = {"devices": jax.devices()[:6], "batch": 2}
IDENTITY = {"shape": (), "value_dim": 2}
OUT = {"out": np.ones((1, 2, 4, 8)), "lse": np.ones((1, 2, 4))}
PACKED = {"packed": np.zeros((1, 9)), "unpack_map": BEAM}
# Of one query head: a source, a query, keys and values.
HEAD = {"zeta": np.ones(3), "q": np.ones(4), "k": np.ones((5, 4)), "v": np.ones((5, 3))}
AT_ZERO = {name: HEAD[name] for name in "qkv"}
GAMMA = HEAD | {"z": np.ones(3)}
CAUSAL = HEAD | {"zeta": np.ones((5, 3)), "q": np.ones((5, 4))}
# Of beams and programs their own tests ask more.
CALLS = [
    *takes(kv_mesh, {}, devices=([], [1], "kv"), nodes=(*POSITIVE[:3], 0, -1, 7), heads=(0, 1.5)),
    *takes(kv_mesh, SIX, ValueError, nodes=(4,), heads=(2,)),
    *takes(simulate_devices, {}, n=POSITIVE),
    *takes(reduce_tree, {"states": STATES}, arity=(*POSITIVE, 1), axis=(*NO_INTEGER, 1)),
    *takes(reduce_chain, {"states": STATES}, axis=(*NO_INTEGER, -2)),
    *takes(scan_states, {"states": STATES}, axis=NO_INTEGER),
    *takes(merge, {"a": STATES}, TypeError, b=(None, tuple(STATES))),
    *takes(merge, {"a": STATES}, ValueError, b=(AttentionState.identity((1,), 2),)),
    *takes(AttentionState.identity, IDENTITY, TypeError, dtype=(int, "int8", jnp.float8_e4m3fn)),
    *takes(AttentionState.identity, IDENTITY, TypeError, shape=(3,)),
    *takes(from_output, OUT, TypeError, out=(OUT["out"].astype(int),)),
    *takes(from_output, OUT, TypeError, lse=(jnp.ones((1, 2, 4), "bfloat16"),)),
    *takes(from_output, OUT, ValueError, lse=(np.ones((1, 4, 2)),)),
    *takes(across, {}, method=("tree", 3, None, "auto", "reduce_scatter")),
    *takes(across, {"method": "gather"}, axis_name=(("keys", "keys"),)),
    *takes(across, {"method": "all_to_all"}, state=(NO_HEADS,)),
    *takes(across, {"method": "hierarchical"}, state=(NO_HEADS,)),
    *(
        row
        for f in (pack, prefix_encoding, packed_token_indices)
        for row in (
            *takes(f, {}, TypeError, beam=(None, "a", BEAM > 0, jnp.ones((1, 2, 3)))),
            *takes(f, {}, ValueError, beam=(3, BEAM[0], BEAM[None])),
            *takes(f, {"beam": BEAM}, TypeError, lengths=(np.ones((1, 2)),)),
            *takes(f, {"beam": BEAM}, ValueError, lengths=(*BEAM, [0, 0], [[4, 0]], [[0, -1]])),
            *takes(f, {"beam": jnp.asarray(BEAM)}, ValueError, lengths=(jnp.array([[4, 0]]),)),
        )
    ),
    *takes(pack, {"beam": BEAM}, pad_token=(*NO_INTEGER, 2**70)),
    *takes(pack, {"beam": BEAM.astype(np.int8)}, ValueError, pad_token=(128,)),
    *takes(pack, {"beam": BEAM.astype(np.uint32)}, ValueError, pad_token=(-1,)),
    *takes(unpack, PACKED, packed=(np.zeros((2, 9)), "no")),
    *takes(unpack, PACKED, ValueError, unpack_map=(BEAM + 9, jnp.asarray(BEAM - 1))),
    *takes(unpack, PACKED | {"packed": np.zeros((1, 0))}, ValueError, unpack_map=(BEAM + 1,)),
    *takes(striped_slot, EIGHT | {"position": 3}, position=(3.0, -1, [7, 8]), **SLOTS),
    *takes(striped_position, EIGHT | {"slot": 3}, slot=(3.0, -1, [7, 8]), **SLOTS),
    *takes(shard_lengths, EIGHT | {"lengths": 3, "rank": 0}, lengths=(3.0, -1, [8, 9]), **SLOTS),
    *takes(energy, HEAD, ValueError, zeta=(np.ones(4),), q=(np.ones((1, 4)), np.ones(0))),
    *takes(energy, HEAD, ValueError, k=(np.ones((5, 3)), np.ones(4)), v=(np.ones((4, 3)),)),
    *takes(energy, HEAD, ValueError, mask=(np.ones(4, bool),), scale=(jnp.array(np.inf),)),
    *takes(energy, HEAD, TypeError, zeta=(np.ones(3, int),), mask=([1] * 5,), scale=("1",)),
    *takes(energy, HEAD, TypeError, q=(np.ones(4, complex), [1.0] * 4)),
    *takes(cumulant, AT_ZERO, order=(*NO_INTEGER, -1)),
    *takes(log_likelihood, GAMMA, ValueError, z=(np.ones(2),)),
    *takes(log_likelihood, GAMMA | {"z": np.ones(1)}, TypeError, zeta=([0.0],)),
    *takes(causal_energy, CAUSAL, ValueError, q=(np.ones((4, 4)),), zeta=(np.ones((4, 3)),)),
    *takes(causal_energy, CAUSAL, ValueError, v=(np.ones((4, 3)),), scale=(np.nan,)),
]


@pytest.mark.parametrize("argument, call, error", CALLS)
def test_a_wrong_argument_is_named(unchecked, argument, call, error):
    with pytest.raises(error, match=rf"^{argument}\b.*: (expected .*, got |\d devices cannot )"):
        call()


def test_two_dtypes_are_named(unchecked):
    states = STATES._replace(max=jnp.zeros(3, "float16"))
    with pytest.raises(TypeError, match=r"^expected one dtype, got states\.max float16"):
        scan_states(states)
    with pytest.raises(TypeError, match=r"^expected one dtype, got q float32"):
        energy(**HEAD | {"q": np.ones(4, "float32")})


class _Tensor:
    """Another library's array, as far as it can be told."""

    dtype, shape, ndim = np.dtype("float32"), (2, 3, 4, 8), 4

    def __dlpack__(self):
        raise AssertionError("not to be read without being asked")


class _Unhashable:
    __hash__ = None

    def __call__(self, *arrays, **options):
        raise AssertionError("never called")


# What no attention takes: (arguments, the error).
SMALL = {name: jnp.asarray(x, jnp.float8_e4m3fn) for name, x in (("q", Q), ("k", K), ("v", K))}
FOUR_BITS = jnp.asarray(K, jnp.float4_e2m1fn)
NOT_OVER = ["kv", over(keys=2).mesh]
ATTENTIONS = [
    ({"q": "a"}, TypeError, "q: "),
    ({"q": Q.astype(int)}, TypeError, "q: expected a floating-point"),
    ({"q": [[1.0], []]}, TypeError, "q: expected an array, got a ragged list"),
    ({"q": _Tensor()}, TypeError, "q: .*_Tensor: use jnp.from_dlpack"),
    (SMALL, TypeError, "q: expected 16 bits or more.*float8"),
    (
        {"k": K.astype(np.float16)},
        TypeError,
        "expected one dtype, got k float16",
    ),
    ({"k": K.astype(np.int8), "v": K.astype(np.int8)}, TypeError, "k: .*int8: .* scales.*variants"),
    ({"k": FOUR_BITS, "v": FOUR_BITS}, TypeError, "k: expected 8 bits or more.*float4"),
    ({"q": Q[0]}, ValueError, r"q: expected 4 axes.*\(3, 4, 8\)"),
    ({"k": K[0, 0, 0], "kv_lengths": 1}, ValueError, "k"),
    ({"k": K[:1], "v": K[:1]}, ValueError, r"k: expected shape \(2, 5, 2, 8\).*got \(1, 5, 2, 8\)"),
    ({"k": K[..., :7]}, ValueError, r"k: expected shape \(2, 5, 2, 8\).*got \(2, 5, 2, 7\)"),
    ({"v": K[:, :4]}, ValueError, r"v: expected shape \(2, 5, 2, 8\).*got \(2, 4, 2, 8\)"),
    ({"q": Q[:, :, :3]}, ValueError, r"q: expected.* multiple of k's 2, got \(.*, 3, "),
    ({"q": Q[..., :0], "k": K[..., :0]}, ValueError, "q: expected a head_dim"),
    ({"mask": np.ones((2, 1, 3, 5), np.float32)}, TypeError, r"mask: .*float32: use .astype\(bool"),
    ({"mask": np.ones((2, 3, 5), bool)}, ValueError, "mask: expected a shape"),
    ({"mask": [True, False]}, ValueError, "mask: expected a shape"),
    ({"mask": [[True], [True, True]]}, TypeError, "mask: .*got a ragged list"),
    ({"bias": np.ones((2, 4, 3, 4))}, ValueError, "bias: expected a shape"),
    ({"bias": np.ones((1, 1, 1, 5), int)}, TypeError, "bias: expected"),
    ({"kv_lengths": np.ones(3, int)}, ValueError, r"kv_lengths:.*\(2,\)"),
    ({"kv_lengths": np.ones(2)}, TypeError, "kv_lengths: .* integers"),
    ({"kv_lengths": [1.5, 2]}, TypeError, "kv_lengths: .*integers"),
    *[
        ({"kv_lengths": x}, ValueError, "kv_lengths: expected 0 to kv_len = 5 keys, got")
        for x in (6, [-1, 3], np.array([3, 2**33]))
    ],
    *[({name: float("nan")}, ValueError, f"{name}: .*nan") for name in ("scale", *OTHERS)],
    ({"scale": float("inf")}, ValueError, "scale: .*finite.*inf"),
    ({"scale": 1e39}, ValueError, "scale: expected a finite number of float32, got 1e.39"),
    ({"scale": 1j}, ValueError, "scale: expected a real number"),
    ({"scale": np.ones(2)}, ValueError, r"scale: .*\(2,\): multiply q .*variants"),
    *[({"scale": x}, TypeError, "scale: ") for x in ("1", object())],
    ({"causal": True}, ValueError, r"q: .*queries as keys, 5, got 3; .* mask=jnp.tri\(3, 5, 2, d"),
    ({"implementation": "flash"}, ValueError, "implementation: 'flash' needs a CUDA device, got"),
    *[
        ({"implementation": x}, ValueError, "implementation: expected one of .*, or a function")
        for x in ("pallas", 3, np.ones(3))
    ],
    ({"implementation": _Unhashable()}, TypeError, "implementation: .* that can be hashed"),
    *[({"sharding": x}, TypeError, "sharding: expected a NamedSharding") for x in NOT_OVER],
    ({"sharding": None}, ValueError, "sharding: k's sharding is unknown"),
    *[
        ({"sharding": NamedSharding(over(keys=2).mesh, spec)}, ValueError, f"sharding: {message}")
        for spec, message in (
            (P(*[None] * 3, "keys"), r"expected P\(batch, keys, heads\)"),
            (P(P.UNCONSTRAINED, "keys"), "expected P.batch, keys, heads. of axes' names"),
        )
    ],
    ({"sharding": over(rows=3)}, ValueError, "sharding: the 3 devices .* cannot share 2 texts"),
    ({"sharding": over(heads=3)}, ValueError, "sharding: .* cannot share 2 key heads"),
    ({"striped": True}, ValueError, "sharding: .* cannot share 5 slots"),
    *[
        ({"method": x}, ValueError, "method: expected one of")
        for x in ("ring", 3, None, ["gather"], np.ones(3))
    ],
    ({"method": _Unhashable()}, TypeError, "method: expected a function that can be hashed"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "function", [attend, attention, tree_decode, ring_decode, ring_attention, ulysses_attention]
)
def test_what_no_attention_takes(function):
    parameters = inspect.signature(function).parameters
    given = {"q": Q, "k": K, "v": K}
    given |= {"sharding": over(keys=2)} if "sharding" in parameters else {}
    given |= {"causal": False} if "causal" in parameters else {}
    for wrong, error, message in ATTENTIONS:
        if set(wrong) <= set(parameters):
            with pytest.raises(error, match=f"^{message}"):
                function(**given | wrong)


def test_the_packages_annotations_are_checked():
    with pytest.raises(jaxtyping.TypeCheckError):
        attend(Q[0], K, K)


def test_ulysses_wants_heads_for_everybody(unchecked):
    with pytest.raises(ValueError, match="q: expected heads that 3 devices can share"):
        ulysses_attention(K, K, K, sharding=over(keys=3))


@pytest.mark.parametrize(
    "n", [np.int8(7), np.uint64(7), jnp.int32(7), np.array(7)], ids=lambda n: type(n).__name__
)
def test_anybodys_whole_numbers_are_taken(unchecked, n):
    assert pack(BEAM, [[1, 1]], pad_token=n).packed_beam.tolist() == [[0]]
    assert reduce_tree(STATES, arity=n).max == 0
    assert kv_mesh(jax.devices()[:7], nodes=n).shape == {"node": 7, "device": 1}
    simulate_devices(n + 2)  # as many as there are
