"""The collectives of a program: written and compiled, in loops, joined, asynchronous."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from treeattn import kv_mesh
from treeattn.program import (
    Collective,
    collectives,
    collectives_table,
    count_collectives,
    memory,
    total_bytes,
)

REPLICATED, SHARDED = PartitionSpec(), PartitionSpec("kv")
X = jnp.ones((2, 16), jnp.float32)
CACHE = jnp.ones((64, 128), jnp.float32)  # 8 rows of 128 on each of 8 devices: 4,096 bytes
EIGHT = tuple(range(8))
RING = tuple((i, (i + 1) % 8) for i in EIGHT)


def lowered(body, mesh=None, check_vma=False):
    """`body(x, shard)` over 8 devices, lowered."""
    mesh = mesh or kv_mesh(jax.devices()[:8])
    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(REPLICATED, SHARDED),
            out_specs=REPLICATED,
            check_vma=check_vma,
        )
    ).lower(X, CACHE)


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
    program = lowered(three_allreduces)
    written, compiled = collectives(program), collectives(program.compile())
    assert [c.kind for c in written] == ["all-reduce"] * 3
    assert [c.operand_bytes for c in written] == [128, 128, 8]
    assert [c.kind for c in compiled] == ["all-reduce"] * 2
    assert sorted(c.operand_bytes for c in compiled) == [128, 136]
    assert total_bytes(written) == total_bytes(compiled) == 264
    assert all(c.devices == 8 for c in written + compiled)


def test_loops_multiply():
    """A ring written as a scan runs its two permutes seven times."""
    found = collectives(lowered(scanned_ring).compile())
    assert found == [Collective("collective-permute", 7, 4096, ("f32[8,128]",), RING)] * 2
    assert count_collectives(found) == 14
    assert total_bytes(found) == 2 * 7 * 4096


def test_unrolled_is_the_same():
    program = lowered(ring)
    for found in (collectives(program), collectives(program.compile())):
        assert [c.kind for c in found] == ["collective-permute"] * 7
        assert total_bytes(found) == 7 * 4096


@pytest.mark.parametrize("trips", [0, 1, 3, 6])
def test_while_loops(trips):
    """Loops that count in steps, downwards, or with a carried bound; and one within another."""

    def counted(x, shard):
        def body(carry):
            i, bound, x = carry
            return i - 2, bound, jax.lax.psum(x, "kv")

        carry = (jnp.int32(2 * trips + 4), jnp.int32(4), x)
        return jax.lax.while_loop(lambda c: c[0] > c[1], body, carry)[2]

    def nested(x, shard):
        def inner(i, x):
            return jax.lax.psum(x, "kv")

        return jax.lax.fori_loop(0, trips, lambda i, x: jax.lax.fori_loop(0, 5, inner, x), x)

    assert count_collectives(collectives(lowered(counted).compile())) == trips
    assert count_collectives(collectives(lowered(nested).compile())) == 5 * trips


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

    program = lowered(others)
    for found in (collectives(program), collectives(program.compile())):
        sizes = {c.kind: (c.count, c.operand_bytes) for c in found}
        assert sizes == {
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
    program = jax.jit(lambda x: x @ x.T).lower(X)
    assert collectives(program) == collectives(program.compile()) == []
    assert collectives_table([]) == "no collectives"


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        ("node", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("device", ((0, 1, 2, 3), (4, 5, 6, 7))),
        (("node", "device"), (EIGHT,)),
    ],
)
def test_groups_of_a_mesh_with_two_axes(axes, groups):
    """Whichever way XLA writes the groups: all of them, or by the mesh's axes."""
    mesh = kv_mesh(jax.devices()[:8], nodes=2)
    program = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, axes),
            mesh=mesh,
            in_specs=PartitionSpec(("node", "device")),
            out_specs=PartitionSpec(("node", "device")),
            check_vma=False,
        )
    ).lower(CACHE)
    for found in (collectives(program), collectives(program.compile())):
        assert found == [Collective("all-reduce", 1, 4096, ("f32[8,128]",), groups)]


