"""Packing beams: against a trie in plain Python, for every small beam and many larger ones."""

import itertools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_trie import bulk_pack, plain_pack, plain_trie

from treeattn import (
    PackedBeam,
    attention,
    memory,
    pack,
    packed_token_indices,
    prefix_encoding,
    unpack,
)

DTYPES = ["int8", "int16", "int32", "int64", "uint32"]
pack_jit = jax.jit(pack, static_argnames="pad_token")
encode_jit = jax.jit(prefix_encoding)
find_jit = jax.jit(packed_token_indices)
unpack_jit = jax.jit(unpack)


def assert_packed(packed, encoding, beam, lengths=None, *, pad_token=0):
    """`packed` and `encoding` are the plain trie's, and nothing but pads beyond it."""
    size = packed.packed_beam.shape[1]
    *four, plain_encoding = plain_pack(beam, lengths, pad_token=pad_token, size=size)
    for name, came, expected in zip(PackedBeam._fields, packed, four, strict=True):
        assert came.dtype == expected.dtype, name
        np.testing.assert_array_equal(came, expected, err_msg=name)
    np.testing.assert_array_equal(encoding, plain_encoding)


# The document's worked example: Mars is a red / Mars is reddish when / Mars is dark red.
MARS = np.array([[[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 3]]])


def test_worked_example():
    packed_beam, attention_mask, position_offsets, unpack_map = pack(MARS)
    encoding = prefix_encoding(MARS)
    np.testing.assert_array_equal(encoding[0], [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 2, 2]])
    np.testing.assert_array_equal(packed_beam[0], [0, 1, 2, 3, 4, 5, 6, 3])
    np.testing.assert_array_equal(position_offsets[0], [0, 1, 2, 3, 2, 3, 2, 3])
    np.testing.assert_array_equal(unpack_map[0], [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]])
    picture = ["Y       ", "YY      ", "YYY     ", "YYYY    "]
    picture += ["YY  Y   ", "YY  YY  ", "YY    Y ", "YY    YY"]
    np.testing.assert_array_equal(attention_mask[0], [[c == "Y" for c in row] for row in picture])
    np.testing.assert_array_equal(packed_token_indices(MARS), [[0, 1, 2, 3, 6, 7, 10, 11]])


def test_published_values():
    """The example in apple/ml-recurrent-drafter's tree_attention_test.py, nodes only.

    Its own tensors go on: two tokens of batch row 1 stand in row 0's padding, and attend.
    """
    beam = np.array(
        [
            [[91, 92, 93, 95], [91, 92, 94, 96], [91, 92, 93, 97]],
            [[93, 94, 95, 92], [93, 95, 96, 93], [93, 94, 97, 96]],
        ]
    )
    packed = pack(beam, pad_token=-7)
    np.testing.assert_array_equal(
        prefix_encoding(beam),
        [
            [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 2]],
            [[0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 2, 2]],
        ],
    )
    np.testing.assert_array_equal(
        packed.packed_beam,
        [[91, 92, 93, 95, 94, 96, 97, -7, -7], [93, 94, 95, 92, 95, 96, 93, 97, 96]],
    )
    np.testing.assert_array_equal(
        packed.position_offsets, [[0, 1, 2, 3, 2, 3, 3, 0, 0], [0, 1, 2, 3, 1, 2, 3, 2, 3]]
    )
    np.testing.assert_array_equal(
        packed.unpack_map,
        [
            [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 2, 6]],
            [[0, 1, 2, 3], [0, 4, 5, 6], [0, 1, 7, 8]],
        ],
    )
    rows = [
        "T........",
        "TT.......",
        "TTT......",
        "TTTT.....",
        "TT..T....",
        "TT..TT...",
        "TTT...T..",
    ]
    rows += [".........", "........."]
    np.testing.assert_array_equal(packed.attention_mask[0], [[c == "T" for c in r] for r in rows])
    rows = [
        "T........",
        "TT.......",
        "TTT......",
        "TTTT.....",
        "T...T....",
        "T...TT...",
        "T...TTT..",
    ]
    rows += ["TT.....T.", "TT.....TT"]
    np.testing.assert_array_equal(packed.attention_mask[1], [[c == "T" for c in r] for r in rows])


