"""Packing beams: against a trie in plain Python, for every small beam and many larger ones."""

import itertools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from plain_trie import MARS, every_beam, picture, plain_pack

from treeattn import (
    PackedBeam,
    memory,
    pack,
    packed_token_indices,
    prefix_encoding,
    unpack,
)

FUNCTIONS = pack, prefix_encoding, packed_token_indices
COMPILED = jax.jit(pack, static_argnames="pad_token"), *map(jax.jit, FUNCTIONS[1:])
pack_jit, encode_jit, _ = COMPILED
unpack_jit = jax.jit(unpack)


def assert_packed(functions, beam, lengths=None, *, pad_token=77, size=None):
    """The results of these functions are the plain trie's, with nothing but pads beyond it.

    size: L; None where it is the largest number of nodes.
    """
    do_pack, encode, find = functions
    packed = do_pack(beam, lengths, pad_token=pad_token)
    found = *packed, encode(beam, lengths), find(beam, lengths)
    wanted = plain_pack(beam, lengths, pad_token=pad_token, size=size)
    names = *PackedBeam._fields, "encoding", "indices"
    for name, x, y in zip(names, found, wanted, strict=True):
        assert x.dtype == y.dtype, name
        np.testing.assert_array_equal(x, y, err_msg=name)
    return packed


def nodes(packed):
    """True at the nodes of each batch row, False at pads."""
    return np.diagonal(packed.attention_mask, axis1=1, axis2=2)


def test_worked_example():
    packed_beam, attention_mask, position_offsets, unpack_map = pack(MARS)
    assert packed_beam.tolist() == [[0, 1, 2, 3, 4, 5, 6, 3]]
    assert position_offsets.tolist() == [[0, 1, 2, 3, 2, 3, 2, 3]]
    assert unpack_map.tolist() == [[[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]]]
    rows = "Y....... YY...... YYY..... YYYY.... YY..Y... YY..YY.. YY....Y. YY....YY"
    assert attention_mask.tolist() == [picture(rows)]
    assert prefix_encoding(MARS).tolist() == [[[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 2, 2]]]
    assert packed_token_indices(MARS).tolist() == [[0, 1, 2, 3, 6, 7, 10, 11]]


@pytest.mark.parametrize("rows,width", [(2, 3), (3, 3), (4, 2)])
def test_every_small_beam(rows, width):
    """All beams of that shape over three letters: 26,973 of them."""
    beams = every_beam(rows, width, letters=3)
    assert_packed(FUNCTIONS, beams)
    assert_packed(COMPILED, beams, size=rows * width)


@pytest.mark.parametrize("rows,width", [(3, 2), (3, 3)])
def test_every_small_beam_of_every_length(rows, width):
    """A candidate of length 0 is one that is not there. Beyond its length it holds ones."""
    beams = every_beam(rows, width, letters=2)
    lengths = np.array(list(itertools.product(range(width + 1), repeat=rows)))
    beams, lengths = np.repeat(beams, len(lengths), axis=0), np.tile(lengths, (len(beams), 1))
    beyond = np.arange(width) >= lengths[..., None]
    once = (beams >= beyond).all(axis=(1, 2))
    assert_packed(FUNCTIONS, beams[once], lengths[once])
    assert_packed(COMPILED, beams[once], lengths[once], size=rows * width)


def random_beam(seed, shape, dtype=np.int32, letters=3):
    """Candidates that branch off one another, as a beam search's do; some of them equal."""
    rng = np.random.default_rng(seed)
    beam = rng.integers(0, letters, shape)
    for b, m in itertools.product(range(shape[0]), range(1, shape[1])):
        shared = rng.integers(0, shape[2] + 1)
        beam[b, m, :shared] = beam[b, rng.integers(0, m), :shared]
    limits = np.iinfo(dtype)  # the letters are spread over the whole range of the dtype
    low, high = int(limits.min), int(limits.max)
    return np.array([low, high, 0, high // 2, high - 1, low // 2 + 1], dtype)[beam]


def random_lengths(seed, beam):
    return np.random.default_rng(seed).integers(0, beam.shape[2] + 1, beam.shape[:2])


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 9)),
    dtype=st.sampled_from(["int8", "int16", "int32", "int64", "uint32"]),
    letters=st.integers(1, 6),
    ragged=st.booleans(),
)
def test_larger_batches(seed, shape, dtype, letters, ragged):
    beam = random_beam(seed, shape, dtype, letters)
    lengths = random_lengths(seed, beam).astype(dtype) if ragged else None
    packed = assert_packed(FUNCTIONS, beam, lengths)
    real = np.arange(shape[2]) < lengths[..., None] if ragged else slice(None)
    np.testing.assert_array_equal(unpack(*packed[::3])[real], beam[real])