def test_groups_as_newer_and_older_programs_write_them():
    """The numbers of six devices, as lists, as an array's rows, and along the axes of a mesh."""
    columns = ((0, 2, 4), (1, 3, 5))
    for written, groups in (
        ("{}", ()),
        ("{{0,1},{2,3},{4,5}}", ((0, 1), (2, 3), (4, 5))),
        ("{{0},{1}}", ((0,), (1,))),
        ("[2,3]<=[6]", ((0, 1, 2), (3, 4, 5))),
        ("[2,3]<=[3,2]T(1,0)", columns),
        ("mesh['node'=3,'device'=2] {'device'}", ((0, 1), (2, 3), (4, 5))),
        ("mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'b'}", columns),
        ("mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'b','a'}", ((0, 1, 2, 3, 4, 5),)),
    ):
        text = f"""HloModule m
ENTRY main {{
  x = f32[2] parameter(0)
  ROOT s = f32[2] all-reduce(x), channel_id=1, replica_groups={written}, to_apply=none
}}
"""
        (found,) = collectives(text)
        assert found.devices == (len(groups[0]) if groups else 0)
        assert sorted(map(tuple, map(sorted, found.groups))) == sorted(groups), written


def test_lowered_for_cuda_over_devices_that_are_not_there():
    mesh = AbstractMesh((8,), ("kv",), axis_types=(AxisType.Auto,))
    function = jax.jit(
        jax.shard_map(
            ring,
            mesh=mesh,
            in_specs=(REPLICATED, SHARDED),
            out_specs=REPLICATED,
            check_vma=False,
        )
    )
    program = function.trace(X, CACHE).lower(lowering_platforms=("cuda",))
    assert total_bytes(collectives(program)) == 7 * 4096


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
  %ag = (bf16[2,64]{1,0}, bf16[16,64]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}, dimensions={0}
  %ar = (bf16[2,64]{1,0}, f32[3]{0}) all-reduce-start(%x, /*index=1*/%y), replica_groups={}, to_apply=%add
  %ard = (bf16[2,64]{1,0}, f32[3]{0}) all-reduce-done(%ar)
  %cp = (f32[3]{0}, f32[3]{0}, u32[], u32[]) collective-permute-start(%y), source_target_pairs={{0,1},{1,0},{2,3}}
  %cpd = f32[3]{0} collective-permute-done(%cp)
  %rs = ((bf16[8,4]{1,0}), bf16[1,4]{1,0}) async-start(%z), calls=%wrapped
  %rsd = bf16[1,4]{1,0} async-done(%rs), calls=%wrapped
  ROOT %agd = bf16[16,64]{1,0} all-gather-done(%ag)
}
"""  # noqa: E501


def test_asynchronous_collectives_count_once():
    """As XLA writes for GPUs and TPUs: started here, done there."""
    assert collectives(ASYNCHRONOUS) == [
        Collective("all-gather", 1, 256, ("bf16[2,64]",), (EIGHT, tuple(range(8, 16)))),
        Collective("all-reduce", 1, 268, ("bf16[2,64]", "f32[3]")),
        Collective("collective-permute", 1, 12, ("f32[3]",), ((0, 1), (1, 0), (2, 3))),
        Collective("reduce-scatter", 1, 64, ("bf16[8,4]",), (EIGHT, tuple(range(8, 16)))),
    ]


def test_table():
    text = collectives_table(collectives(lowered(scanned_ring).compile()))
    assert text.splitlines() == [
        "collective          runs  bytes put in    sent  operands",
        "collective-permute     7        28,672  28,672  f32[8,128]",
        "collective-permute     7        28,672  28,672  f32[8,128]",
        "all                   14        57,344  57,344",
    ]


def test_sent_bytes_are_what_an_algorithm_in_numpy_sends():
    """A ring's algorithms, device by device: nobody can send less in all (2024 eq. 33)."""
    p, n = 4, 24
    rows = np.arange(p * n, dtype=np.float32).reshape(p, n)

    def ring_reduce_scatter(x):  # (each device's own sum of a part, bytes that each sends)
        parts = [list(np.split(row.copy(), p)) for row in x]
        for step in range(p - 1):
            moving = [parts[r][(r - step - 1) % p] for r in range(p)]
            for r in range(p):
                parts[(r + 1) % p][(r - step - 1) % p] = (
                    parts[(r + 1) % p][(r - step - 1) % p] + moving[r]
                )
        return [parts[r][r] for r in range(p)], (p - 1) * n // p * 4

    sums, scattered = ring_reduce_scatter(rows)
    np.testing.assert_array_equal(np.concatenate(sums), rows.sum(axis=0))
    gathered = (p - 1) * n // p * 4  # each part visits everybody else

    def one(kind, operand):
        return Collective(kind, 3, operand, (), (tuple(range(p)),)).sent_bytes

    assert one("reduce-scatter", n * 4) == 3 * scattered
    assert one("all-gather", n * 4 // p) == 3 * gathered
    assert one("all-reduce", n * 4) == 3 * (scattered + gathered)
    assert one("all-to-all", n * 4) == 3 * (p - 1) * n // p * 4
    assert one("collective-permute", 7) == 21
    assert one("all-reduce", 1) == 3 * 2  # 1.5 bytes, rounded up
    with pytest.raises(ValueError, match="how many run the all-reduce"):
        _ = Collective("all-reduce", 1, 4, ()).sent_bytes


def test_memory(optimized):
    """A shard is an eighth of the cache; what the ring carries is temporary."""
    held = memory(lowered(scanned_ring).compile())
    assert held.argument_bytes == X.nbytes + CACHE.nbytes // 8
    assert held.output_bytes == X.nbytes
    assert held.temporary_bytes >= 2 * CACHE.nbytes // 8
    assert held.held_bytes == held.argument_bytes + held.temporary_bytes


@pytest.mark.usefixtures("unchecked")
def test_bad_input():
    with pytest.raises(TypeError, match=r"program: expected .* got function"):
        collectives(test_memory)
    with pytest.raises(ValueError, match="ENTRY"):
        collectives("not a program")
    with pytest.raises(ValueError, match="expected an instruction, got 'nonsense'"):
        collectives("ENTRY main {\nnonsense\n}")
    with pytest.raises(TypeError, match=r"compiled: expected .* got Lowered"):
        memory(lowered(three_allreduces))


def test_the_counted_bytes_are_the_arrays():
    """The bytes of every dtype are those of the arrays sent."""
    mesh = kv_mesh(jax.devices()[:8])
    for dtype in ("bfloat16", "float32", "float64", "int8", "bool", "float8_e4m3fn"):
        x = jnp.zeros((8, 24), dtype)
        spec = PartitionSpec("kv")
        f = jax.shard_map(
            lambda x: jax.lax.ppermute(x, "kv", RING), mesh=mesh, in_specs=spec, out_specs=spec
        )
        (found,) = collectives(jax.jit(f).lower(x))
        assert found.operand_bytes == np.prod((1, 24)) * x.dtype.itemsize


RAGGED = """HloModule m
ENTRY main {
  input = f32[4] parameter(0)
  output = f32[16] parameter(1)
  sizes = s32[4] parameter(2)
  ROOT r = f32[16] ragged-all-to-all(input, output, sizes, sizes, sizes, sizes), replica_groups={{0,1,2,3}}
}
"""  # noqa: E501


def test_a_ragged_all_to_all_sends_its_input_only():
    """Its other operands are the buffer for what arrives, and the offsets and sizes."""
    (ragged,) = collectives(RAGGED)
    assert ragged == Collective("ragged-all-to-all", 1, 16, ("f32[4]",), ((0, 1, 2, 3),))
    assert ragged.sent_bytes == 12


class Wrapper:
    """A compiled program as another library hands it out, with methods that are JAX's."""

    def __init__(self, compiled):
        self.as_text, self.memory_analysis = compiled.as_text, compiled.memory_analysis


def test_whatever_has_the_methods_is_read():
    compiled = lowered(three_allreduces).compile()
    wrapped = Wrapper(compiled)
    assert collectives(wrapped) == collectives(compiled) != []
    assert memory(wrapped) == memory(compiled)


@pytest.mark.usefixtures("unchecked")
def test_what_has_no_such_method_is_told_what_is_expected():
    class Compiled:  # as Equinox's: JAX's is its attribute
        compiled = None

    for function, method in ((collectives, "as_text"), (memory, "memory_analysis")):
        with pytest.raises(TypeError, match=rf"expected .*{method}\(\).*got Compiled.*\.compiled"):
            function(Compiled())
    silent = Wrapper(lowered(three_allreduces).compile())
    silent.memory_analysis = lambda: None  # of platforms that do not tell
    with pytest.raises(TypeError, match="compiled: expected"):
        memory(silent)