def every_beam(rows, width, letters):
    """All beams of that shape over an alphabet of `letters`, in equal chunks, as int8."""
    size = rows * width
    chunk = letters ** min(size, 10)
    for start in range(0, letters**size, chunk):
        index = np.arange(start, start + chunk)
        digits = index[:, None] // letters ** np.arange(size) % letters
        yield digits.astype(np.int8).reshape(-1, rows, width)


def assert_small(beams, lengths=None):
    """Every beam against the trie in bulk, in NumPy and compiled."""
    expected = bulk_pack(beams, lengths)
    given = (beams,) if lengths is None else (beams, lengths)
    for functions in (
        (pack, prefix_encoding, packed_token_indices),
        (pack_jit, encode_jit, find_jit),
    ):
        packed = functions[0](*given, pad_token=-1)
        *came, indices = (*packed, *(function(*given) for function in functions[1:]))
        cut = indices.shape[1]  # the longest of the batch, or M·C
        assert cut == packed.packed_beam.shape[1]
        assert not expected[1][:, cut:].any() and (expected[-1][:, cut:] == -1).all()
        tokens, mask, offsets, *rest = expected[:5]
        for x, y in zip(
            (*came, indices),
            (tokens[:, :cut], mask[:, :cut, :cut], offsets[:, :cut], *rest, expected[5][:, :cut]),
            strict=True,
        ):
            assert np.array_equal(x, y)


def test_the_trie_in_bulk_is_the_plain_trie():
    beams = np.concatenate(list(every_beam(3, 2, letters=3)))
    ragged = np.array(list(itertools.product(range(3), repeat=3)))
    lengths = np.random.default_rng(0).choice(ragged, len(beams))
    for ends in None, lengths:
        *bulk, indices = bulk_pack(beams, ends)
        for x, y in zip(bulk, plain_pack(beams, ends, pad_token=-1, size=6), strict=True):
            np.testing.assert_array_equal(x, y)
        tokens = np.take_along_axis(beams.reshape(-1, 6), indices, axis=1)
        np.testing.assert_array_equal(np.where(indices < 0, -1, tokens), bulk[0])
        assert (np.diff(np.where(indices < 0, 6, indices), axis=1, append=7) >= 0).all()


@pytest.mark.parametrize(
    "rows,width", [(2, 3), (3, 3), (4, 2), pytest.param(4, 3, marks=pytest.mark.slow)]
)
def test_every_small_beam(rows, width):
    """All beams of that shape over three letters: 26,973 of them, and 531,441 more."""
    for beams in every_beam(rows, width, letters=3):
        assert_small(beams)


@pytest.mark.parametrize("rows,width", [(3, 2), (3, 3)])
def test_every_small_beam_of_every_length(rows, width):
    """A candidate of length 0 is one that is not there."""
    beams = np.concatenate(list(every_beam(rows, width, letters=2)))
    lengths = np.array(list(itertools.product(range(width + 1), repeat=rows)))
    assert_small(np.repeat(beams, len(lengths), axis=0), np.tile(lengths, (len(beams), 1)))


