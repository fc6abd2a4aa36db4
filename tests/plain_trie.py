"""A trie in plain Python: what `treeattn.pack` must agree with, bit for bit."""

import numpy as np


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


def plain_mask(parents):
    """The ancestors of each node and itself, by walking up, as a list of lists of bools."""
    mask = [[False] * len(parents) for _ in parents]
    for i in range(len(parents)):
        j = i
        while j >= 0:
            mask[i][j] = True
            j = parents[j]
    return mask


def plain_pack(beam, lengths=None, *, pad_token=0, size=None):
    """A batch of beams: (packed_beam, attention_mask, position_offsets, unpack_map, encoding)."""
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
    for b, (tokens, parents, depth, paths, owners) in enumerate(tries):
        n = len(tokens)
        packed[b, :n], offsets[b, :n] = tokens, depth
        mask[b, :n, :n] = np.array(plain_mask(parents), bool).reshape(n, n)
        for m, (path, owner) in enumerate(zip(paths, owners, strict=True)):
            unpack_map[b, m, : len(path)] = path
            encoding[b, m, : len(path)] = owner
    return packed, mask, offsets, unpack_map, encoding


def bulk_pack(beams, lengths=None, *, pad_token=-1):
    """(packed_beam, attention_mask, position_offsets, unpack_map, encoding, indices), L being M·C.

    The trie of many small beams at once: a prefix is a number, its tokens the digits, and a node
    where a number stands first.
    """
    count, rows, width = beams.shape
    size, column = rows * width, np.tile(np.arange(width), rows)
    real = np.ones(beams.shape, bool)
    if lengths is not None:
        real = np.arange(width) < lengths[..., None]
    prefix, base = np.zeros(beams.shape, np.int32), int(beams.max(initial=0)) + 2
    for c in range(width):
        prefix[..., c] = (prefix[..., c - 1] if c else 0) * base + beams[..., c] + 1
    prefix, real = np.where(real, prefix, 0).reshape(count, size), real.reshape(count, size)
    first = (prefix[:, :, None] == prefix[:, None]).argmax(axis=2)
    new = real & (first == np.arange(size))
    number = np.take_along_axis(np.cumsum(new, axis=1) - 1, first, axis=1)
    unpack_map = np.where(real, number, 0).reshape(beams.shape)
    encoding = np.where(real, first // width, -1).reshape(beams.shape)

    order = np.argsort(~new, axis=1, kind="stable")
    node = np.arange(size) < new.sum(axis=1, keepdims=True)
    tokens = np.take_along_axis(beams.reshape(count, size), order, axis=1)
    offsets = column[order]
    # What node i's row holds at node j's column is node j's prefix: an ancestor's, or its own.
    above = (order - offsets)[:, :, None] + offsets[:, None]
    mask = prefix[np.arange(count)[:, None, None], above]
    mask = mask == np.take_along_axis(prefix, order, axis=1)[:, None]
    mask = mask & (offsets[:, None] <= offsets[:, :, None]) & node[:, :, None] & node[:, None]
    fields = np.where(node, tokens, pad_token), mask, np.where(node, offsets, 0)
    return *fields, unpack_map, encoding, np.where(node, order, -1)
