"""What the papers, the note and the packing document say of merging, packing and costs: is it true?

tests/ asks whether the code is right; here its functions show whether a statement is.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import draw
from oracles import dense_attention
from plain_trie import MARS, every_beam, picture

from treeattn import (
    AttentionState,
    attend,
    attention,
    attention_from_energy,
    causal_energy,
    energy,
    finalize,
    memory,
    pack,
    prefix_encoding,
    reduce_chain,
    reduce_tree,
    scan_states,
)

# ---------------------------------------------------------------- packing


def test_published_values():
    """The example in apple/ml-recurrent-drafter's tree_attention_test.py, nodes only.

    Its own tensors go on: two tokens of batch row 1 stand in row 0's padding, and attend.
    """
    one = [[91, 92, 93, 95], [91, 92, 94, 96], [91, 92, 93, 97]]
    two = [[93, 94, 95, 92], [93, 95, 96, 93], [93, 94, 97, 96]]
    packed = pack([one, two], pad_token=-7)
    assert packed.packed_beam.tolist() == [
        [91, 92, 93, 95, 94, 96, 97, -7, -7],
        [93, 94, 95, 92, 95, 96, 93, 97, 96],
    ]
    assert packed.unpack_map.tolist() == [
        [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 2, 6]],
        [[0, 1, 2, 3], [0, 4, 5, 6], [0, 1, 7, 8]],
    ]
    begin = "T........ TT....... TTT...... TTTT..... "
    ends = (
        "TT..T.... TT..TT... TTT...T.. ......... .........",
        "T...T.... T...TT... T...TTT.. TT.....T. TT.....TT",
    )
    assert packed.attention_mask.tolist() == [picture(begin + end) for end in ends]


def own_and_starts(beams):
    """(a row's own tokens, where those of each row start in the packed beam (batch, M))."""
    own = prefix_encoding(beams) == np.arange(beams.shape[1])[:, None]
    added = own.sum(axis=2)
    return own, added.cumsum(axis=1) - added


def test_the_documents_unpackers():
    """Its words: a candidate is a prefix from the packed beam's start on, and the rest, which
    follows its own start. Its code: a segment's start is its owner's, whichever row that is, and
    the offset counts the row's earlier places of the same start. The code is right, for all beams
    of up to three candidates of up to three tokens, of two letters; the words are not.
    """
    wrong = []
    for shape in itertools.product((1, 2, 3), repeat=2):
        beams = every_beam(*shape, letters=2)
        unpack_map = pack(beams).unpack_map
        own, own_starts = own_and_starts(beams)
        rest = own_starts[..., None] + own.cumsum(axis=2) - 1
        two_segments = np.where(own, rest, np.arange(shape[1]))
        wrong += beams[(two_segments != unpack_map).any(axis=(1, 2))].tolist()

        encoding = prefix_encoding(beams).reshape(len(beams), -1)
        starts = np.take_along_axis(own_starts, encoding, axis=1).reshape(beams.shape)
        earlier = np.tri(shape[1], k=-1, dtype=bool)
        offsets = ((starts[..., None] == starts[..., None, :]) & earlier).sum(axis=-1)
        # Rows that add nothing share their start with the next one, but own no place.
        np.testing.assert_array_equal(starts + offsets, unpack_map)
    assert wrong[0] == [[1], [0], [0]]


def test_the_documents_two_steps_for_its_example():
    """The starts of the segments and the offsets within them, as it prints the two matrices."""
    (own,), (starts,) = own_and_starts(MARS)
    starts = starts[prefix_encoding(MARS)[0]]
    assert starts.tolist() == [[0, 0, 0, 0], [0, 0, 4, 4], [0, 0, 6, 6]]
    # The border, | in the document, stands before a row's first own token.
    borders = own.argmax(axis=1)
    assert borders.tolist() == [0, 2, 2]
    offsets = np.where(own, np.arange(4) - borders[:, None], np.arange(4))
    assert offsets.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 0, 1]]
    np.testing.assert_array_equal(starts + offsets, pack(MARS).unpack_map[0])


def test_plain_indexing_mixes_up_the_batch():
    """The document's `packed_beam[unpack_map] == beam`: right without a batch, and no error."""
    beams = np.concatenate([MARS, MARS[:, ::-1] + 10])
    packed = pack(beams)
    for b in range(2):
        np.testing.assert_array_equal(packed.packed_beam[b][packed.unpack_map[b]], beams[b])
    literal = jax.eval_shape(lambda x, i: x[i], packed.packed_beam, packed.unpack_map)
    assert literal.shape == (2, 3, 4, 8)  # rows of the batch, and 3, 4, … are taken for the last


def test_a_later_column_never_has_fewer_nodes():
    """The first tokens are the most duplicated in every beam of candidates of one length, whoever
    drafted it: a longer prefix has one node at least wherever a shorter one has."""
    packed = pack(every_beam(3, 3, letters=2))
    nodes = np.diagonal(packed.attention_mask, axis1=1, axis2=2)
    columns = packed.position_offsets[:, None] == np.arange(3)[:, None]
    count = (columns & nodes[:, None]).sum(axis=2)
    assert (np.diff(count) >= 0).all() and count.max() == 3


def test_operations_are_saved_with_the_tokens():
    """XLA's count for a layer: in proportion to the tokens, and of its scores some more."""

    def flops(n):
        def run(x, weights):
            q, k, v = (x @ weights).reshape(3, 1, n, 4, 64)
            return attention(q, k, v)

        arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, 256), (3, 256, 256)))
        return jax.jit(run).lower(*arrays).cost_analysis()["flops"]

    size = pack(MARS).packed_beam.size
    assert (MARS.size, size) == (12, 8)
    assert 12 / 8 <= flops(MARS.size) / flops(size) < 1.05 * 12 / 8