def random_beam(rng, shape, dtype=np.int32, letters=3):
    """Candidates that branch off one another, as a beam search's do; some of them equal."""
    beam = rng.integers(0, letters, shape)
    for m in range(1, shape[1]):
        for b in range(shape[0]):
            shared = rng.integers(0, shape[2] + 1)
            beam[b, m, :shared] = beam[b, rng.integers(0, m), :shared]
    if dtype is not None:  # spread the letters over the whole range of the dtype
        limits = np.iinfo(dtype)
        low, high = int(limits.min), int(limits.max)
        values = [low, high, 0, high // 2, high - 1, low // 2 + 1][:letters]
        beam = np.array(values, dtype)[beam]
    return beam


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 9)),
    dtype=st.sampled_from(DTYPES),
    letters=st.integers(1, 6),
    ragged=st.booleans(),
)
def test_larger_batches(seed, shape, dtype, letters, ragged):
    rng = np.random.default_rng(seed)
    beam = random_beam(rng, shape, dtype, letters)
    lengths = rng.integers(0, shape[2] + 1, shape[:2]).astype(dtype) if ragged else None
    packed = pack(beam, lengths, pad_token=77)
    assert_packed(packed, prefix_encoding(beam, lengths), beam, lengths, pad_token=77)
    indices = packed_token_indices(beam, lengths)
    flat = np.take_along_axis(beam.reshape(shape[0], -1), np.maximum(indices, 0), axis=1)
    np.testing.assert_array_equal(np.where(indices < 0, 77, flat), packed.packed_beam)
    back, real = unpack(packed.packed_beam, packed.unpack_map), slice(None)
    if ragged:
        real = np.arange(shape[2]) < lengths[..., None]
    np.testing.assert_array_equal(back[real], beam[real])


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_compiled_packs_the_same(seed):
    """Inside jit L is M·C, and otherwise everything is as outside it."""
    shape, rng = (2, 33, 3), np.random.default_rng(seed)
    beam = random_beam(rng, shape, "int64")
    lengths = rng.integers(0, shape[2] + 1, shape[:2])
    packed = pack_jit(beam, lengths, pad_token=5)
    assert packed.packed_beam.shape == (shape[0], shape[1] * shape[2])
    assert_packed(packed, encode_jit(beam, lengths), beam, lengths, pad_token=5)
    of_jax = jnp.asarray(beam)  # outside jit L is the longest of the batch there, too
    outside = pack(of_jax, lengths, pad_token=5)
    assert all(isinstance(x, jax.Array) for x in outside)
    assert outside.packed_beam.shape == pack(beam, lengths).packed_beam.shape
    assert_packed(outside, prefix_encoding(of_jax, lengths), beam, lengths, pad_token=5)
    indices = packed_token_indices(beam, lengths)
    size = indices.shape[1]
    np.testing.assert_array_equal(packed_token_indices(of_jax, lengths), indices)
    found = find_jit(beam, lengths)
    np.testing.assert_array_equal(found[:, :size], indices)
    assert (found[:, size:] == -1).all() and found.dtype == indices.dtype == np.int32
    assert size == np.diagonal(packed.attention_mask, axis1=1, axis2=2).sum(axis=1).max()


def test_more_candidates_than_a_word_has_bits():
    beam = random_beam(np.random.default_rng(97), (2, 97, 3), letters=4)
    assert_packed(pack_jit(beam), prefix_encoding(beam), beam)


def test_three_segments():
    """A row may take its tokens from two earlier rows and add its own."""
    beam = np.array([[[1, 2, 3], [1, 4, 5], [1, 4, 6]]])
    np.testing.assert_array_equal(prefix_encoding(beam)[0, 2], [0, 1, 2])
    np.testing.assert_array_equal(pack(beam).unpack_map[0], [[0, 1, 2], [0, 3, 4], [0, 3, 5]])


def test_tokens_and_mask_say_everything():
    """Positions and parents follow from the mask: two tensors describe the tree."""
    rng = np.random.default_rng(8)
    packed = pack(random_beam(rng, (4, 6, 5)), rng.integers(0, 6, (4, 6)))
    for mask, offsets in zip(packed.attention_mask, packed.position_offsets, strict=True):
        real = np.diagonal(mask)
        np.testing.assert_array_equal(offsets[real], mask.sum(axis=1)[real] - 1)
        for node in np.flatnonzero(real & (offsets > 0)):  # the parent: the deepest that it sees
            seen = mask[node] & (np.arange(len(mask)) != node)
            parent = np.flatnonzero(seen)[offsets[seen].argmax()]
            np.testing.assert_array_equal(mask[parent], seen)


def two_segments(beam):
    """The unpacker in the document's words, for one beam.

    Each candidate is a prefix from the preceding ones, from the packed beam's start on, and
    the rest, which follows its own start.
    """
    packed, unpacker = 0, []
    for m, owners in enumerate(plain_trie(beam)[-1]):
        own = owners.count(m)
        shared = len(owners) - own
        unpacker.append([*range(shared), *range(packed, packed + own)])
        packed += own
    return unpacker


