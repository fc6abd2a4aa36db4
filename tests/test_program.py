"""The collectives of a program: written and compiled, in loops, joined, asynchronous."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from totals import count_collectives, total_bytes

from treeattn import kv_mesh
from treeattn.program import (
    Collective,
    collectives,
    collectives_table,
    memory,
)

REPLICATED, SHARDED = PartitionSpec(), PartitionSpec("kv")
X = jnp.ones((2, 16), jnp.float32)
CACHE = jnp.ones((64, 128), jnp.float32)  # 8 rows of 128 on each of 8 devices: 4,096 bytes
EIGHT = tuple(range(8))
RING = tuple((i, (i + 1) % 8) for i in EIGHT)


def sharded(body, mesh=None, in_specs=(REPLICATED, SHARDED), out_specs=REPLICATED):
    """`body` over 8 devices, jitted."""
    mesh = mesh or kv_mesh(jax.devices()[:8])
    specs = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    return jax.jit(jax.shard_map(body, mesh=mesh, **specs))


def lowered(body):
    """`body(x, shard)` over 8 devices, lowered."""
    return sharded(body).lower(X, CACHE)


def both(program):
    """The collectives as written, and those that XLA makes of them."""
    return collectives(program), collectives(program.compile())


def three_allreduces(x, shard):
    local = x + shard.sum()
    m = jax.lax.pmax(local, "kv")
    return jax.lax.psum(x * m, "kv") + jax.lax.psum((x[:, 0] + m[:, 0]), "kv")[:, None]


def ring(x, shard):
    for _ in range(7):
        shard = jax.lax.ppermute(shard, "kv", RING)
        x = x + shard.sum()
    return x


def scanned_ring(x, shard):
    def step(carry, _):
        x, k, v = carry
        k, v = (jax.lax.ppermute(a, "kv", RING) for a in (k, v))
        return (x + k.sum() + v.sum(), k, v), None

    return jax.lax.scan(step, (x, shard, 2 * shard), None, length=7)[0][0]


def test_allreduces_are_joined():
    """Three written, two compiled: XLA joins the two sums, and all their operands count."""
    written, compiled = both(lowered(three_allreduces))
    assert [c.operand_bytes for c in written] == [128, 128, 8]
    assert sorted(c.operand_bytes for c in compiled) == [128, 136]
    assert total_bytes(written) == total_bytes(compiled) == 264
    assert {(c.kind, c.devices) for c in written + compiled} == {("all-reduce", 8)}


def test_loops_multiply():
    """A ring written as a scan runs its two permutes seven times."""
    found = collectives(lowered(scanned_ring).compile())
    assert found == [Collective("collective-permute", 7, 4096, ("f32[8,128]",), RING)] * 2
    assert collectives_table(found).splitlines() == [
        "collective          runs  bytes put in    sent  operands",
        "collective-permute     7        28,672  28,672  f32[8,128]",
        "collective-permute     7        28,672  28,672  f32[8,128]",
        "all                   14        57,344  57,344",
    ]


def test_unrolled_is_the_same():
    """For devices that are not there, too."""
    mesh = AbstractMesh((8,), ("kv",), axis_types=(AxisType.Auto,))
    absent = sharded(ring, mesh).trace(X, CACHE).lower(lowering_platforms=("cuda",))
    for found in (*both(lowered(ring)), collectives(absent)):
        assert found == [Collective("collective-permute", 1, 4096, ("f32[8,128]",), RING)] * 7


@pytest.mark.parametrize("trips", [0, 1, 3, 6])
def test_while_loops(trips):
    """Loops that count in steps, downwards, or with a carried bound; and one within another."""

    def loops(x, shard):
        def body(carry):
            i, bound, x = carry
            return i - 2, bound, jax.lax.psum(x, "kv")

        carry = (jnp.int32(2 * trips + 4), jnp.int32(4), x)
        x = jax.lax.while_loop(lambda c: c[0] > c[1], body, carry)[2]

        def inner(i, x):
            return jax.lax.pmax(x, "kv")

        return jax.lax.fori_loop(0, trips, lambda i, x: jax.lax.fori_loop(0, 5, inner, x), x)

    assert count_collectives(collectives(lowered(loops).compile())) == trips + 5 * trips


def test_unknown_trip_count():
    """A loop as written has no count yet, and one that ends by what it computes never has."""

    def until_small(x, shard):
        return jax.lax.while_loop(
            lambda x: x.sum() > 1, lambda x: jax.lax.psum(x, "kv") / 100, x + shard[0, 0]
        )

    for program in (lowered(scanned_ring), lowered(until_small), lowered(until_small).compile()):
        with pytest.raises(ValueError, match=r"how often the loop .* runs.*compile\(\)"):
            collectives(program)


def test_silent_loops_may_run_as_often_as_they_like():
    def body(x, shard):
        x = jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x + shard[0, 0])
        return jax.lax.psum(x, "kv")

    assert count_collectives(collectives(lowered(body))) == 1


def test_other_kinds():
    def others(x, shard):
        everything = jax.lax.all_gather(shard, "kv", tiled=True)
        mine = jax.lax.psum_scatter(everything, "kv", tiled=True)
        swapped = jax.lax.all_to_all(everything * 2, "kv", 0, 0, tiled=True)
        return x + mine.sum() + swapped.sum()

    for found in both(lowered(others)):
        assert {c.kind: (c.count, c.operand_bytes) for c in found} == {
            "all-gather": (1, 4096),
            "reduce-scatter": (1, 32768),
            "all-to-all": (1, 32768),
        }


def test_conditionals_count_the_larger_branch():
    def body(x, shard):
        # The same on all devices, as a collective in a branch needs.
        big = jax.lax.pmax(shard.sum(), "kv") > 0
        return jax.lax.cond(
            big,
            lambda x: jax.lax.psum(jax.lax.psum(x, "kv"), "kv"),
            lambda x: jax.lax.psum(x[0, 0], "kv") * x,
            x,
        )

    assert [c.operand_bytes for c in collectives(lowered(body))] == [4, 128, 128]


def test_no_collectives():
    assert both(jax.jit(lambda x: x @ x.T).lower(X)) == ([], [])
    assert collectives_table([]) == "no collectives"


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        ("node", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("device", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ],
)
def test_groups_of_a_mesh_with_two_axes(axes, groups):
    """Whichever way XLA writes the groups: all of them, or by the mesh's axes."""
    mesh, spec = kv_mesh(jax.devices()[:8], nodes=2), PartitionSpec(("node", "device"))
    program = sharded(lambda x: jax.lax.psum(x, axes), mesh, spec, spec).lower(CACHE)
    for found in both(program):
        assert found == [Collective("all-reduce", 1, 4096, ("f32[8,128]",), groups)]


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{}", ()),
        ("{{0,1},{2,3},{4,5}}", ((0, 1), (2, 3), (4, 5))),
        ("{{0},{1}}", ((0,), (1,))),
        ("[2,3]<=[6]", ((0, 1, 2), (3, 4, 5))),
        ("[2,3]<=[3,2]T(1,0)", ((0, 2, 4), (1, 3, 5))),
        ("mesh['node'=3,'device'=2] {'device'}", ((0, 1), (2, 3), (4, 5))),
        ("mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'b'}", ((0, 2, 4), (1, 3, 5))),
        ("mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'b','a'}", ((0, 1, 2, 3, 4, 5),)),
    ],
)
def test_groups_as_newer_and_older_programs_write_them(written, groups):
    """The numbers of six devices, as lists, as an array's rows, and along the axes of a mesh."""
    text = f"""HloModule m
ENTRY main {{
  x = f32[2] parameter(0)
  ROOT s = f32[2] all-reduce(x), channel_id=1, replica_groups={written}, to_apply=none
}}
"""
    (found,) = collectives(text)
    assert found.devices == (len(groups[0]) if groups else 0)
    assert sorted(map(tuple, map(sorted, found.groups))) == sorted(groups)