def test_a_token_may_not_be_shared_with_another_prefix():
    """One `red` for two: it sees "a" alone, or "dark" as well, and is wrong for some candidate."""
    tokens, mask, *_ = (x[0] for x in pack(MARS))
    x = np.random.default_rng(5).normal(size=(7, 16))[tokens][None, :, None]
    reds = dense_attention(x, x, x, mask=mask)[0, [3, 7]]
    for dark, right in (False, [True, False]), (True, [False, False]):
        seen = mask.copy()
        seen[3, 6] = dark
        red = dense_attention(x, x, x, mask=seen)[0, 3]
        assert [np.allclose(red, each) for each in reds] == right


# ---------------------------------------------------------------- merging


def test_the_largest_exponential_is_one():
    """Relative to the maximum, and none is larger; 2025 appendix F speaks of its exponents."""
    q, k, v = draw(b=1, l=1, n=9, h=2, d=8)
    state = attend(q * 5, k * 5, v)
    s = np.einsum("blhd,bnhd->blhn", q * 5, k * 5) / np.sqrt(8)
    np.testing.assert_allclose(state.max, s.max(axis=-1), rtol=1e-12)
    terms = np.exp(s - s.max(axis=-1, keepdims=True))
    assert terms.max() == 1
    np.testing.assert_allclose(state.denominator, terms.sum(axis=-1), rtol=1e-12)
    assert (state.denominator >= 1).all()


def states_of(s, v):
    """The states of shards of scores s (..., n) and values v (..., n, dv)."""
    m = s.max(axis=-1)
    w = np.exp(s - m[..., None])
    return AttentionState(m, w.sum(axis=-1), w @ v)


def test_the_reduction_notes_formulas_along_a_tree():
    """(m, z, y) by the note's equations, of four shards along two levels.

    Its S in R^(L_u × L) is transposed: the sums over j, with V_j, need a row for each query.
    """
    rng = np.random.default_rng(7)
    s = rng.normal(size=(4, 5, 3)) * 4  # 4 shards, L = 5 queries, L_u = 3 keys a shard
    v = rng.normal(size=(4, 3, 2))
    leaves = states_of(s, v)
    level = [tuple(map(np.asarray, leaf)) for leaf in zip(*leaves, strict=True)]
    while len(level) > 1:
        pairs, level = zip(level[::2], level[1::2], strict=True), []
        for (ma, za, ya), (mb, zb, yb) in pairs:
            m = np.maximum(ma, mb)
            wa, wb = np.exp(ma - m), np.exp(mb - m)
            level.append((m, za * wa + zb * wb, ya * wa[:, None] + yb * wb[:, None]))
    (root,) = level
    for ours, theirs in zip(jax.jit(reduce_tree)(leaves), root, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-14, atol=1e-14)
    whole = np.exp(np.concatenate(s, axis=1))
    out = whole @ np.concatenate(v) / whole.sum(axis=1)[:, None]
    np.testing.assert_allclose(root[2] / root[1][:, None], out, rtol=1e-12)
    with pytest.raises(ValueError, match="mismatch in its core dimension"):
        states_of(s[0].T, v[0])


def test_rounding_by_order_and_dtype():
    """64 states in bfloat16: a tree and a scan stay within 3 ε; a chain does not do so well."""
    rng = np.random.default_rng(0)
    s, v = rng.standard_normal((64, 8, 64)), rng.standard_normal((64, 8, 64, 8))
    weights = np.exp(s)
    exact = np.cumsum((weights[..., None] * v).sum(1), 0) / np.cumsum(weights.sum(1), 0)[..., None]
    m = s.max(1)
    weights = np.exp(s - m[:, None])
    states = AttentionState(m, weights.sum(1), (weights[..., None] * v).sum(1))
    states = jax.tree.map(lambda x: jnp.asarray(x, "bfloat16"), states)

    def error(reduce, wanted):
        # Every operation rounds to its own dtype, and compiling 64 leaves stays quick.
        options = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
        out = jax.jit(lambda x: finalize(reduce(x))[0], compiler_options=options)(states)
        miss = np.linalg.norm(np.float64(out) - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
        return np.median(miss, axis=-1).max()

    eps = float(jnp.finfo("bfloat16").eps)
    tree = error(reduce_tree, exact[-1])
    assert tree < 3 * eps and error(scan_states, exact) < 3 * eps
    assert tree < error(reduce_chain, exact[-1])


# ---------------------------------------------------------------- what the energy costs


def flops(function, *shapes):
    """Operations of the compiled program, for float32 arrays of these shapes; and the program."""
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    program = jax.jit(function).lower(*arrays).compile()
    return program.cost_analysis()["flops"], program


def test_the_gradient_costs_a_constant_factor():
    """In operations, of keys twice as wide as values; and in memory, a few numbers a key."""
    n, d, dv = 1024, 64, 32
    shapes = (dv,), (d,), (n, d), (n, dv)
    both = jax.value_and_grad(energy)
    (count, program), (of_energy, _) = flops(both, *shapes), flops(energy, *shapes)
    assert flops(attention_from_energy, *shapes[1:])[0] < 1.02 * count
    assert abs(count / of_energy - (d + 2 * dv) / (d + dv)) < 0.02
    assert memory(program).temporary_bytes < 20 * n  # keys and values: 384 n


def test_all_queries_cost_quadratically():
    """2024 §1 and §3: four times the operations for twice the tokens; twice for one query."""
    for f, times in ((causal_energy, 4), (lambda z, q, k, v: energy(z[0], q[0], k, v), 2)):
        (small, _), (large, _) = (flops(f, *[(n, 64)] * 4) for n in (512, 1024))
        assert large / small == pytest.approx(times, rel=0.02)
