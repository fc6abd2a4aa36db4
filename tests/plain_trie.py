"""A trie in plain Python: what `treeattn.pack` must agree with, bit for bit."""

import numpy as np

from treeattn_conformance.trees import tree_mask


def plain_trie(rows, lengths=None):
    """One beam, as lists: (tokens, parents, offsets, unpack_map, encoding).

    unpack_map and encoding are ragged: a row ends where its candidate does.
    """
    child, owner = {}, []  # (node, token) -> node; node -> the row that added it
    tokens, parents, offsets, unpack_map, encoding = [], [], [], [], []
    for m, row in enumerate(rows):
        node, path = -1, []
        for c, token in enumerate(row if lengths is None else row[: lengths[m]]):
            key = (node, token)
            if key not in child:
                child[key] = len(tokens)
                owner.append(m)
                tokens.append(token)
                parents.append(node)
                offsets.append(c)
            node = child[key]
            path.append(node)
        unpack_map.append(path)
        encoding.append([owner[node] for node in path])
    return tokens, parents, offsets, unpack_map, encoding


def plain_pack(beam, lengths=None, *, pad_token=0, size=None):
    """A batch of beams: PackedBeam's four fields, the encoding, and the packed tokens' indices."""
    beam = np.asarray(beam)
    batch, rows, width = beam.shape
    lengths = np.full((batch, rows), width) if lengths is None else np.asarray(lengths)
    tries = [plain_trie(b.tolist(), n.tolist()) for b, n in zip(beam, lengths, strict=True)]
    size = max((len(t[0]) for t in tries), default=0) if size is None else size
    packed = np.full((batch, size), pad_token, beam.dtype)
    mask = np.zeros((batch, size, size), bool)
    offsets = np.zeros((batch, size), np.int32)
    unpack_map = np.zeros(beam.shape, np.int32)
    encoding = np.full(beam.shape, -1, np.int32)
    indices = np.full((batch, size), -1, np.int32)
    for b, (tokens, parents, depth, paths, owners) in enumerate(tries):
        n = len(tokens)
        packed[b, :n], offsets[b, :n] = tokens, depth
        mask[b, :n, :n] = tree_mask(np.array([parents], int))[0]
        for m, (path, owner) in enumerate(zip(paths, owners, strict=True)):
            unpack_map[b, m, : len(path)] = path
            encoding[b, m, : len(path)] = owner
        indices[b, :n] = np.flatnonzero(encoding[b] == np.arange(rows)[:, None])
    return packed, mask, offsets, unpack_map, encoding, indices


# The document's worked example: Mars is a red / Mars is reddish when / Mars is dark red.
MARS = np.array([[[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 3]]])


def picture(rows):
    """A mask of words, in which a dot is False."""
    return [[c != "." for c in row] for row in rows.split()]


def every_beam(rows, width, letters):
    """All beams of that shape over an alphabet of `letters`, as int8."""
    size = rows * width
    digits = np.arange(letters**size)[:, None] // letters ** np.arange(size) % letters
    return digits.astype(np.int8).reshape(-1, rows, width)