def test_a_kernels_notes_may_take_several_lines():
    """As XLA:TPU prints a program with a kernel of Pallas."""
    text = """HloModule m
ENTRY main {
  x = f32[2] parameter(0)
  k = f32[2] custom-call(x), frontend_attributes={kernel_metadata={
"mesh_axes":"[\\"kv\\"]"
}}, metadata={op_name="kernel"}
  ROOT s = f32[2] all-reduce(k), replica_groups={{0,1}}, to_apply=none
}
"""
    (found,) = collectives(text)
    assert found.kind == "all-reduce" and found.devices == 2


ASYNCHRONOUS = """
HloModule gpu

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: bf16[8,4]) -> bf16[1,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %rs = bf16[1,4]{1,0} reduce-scatter(%p), replica_groups=[2,8]<=[16], dimensions={0}, to_apply=%add
}

ENTRY %main (x: bf16[2,64], y: f32[3], z: bf16[8,4]) -> bf16[16,64] {
  %x = bf16[2,64]{1,0:T(8,128)(2,1)} parameter(0)
  %y = f32[3]{0} parameter(1)
  %z = bf16[8,4]{1,0} parameter(2)
  %s = s32[4]{0} parameter(3)
  %ag = (bf16[2,64]{1,0}, bf16[16,64]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}, dimensions={0}
  %ar = (bf16[2,64]{1,0}, f32[3]{0}) all-reduce-start(%y, /*index=1*/%x), replica_groups={}, to_apply=%add
  %ard = (bf16[2,64]{1,0}, f32[3]{0}) all-reduce-done(%ar)
  %cp = (f32[3]{0}, f32[3]{0}, u32[], u32[]) collective-permute-start(%y), source_target_pairs={{0,1},{1,0},{2,3}}
  %cpd = f32[3]{0} collective-permute-done(%cp)
  %rs = ((bf16[8,4]{1,0}), bf16[1,4]{1,0}) async-start(%z), calls=%wrapped
  %rsd = bf16[1,4]{1,0} async-done(%rs), calls=%wrapped
  %r = f32[3] ragged-all-to-all(%y, %y, %s, %s, %s, %s), replica_groups={{0,1,2,3}}
  ROOT %agd = bf16[16,64]{1,0} all-gather-done(%ag)
}
"""  # noqa: E501