def test_two_segments_are_not_enough():
    """Three candidates suffice to get it wrong, and if they are different and have one root,
    as a drafter's are, the smallest wrong beams have a row of three segments."""
    wrong = {"any": [], "drafter's": []}
    for rows, width in itertools.product(range(1, 4), range(1, 4)):
        for beam in np.concatenate(list(every_beam(rows, width, letters=2))).tolist():
            if two_segments(beam) != plain_trie(beam)[3]:
                wrong["any"].append(beam)
                if len({row[0] for row in beam}) == 1 and len(set(map(tuple, beam))) == rows:
                    wrong["drafter's"].append(beam)
    assert wrong["any"][0] == [[1], [0], [0]]
    smallest = wrong["drafter's"][0]
    assert len(smallest) == len(smallest[0]) == 3
    assert plain_trie(smallest)[4] == [[0, 0, 0], [0, 1, 1], [0, 1, 2]]


def test_segments_read_through_the_encoding_are_enough():
    """The document's two steps as its code takes them: a segment's start is its owner's, whichever
    row that is, and the offset counts the row's earlier places of the same start."""
    for rows, width in itertools.product(range(1, 4), range(1, 4)):
        for beam in np.concatenate(list(every_beam(rows, width, letters=2))):
            encoding = prefix_encoding(beam[None])[0]
            added = (encoding == np.arange(rows)[:, None]).sum(axis=1)
            starts = (added.cumsum() - added)[encoding]
            earlier = np.tri(width, k=-1, dtype=bool)
            offsets = ((starts[:, :, None] == starts[:, None, :]) & earlier).sum(axis=2)
            # Rows that add nothing share their start with the next one, but own no place.
            np.testing.assert_array_equal(starts + offsets, pack(beam[None]).unpack_map[0])


def test_the_documents_two_steps_for_its_example():
    """The starts of the segments and the offsets within them, as it prints the two matrices."""
    encoding = prefix_encoding(MARS)[0]
    own = encoding == np.arange(3)[:, None]
    added = own.sum(axis=1)
    starts = (added.cumsum() - added)[encoding]
    np.testing.assert_array_equal(starts, [[0, 0, 0, 0], [0, 0, 4, 4], [0, 0, 6, 6]])
    # The border, | in the document, stands before a row's first own token.
    borders = own.argmax(axis=1)
    np.testing.assert_array_equal(borders, [0, 2, 2])
    columns = np.arange(4)
    offsets = np.where(own, columns - borders[:, None], columns)
    np.testing.assert_array_equal(offsets, [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 0, 1]])
    np.testing.assert_array_equal(starts + offsets, pack(MARS).unpack_map[0])


def test_beams_of_a_batch_do_not_mix():
    beam = random_beam(np.random.default_rng(1), (6, 5, 4))
    together = pack(beam, pad_token=-1)
    sizes = np.diagonal(together.attention_mask, axis1=1, axis2=2).sum(axis=1)
    assert len(set(sizes)) > 1  # so that some are padded
    for b, size in enumerate(sizes):
        alone = pack(beam[b : b + 1])
        np.testing.assert_array_equal(together.packed_beam[b, :size], alone.packed_beam[0])
        assert (together.packed_beam[b, size:] == -1).all()
        np.testing.assert_array_equal(
            together.attention_mask[b, :size, :size], alone.attention_mask[0]
        )
        assert not together.attention_mask[b, size:].any()
        assert not together.attention_mask[b, :, size:].any()
        assert (together.position_offsets[b, size:] == 0).all()