@pytest.mark.parametrize("rows", [33, 97])  # more than a word has bits
def test_compiled_packs_the_same(rows):
    """Inside jit L is M·C, and otherwise everything is as outside it, for JAX's arrays, too."""
    for seed in range(5):
        beam = random_beam(seed, (2, rows, 3), "int64")
        lengths = random_lengths(seed, beam)
        assert_packed(COMPILED, beam, lengths, size=rows * 3)
    packed = assert_packed(FUNCTIONS, jnp.asarray(beam), lengths)
    assert all(isinstance(x, jax.Array) for x in packed)
    closed = jax.jit(lambda lengths: pack(beam, lengths))(lengths)  # the beam is a constant
    np.testing.assert_array_equal(closed.unpack_map, packed.unpack_map)


# ---------------------------------------------------------------- programs and memory


def test_packing_is_a_program_of_tensors():
    """No loop over tokens, and nothing that the host would have to decide or compute."""
    text = pack_jit.lower(jax.ShapeDtypeStruct((2, 12, 6), jnp.int32)).as_text()
    assert not any(f"stablehlo.{op}" in text for op in ("while", "if", "case", "custom_call"))
    assert "tensor<2x72x72xi1>" in text  # the mask


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
    beam = random_beam(6, (8, 32, 16))
    tracemalloc.start()
    mask = pack(beam).attention_mask
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * mask.nbytes


# ---------------------------------------------------------------- unpack, and edges


@pytest.mark.parametrize("module", [np, jnp])
def test_unpack_any_features(module):
    unpack_map = pack(random_beam(2, (3, 4, 5))).unpack_map
    x = np.random.default_rng(2).normal(size=(3, unpack_map.max() + 1, 2, 3))
    back = unpack(module.asarray(x), module.asarray(unpack_map))
    assert isinstance(back, np.ndarray if module is np else jax.Array)
    np.testing.assert_array_equal(back, [x[b][unpack_map[b]] for b in range(3)])
    check_grads(lambda x: unpack_jit(x, unpack_map), (x,), 1)


def test_traced_numbers_out_of_range_are_clipped():
    """Narrow ones too: 200 nodes are more than an int8 can name."""
    packed, unpack_map = np.arange(200)[None], np.array([[[-128, -1, 0, 127]]], np.int8)
    np.testing.assert_array_equal(unpack_jit(packed, unpack_map), [[[0, 0, 0, 127]]])
    np.testing.assert_array_equal(unpack_jit(packed[:, :9], unpack_map), [[[0, 0, 0, 8]]])
    lengths = np.array([[-1, 127]], np.int8)
    beam = np.zeros((1, 2, 300), np.int32)
    np.testing.assert_array_equal(pack(beam, np.abs(lengths)).unpack_map[0, :, 126], [0, 126])
    np.testing.assert_array_equal(encode_jit(beam, lengths)[0, :, 126:128], [[-1, -1], [1, -1]])
    beyond = pack_jit(beam[..., :5], np.array([[9, -9]]))
    assert nodes(beyond).sum() == 5


@pytest.mark.parametrize("module", [np, jnp])
@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 3, 0), (0, 3, 2), (2, 3, 2)])
def test_a_tree_without_nodes(shape, module):
    """No candidates, no positions, no batch; or empty candidates only."""
    beam, lengths = module.ones(shape, "int16"), module.zeros(shape[:2], "int32")
    assert_packed(COMPILED, beam, lengths, size=shape[1] * shape[2])
    packed = assert_packed(FUNCTIONS, beam, lengths)
    assert unpack(*packed[::3]).shape == shape
    assert unpack(np.ones((2, 0, 4)), np.zeros((2, 3, 2), int)).shape == (2, 3, 2, 4)


# ---------------------------------------------------------------- bad input


@pytest.mark.usefixtures("unchecked")
def test_lists_are_arrays():
    assert_packed(FUNCTIONS, [[[7, 8], [7, 9]]], [[2, 1]])
    assert unpack([[7, 8]], [[[0, 1], [0, 0]]]).tolist() == [[[7, 8], [7, 7]]]


@pytest.mark.usefixtures("unchecked")
def test_no_id_of_64_bits_becomes_another():
    """JAX without 64 bits would keep the lower half of each, and merge two different tokens."""
    beam, lengths = np.array([[[2**32 + 5, 1], [5, 1]]]), [[2, 2]]
    assert pack(beam, np.array(lengths)).packed_beam.shape == (1, 4)
    with jax.enable_x64(False):
        of_jax = jnp.array(lengths)
        for function in FUNCTIONS:
            with pytest.raises(ValueError, match=r"^beam: .*int32 holds, got 1 to 4294967301"):
                function(beam, of_jax)
            with pytest.raises(ValueError, match=r"^beam: "):
                jax.jit(lambda n, function=function: function(beam, n))(of_jax)
        packed = pack(beam % 2**32, of_jax)
        np.testing.assert_array_equal(packed.packed_beam, [[5, 1]])  # small ones are taken
        with pytest.raises(ValueError, match=r"^packed: "):
            unpack(beam[0], jnp.zeros((2, 1, 1), jnp.int32))