def test_asynchronous_collectives_count_once():
    """As XLA writes for GPUs and TPUs: started here, done there.

    Of a ragged all-to-all the other operands are the buffer for what arrives, offsets and sizes.
    """
    sixteen = (EIGHT, tuple(range(8, 16)))
    found = collectives(ASYNCHRONOUS)
    assert found == [
        Collective("all-gather", 1, 256, ("bf16[2,64]",), sixteen),
        Collective("all-reduce", 1, 268, ("bf16[2,64]", "f32[3]")),
        Collective("collective-permute", 1, 12, ("f32[3]",), ((0, 1), (1, 0), (2, 3))),
        Collective("reduce-scatter", 1, 64, ("bf16[8,4]",), sixteen),
        Collective("ragged-all-to-all", 1, 12, ("f32[3]",), ((0, 1, 2, 3),)),
    ]
    assert found[2].devices == 3 and found[-1].sent_bytes == 9


SENT = [  # by each of four devices, for operands of so many bytes
    ("reduce-scatter", 96, 72),
    ("all-gather", 24, 72),
    ("all-reduce", 96, 144),
    ("all-reduce", 1, 2),  # 1.5 bytes, rounded up
    ("all-to-all", 96, 72),
    ("collective-permute", 7, 7),
    ("collective-broadcast", 7, 7),
]


def test_sent_bytes():
    """A reduce-scatter and an all-gather move three of four parts; an Allreduce is both (2024 eq.
    33)."""
    for kind, operand, sent in SENT:
        assert Collective(kind, 3, operand, (), ((0, 1, 2, 3),)).sent_bytes == 3 * sent
    with pytest.raises(ValueError, match="how many run the all-reduce"):
        _ = Collective("all-reduce", 1, 4, ()).sent_bytes


def test_memory(optimized):
    """A shard is an eighth of the cache, which is donated; what the ring carries is temporary."""
    run, shard = sharded(scanned_ring), CACHE.nbytes // 8
    program = jax.jit(lambda x, cache: (run(x, cache), cache + 1), donate_argnums=1)
    held = memory(program.lower(X, CACHE).compile())
    assert held.argument_bytes == X.nbytes + shard
    assert held.alias_bytes == shard < held.output_bytes
    assert held.temporary_bytes >= 2 * shard
    assert held.held_bytes == held.argument_bytes + held.temporary_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int8", "bool", "float8_e4m3fn"])
def test_the_counted_bytes_are_the_arrays(dtype):
    """The bytes of every dtype are those of the arrays sent."""
    x = jnp.zeros((8, 24), dtype)
    program = sharded(lambda x: jax.lax.ppermute(x, "kv", RING), None, SHARDED, SHARDED).lower(x)
    assert total_bytes(collectives(program)) == 24 * x.dtype.itemsize


class Wrapper:
    """A compiled program as another library hands it out, with methods that are JAX's."""

    def __init__(self, compiled):
        self.as_text, self.memory_analysis = compiled.as_text, compiled.memory_analysis


class Compiled:
    """As Equinox's: JAX's is its attribute."""

    compiled = None


@pytest.mark.usefixtures("unchecked")
def test_whatever_has_the_methods_is_read():
    compiled = lowered(three_allreduces).compile()
    wrapped = Wrapper(compiled)
    assert collectives(wrapped) == collectives(compiled) != []
    assert memory(wrapped) == memory(compiled)
    wrapped.memory_analysis = lambda: None  # of platforms that do not tell
    with pytest.raises(TypeError, match="compiled: expected"):
        memory(wrapped)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("function", "program", "error", "words"),
    [
        (collectives, test_memory, TypeError, "program: expected .* got function"),
        (collectives, "not a program", ValueError, "ENTRY"),
        (
            collectives,
            "ENTRY main {\nnonsense\n}",
            ValueError,
            "expected an instruction, got 'nonsense'",
        ),
        (collectives, Compiled(), TypeError, r"as_text\(\).*got Compiled.*\.compiled"),
        (memory, Compiled(), TypeError, r"memory_analysis\(\).*got Compiled.*\.compiled"),
        (memory, jax.jit(jnp.sin).lower(1.0), TypeError, "compiled: expected .* got Lowered"),
    ],
)
def test_bad_input(function, program, error, words):
    with pytest.raises(error, match=words):
        function(program)