def test_a_later_column_never_has_fewer_nodes():
    """The first tokens are the most duplicated in every beam of candidates of one length, whoever
    drafted it: a longer prefix has one node at least wherever a shorter one has."""
    for beams in every_beam(3, 3, letters=2):
        packed, count = pack(beams), np.zeros((len(beams), 3), int)
        for c in range(3):
            real = np.diagonal(packed.attention_mask, axis1=1, axis2=2)
            count[:, c] = (real & (packed.position_offsets == c)).sum(axis=1)
        for beam, nodes in zip(beams.tolist(), count, strict=True):
            assert list(nodes) == [len({tuple(row[: c + 1]) for row in beam}) for c in range(3)]
        assert (np.diff(count) >= 0).all() and count.max() == 3


def test_a_beam_need_not_repeat_anything():
    """The document calls it unavoidable. Candidates that differ at once share no prefix."""
    for beam, nodes in (([[[1, 2, 3], [2, 2, 3]]], 6), ([[[1, 2, 3], [1, 2, 3]]], 3)):
        packed = pack(np.array(beam))
        assert np.diagonal(packed.attention_mask, axis1=1, axis2=2).sum() == nodes


def test_plain_indexing_mixes_up_the_batch():
    """The document's `packed_beam[unpack_map] == beam`: right without a batch, and no error."""
    packed = pack(np.concatenate([MARS, MARS[:, ::-1] + 10]))
    for b in range(2):
        beam = packed.packed_beam[b][packed.unpack_map[b]]
        np.testing.assert_array_equal(beam, (MARS, MARS[:, ::-1] + 10)[b][0])
        np.testing.assert_array_equal(unpack(packed.packed_beam, packed.unpack_map)[b], beam)
    literal = jax.eval_shape(lambda x, i: x[i], packed.packed_beam, packed.unpack_map)
    assert literal.shape == (2, 3, 4, 8)  # rows of the batch, and 3, 4, … are taken for the last


def test_packing_is_a_program_of_tensors():
    """No loop over tokens, and nothing that the host would have to decide or compute."""
    text = pack_jit.lower(jax.ShapeDtypeStruct((2, 12, 6), jnp.int32)).as_text()
    assert not any(f"stablehlo.{op}" in text for op in ("while", "if", "case", "custom_call"))
    assert "tensor<2x72x72xi1>" in text  # the mask


@pytest.mark.parametrize("module", [np, jnp])
def test_unpack_any_features(module):
    rng = np.random.default_rng(2)
    packed = pack(module.asarray(random_beam(rng, (3, 4, 5))))
    size = packed.packed_beam.shape[1]
    for features in (), (2, 3):
        x, unpack_map = rng.normal(size=(3, size, *features)), np.asarray(packed.unpack_map)
        back = unpack(module.asarray(x), packed.unpack_map)
        assert back.shape == (3, 4, 5, *features)
        assert isinstance(back, np.ndarray if module is np else jax.Array)
        for index, row in zip(np.ndindex(3, 4, 5), np.reshape(back, (60, *features)), strict=True):
            np.testing.assert_array_equal(row, x[index[0], unpack_map[index]])


def test_traced_numbers_out_of_range_are_clipped():
    """Narrow ones too: 200 nodes are more than an int8 can name."""
    packed, unpack_map = np.arange(200)[None], np.array([[[-128, -1, 0, 127]]], np.int8)
    np.testing.assert_array_equal(unpack_jit(packed, unpack_map), [[[0, 0, 0, 127]]])
    np.testing.assert_array_equal(unpack_jit(packed[:, :9], unpack_map), [[[0, 0, 0, 8]]])
    lengths = np.array([[-1, 127]], np.int8)
    beam = np.zeros((1, 2, 300), np.int32)
    np.testing.assert_array_equal(pack(beam, np.abs(lengths)).unpack_map[0, :, 126], [0, 126])
    np.testing.assert_array_equal(encode_jit(beam, lengths)[0, :, 126:128], [[-1, -1], [1, -1]])


def test_the_gradient_of_unpacking_counts_who_shares_a_node():
    """So that a loss over all candidates trains what they share as often as it is shared."""
    beam = np.array([[[1, 2, 3], [1, 2, 4], [1, 5, 6]]])
    packed = pack(beam)
    out = jnp.zeros(packed.packed_beam.shape, jnp.float32)
    gradient = jax.grad(lambda x: unpack(x, packed.unpack_map).sum())(out)
    np.testing.assert_array_equal(gradient[0][:6], [3, 2, 1, 1, 1, 1])


def test_vmap_and_traced_lengths():
    rng = np.random.default_rng(4)
    beam = random_beam(rng, (3, 2, 4, 3))
    lengths = rng.integers(0, 4, (3, 2, 4))
    packed = jax.jit(jax.vmap(pack))(beam, lengths)
    for i in range(3):
        assert_packed(
            PackedBeam(*(np.asarray(x)[i] for x in packed)),
            prefix_encoding(beam[i], lengths[i]),
            beam[i],
            lengths[i],
        )
    closed = jax.jit(lambda lengths: pack(beam[0], lengths))(lengths[0])  # the beam a constant
    np.testing.assert_array_equal(closed.packed_beam, packed.packed_beam[0])
    clipped = pack_jit(beam[0], np.full((2, 4), 9)), pack_jit(beam[0], np.full((2, 4), -9))
    np.testing.assert_array_equal(clipped[0].packed_beam, pack_jit(beam[0]).packed_beam)
    assert not clipped[1].attention_mask.any()


@pytest.mark.parametrize(
    "module,shape", [(np, (2, 0, 3)), (np, (2, 3, 0)), (jnp, (2, 0, 3)), (jnp, (0, 3, 2))]
)
def test_beams_without_tokens(module, shape):
    """No candidates, no positions, no batch: a tree without nodes."""
    batch = shape[0]
    beam = module.zeros(shape, module.int16)
    for packed in pack(beam), pack_jit(beam):
        if isinstance(packed.packed_beam, np.ndarray):
            assert packed.packed_beam.shape == (batch, 0)
        assert packed.packed_beam.dtype == np.int16
        assert packed.attention_mask.shape == (batch, *packed.packed_beam.shape[1:] * 2)
        assert packed.unpack_map.shape == shape
        assert unpack(packed.packed_beam, packed.unpack_map).shape == shape
    assert prefix_encoding(beam).shape == shape
    assert packed_token_indices(beam).shape == (batch, 0)


@pytest.mark.parametrize("module", [np, jnp])
def test_empty_candidates(module):
    beam, lengths = module.ones((2, 3, 2), module.uint32), module.zeros((2, 3), module.int32)
    packed = pack(beam, lengths)
    assert packed.packed_beam.shape == (2, 0)
    assert not unpack(packed.packed_beam, packed.unpack_map).any()  # (2, 3, 2) zeros
    assert (prefix_encoding(beam, lengths) == -1).all()
    assert packed_token_indices(beam, lengths).shape == (2, 0)
    inside = pack_jit(beam, lengths)
    assert inside.packed_beam.shape == (2, 6) and not inside.attention_mask.any()


def rotate(x, position, base=1e4):
    """Rotary embedding of x (..., n, d) at positions (..., n)."""
    half = x.shape[-1] // 2
    angle = position[..., None] * base ** -(np.arange(half) / half)
    a, b, cos, sin = x[..., :half], x[..., half:], np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def layer(x, position, mask, weights):
    """Two heads of rotary self-attention, in float64: x (n, 16), mask (n, n)."""
    outs = []
    for wq, wk, wv in weights:
        scores = rotate(x @ wq, position) @ rotate(x @ wk, position).T / np.sqrt(8)
        scores = np.where(mask, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outs.append(p / p.sum(axis=-1, keepdims=True) @ (x @ wv))
    return x + np.concatenate(outs, axis=-1)


def test_attention_on_packed_tokens_is_attention_on_each_candidate():
    """Two rotary layers over a context of 7 tokens and the candidates."""
    rng = np.random.default_rng(5)
    table, context = rng.normal(size=(9, 16)), rng.integers(0, 9, 7)
    weights = rng.normal(size=(2, 2, 3, 16, 8)) / 4
    beam = random_beam(rng, (1, 6, 5), None, letters=9)
    packed = pack(beam)
    n, size = len(context), packed.packed_beam.shape[1]

    def run(tokens, position, mask):
        x = table[np.concatenate([context, tokens])]
        full = np.tril(np.ones((n + len(tokens),) * 2, bool))
        full[n:, n:] = mask
        for w in weights:
            x = layer(x, np.concatenate([np.arange(n), n + position]), full, w)
        return x[n:]

    tree = run(packed.packed_beam[0], packed.position_offsets[0], packed.attention_mask[0])
    alone = [run(row, np.arange(5), np.tril(np.ones((5, 5), bool))) for row in beam[0]]
    assert size < 30
    np.testing.assert_allclose(unpack(tree[None], packed.unpack_map)[0], alone, atol=1e-12)
    wrong = run(packed.packed_beam[0], packed.position_offsets[0] * 0, packed.attention_mask[0])
    assert np.abs(unpack(wrong[None], packed.unpack_map)[0] - alone).max() > 1e-3


def test_a_token_may_not_be_shared_with_another_prefix():
    """One `red` for two: it sees "a" alone, or "dark" as well, and is wrong for some candidate."""
    rng = np.random.default_rng(9)
    table, weights = rng.normal(size=(7, 16)), rng.normal(size=(2, 3, 16, 8)) / 4
    tokens, mask, offsets, unpack_map = (x[0] for x in pack(MARS))
    causal = np.tril(np.ones((4, 4), bool))
    alone = np.stack([layer(table[row], np.arange(4), causal, weights) for row in MARS[0]])

    def errors(n, mask, unpack_map):
        out = layer(table[tokens[:n]], offsets[:n], mask[:n, :n], weights)[unpack_map]
        return np.abs(out - alone).max(axis=(1, 2))

    assert errors(8, mask, unpack_map).max() < 1e-12
    shared = np.where(unpack_map == 7, 3, unpack_map)  # the last red is the first
    assert (errors(7, mask, shared) > 1e-3).tolist() == [False, False, True]
    both = mask.copy()
    both[3, 6] = True  # and sees "dark"
    assert (errors(7, both, shared) > 1e-3).tolist() == [True, False, True]


def test_operations_are_saved_with_the_tokens():
    """XLA's count for a layer: in proportion to the tokens, and of its scores some more."""

    def flops(n):
        def run(x, weights):
            q, k, v = (x @ weights).reshape(3, 1, n, 4, 64)
            return attention(q, k, v)

        arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, 256), (3, 256, 256)))
        return jax.jit(run).lower(*arrays).cost_analysis()["flops"]

    nodes = pack(MARS).packed_beam.size
    assert (MARS.size, nodes) == (12, 8)
    assert 12 / 8 <= flops(MARS.size) / flops(nodes) < 1.05 * 12 / 8


@pytest.mark.parametrize("shape", [(64, 32, 16), (4, 200, 2)])
def test_compiled_memory(shape, optimized):
    """What `pack` promises: temporaries of at most 10·B·M·L bytes."""
    batch, rows, width = shape
    held = memory(pack_jit.lower(jax.ShapeDtypeStruct(shape, jnp.int32)).compile())
    mask = batch * (rows * width) ** 2
    assert held.output_bytes >= mask
    assert held.temporary_bytes <= 10 * batch * rows * rows * width
    if width >= 16:
        assert held.temporary_bytes <= mask / 60


def test_numpy_memory():
    beam = random_beam(np.random.default_rng(6), (8, 32, 16))
    tracemalloc.start()
    mask = pack(beam).attention_mask
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * mask.nbytes


BEAM = np.zeros((2, 3, 4), np.int32)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("module", [np, jnp])
@pytest.mark.parametrize(
    "beam,lengths,error,names",
    [
        (BEAM.astype(np.float32), None, TypeError, ["beam", "float32"]),
        (BEAM.astype(bool), None, TypeError, ["beam", "bool"]),
        (BEAM[0], None, ValueError, ["beam", "(3, 4)", "3 axes"]),
        (BEAM[None], None, ValueError, ["beam", "(1, 2, 3, 4)", "3 axes"]),
        (BEAM, np.zeros((2, 3), np.float32), TypeError, ["lengths", "float32"]),
        (BEAM, np.zeros((2, 4), np.int32), ValueError, ["lengths", "(2, 3)", "(2, 4)"]),
        (BEAM, np.zeros(3, np.int32), ValueError, ["lengths", "(2, 3)", "(3,)"]),
        (BEAM, np.full((2, 3), 5), ValueError, ["lengths", "4", "5", "(0, 0)"]),
        (BEAM, np.array([[0, 1, 2], [3, -1, 4]]), ValueError, ["lengths", "-1", "(1, 1)"]),
    ],
)
def test_bad_beams(module, beam, lengths, error, names):
    for function in pack, prefix_encoding, packed_token_indices:
        with pytest.raises(error) as raised:
            function(module.asarray(beam), None if lengths is None else module.asarray(lengths))
        assert all(name in str(raised.value) for name in names)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "call,error,names",
    [
        (lambda: pack([[[1, 2], [3]]]), TypeError, ["beam", "ragged", "pad its rows"]),
        (lambda: pack([[["Mars", "is"]]]), TypeError, ["beam", "list"]),
        (lambda: pack(BEAM, [[1, 2, 5]] * 2), ValueError, ["lengths", "5 at (0, 2)"]),
        (lambda: pack(BEAM.astype(np.int8), pad_token=128), ValueError, ["pad_token", "int8"]),
        (lambda: pack(BEAM.astype(np.uint32), pad_token=-1), ValueError, ["pad_token", "uint32"]),
        (lambda: unpack(np.zeros((1, 9)), BEAM), ValueError, ["packed", "(1, 9)", "2"]),
        (lambda: unpack("no", BEAM), TypeError, ["packed", "str"]),
        (lambda: unpack(np.zeros((2, 9)), BEAM + 9), ValueError, ["unpack_map", "0 to 8", "got 9"]),
        (lambda: unpack(jnp.zeros((2, 9)), BEAM - 1), ValueError, ["unpack_map", "got -1"]),
        (lambda: unpack(np.zeros((2, 0)), BEAM + 1), ValueError, ["unpack_map", "got 1"]),
    ],
)
def test_bad_arguments(call, error, names):
    with pytest.raises(error) as raised:
        call()
    assert all(name in str(raised.value) for name in names)


@pytest.mark.usefixtures("unchecked")
def test_lists_are_arrays():
    packed = pack(MARS.tolist(), [[4, 4, 2]])
    for came, expected in zip(packed, pack(MARS, np.array([[4, 4, 2]])), strict=True):
        np.testing.assert_array_equal(came, expected)
    assert all(isinstance(x, jax.Array) for x in pack(jnp.asarray(MARS), [[4, 4, 2]]))
    back = unpack(packed.packed_beam.tolist(), packed.unpack_map.tolist())
    np.testing.assert_array_equal(back[0, :2], MARS[0, :2])
    np.testing.assert_array_equal(packed_token_indices([[[5], [5]]]), [[0]])


@pytest.mark.usefixtures("unchecked")
def test_no_id_of_64_bits_becomes_another():
    """JAX without 64 bits would keep the lower half of each, and merge two different tokens."""
    beam, lengths = np.array([[[2**32 + 5, 1], [5, 1]]]), [[2, 2]]
    assert pack(beam, np.array(lengths)).packed_beam.shape == (1, 4)
    with jax.enable_x64(False):
        of_jax = jnp.array(lengths)
        for function in pack, prefix_encoding, packed_token_indices:
            with pytest.raises(ValueError, match=r"^beam: .*int32 holds, got 1 to 4294967301"):
                function(beam, of_jax)
            with pytest.raises(ValueError, match=r"^beam: "):
                jax.jit(lambda n, function=function: function(beam, n))(of_jax)
        packed = pack(beam % 2**32, of_jax)
        np.testing.assert_array_equal(packed.packed_beam, [[5, 1]])  # small ones are taken
        with pytest.raises(ValueError, match=r"^packed: "):
            unpack(beam[0], jnp.zeros((2, 1, 1), jnp.int32))
