"""The conformance suite's trees: ours pass, and each planted mistake is named, and nothing else."""

import itertools

import numpy as np
import pytest

from treeattn_conformance import check_tree
from treeattn_conformance.token_trees import tree_batches
from treeattn_conformance.trees import TREE_CURES


def ancestors(parent, node):
    """The node, its parent, and so on to a root."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(parent[node])
    return path


def walk_links(parents):
    """(next_token, next_sibling) of dictionaries of children; the last child comes first."""
    links = np.full((2, *parents.shape), -1)
    for r, parent in enumerate(parents):
        children = {}
        for i, p in enumerate(parent.tolist()):
            children.setdefault(p, []).append(i)
        for p, found in children.items():
            order = found if p < 0 else found[::-1]
            if p >= 0:
                links[0, r, p] = order[0]
            for one, other in itertools.pairwise(order):
                links[1, r, one] = other
    return links


def build(parents, lengths):
    b, n = parents.shape
    mask = np.zeros((b, n, n), bool)
    positions = np.zeros((b, n), int)
    for r, i in np.ndindex(b, n):
        path = ancestors(parents[r], i)
        mask[r, i, path] = True
        positions[r, i] = lengths[r] + len(path) - 1
    next_token, next_sibling = walk_links(parents)
    return {
        "mask": mask,
        "positions": positions,
        "next_token": next_token,
        "next_sibling": next_sibling,
    }


def commit(cache, lengths, accepted):
    cache = cache.copy()
    counts = []
    for row, length, path in zip(cache, lengths, accepted, strict=True):
        kept = [node for node in path.tolist() if node >= 0]
        row[length : length + len(kept)] = row[[length + node for node in kept]]
        counts.append(len(kept))
    return cache, lengths + np.array(counts)


def changed(**changes):
    """`build` with other fields: name=f(the right answer, parents, lengths)."""

    def wrong(parents, lengths):
        answer = build(parents, lengths)
        return answer | {name: f(answer, parents, lengths) for name, f in changes.items()}

    return wrong


def of_first_row(parents, lengths):
    same = build(np.repeat(parents[:1], len(parents), 0), lengths)
    return same | {"positions": same["positions"] - lengths[:, None] + lengths[:, None]}


def levels(answer, parents, lengths):
    d = answer["positions"] - lengths[:, None]
    return (d[:, None] < d[:, :, None]) | np.eye(d.shape[1], dtype=bool)


def causal(answer, parents, lengths):
    n = parents.shape[1]
    return np.tile(np.tri(n, dtype=bool), (len(parents), 1, 1))


def parent_alone(answer, parents, lengths):
    mask = np.zeros_like(answer["mask"])
    for r, i in np.ndindex(*parents.shape):
        mask[r, i, ancestors(parents[r], i)[:2]] = True
    return mask


def seen_by_root(answer, parents, lengths):
    mask = answer["mask"].copy()
    mask[:, 0] = True
    return mask


def strict(answer, parents, lengths):
    return answer["mask"] & ~np.eye(parents.shape[1], dtype=bool)


def by_level(answer, parents, lengths):
    """The next node at the same depth, as a breadth-first list has it."""
    positions = answer["positions"]
    links = np.full_like(parents, -1)
    for r, i in np.ndindex(*parents.shape):
        later = [j for j in range(i + 1, parents.shape[1]) if positions[r, j] == positions[r, i]]
        links[r, i] = later[0] if later else -1
    return links


def first_child(answer, parents, lengths):
    links = np.full_like(parents, -1)
    for r, i in np.ndindex(*parents.shape):
        children = np.flatnonzero(parents[r] == i)
        links[r, i] = children[0] if len(children) else -1
    return links


def last_child(answer, parents, lengths):
    links = np.full_like(parents, -1)
    for r, i in np.ndindex(*parents.shape):
        links[r, parents[r, i]] = i if parents[r, i] >= 0 else links[r, parents[r, i]]
    return links


def next_child(answer, parents, lengths):
    links = np.full_like(parents, -1)
    for r, i in np.ndindex(*parents.shape):
        later = [j for j in np.flatnonzero(parents[r] == parents[r, i]) if j > i]
        links[r, i] = later[0] if later else -1
    return links


def next_index(answer, parents, lengths):
    n = parents.shape[1]
    return np.tile([*range(1, n), -1], (len(parents), 1))


def none(answer, parents, lengths):
    return np.full_like(parents, -1)


def zeroed(links):
    return lambda *arguments: np.maximum(links(*arguments), 0)


def at(offset):
    return lambda answer, parents, lengths: answer["positions"] + offset


def by_index(answer, parents, lengths):
    return lengths[:, None] + np.arange(parents.shape[1])


def one_length(answer, parents, lengths):
    return answer["positions"] - lengths[:, None] + lengths.max()


WRONG_BUILDERS = [
    ("one row's tree for all", of_first_row),
    ("causal mask", changed(mask=causal)),
    ("whole levels seen", changed(mask=levels)),
    ("only the parent seen", changed(mask=parent_alone)),
    ("a node does not see itself", changed(mask=strict)),
    ("mask transposed", changed(mask=lambda answer, *_: answer["mask"].swapaxes(1, 2))),
    ("True means hidden", changed(mask=lambda answer, *_: ~answer["mask"])),
    ("root sees drafts", changed(mask=seen_by_root)),
    ("positions by index", changed(positions=by_index)),
    (
        "positions without the prefix",
        changed(positions=lambda a, p, n: a["positions"] - n[:, None]),
    ),
    ("one prefix length for all", changed(positions=one_length)),
    ("positions off by one", changed(positions=at(1))),
    ("positions off by one", changed(positions=at(-1))),
    ("next sibling by level", changed(next_token=first_child, next_sibling=by_level)),
    ("only first children", changed(next_token=first_child, next_sibling=none)),
    ("next token by index", changed(next_token=next_index, next_sibling=next_child)),
    ("last child first", changed(next_token=last_child, next_sibling=next_child)),
    ("0 for none", changed(next_token=zeroed(first_child), next_sibling=zeroed(next_child))),
]


def dense(cache, lengths, accepted):
    return cache, lengths + (accepted >= 0).sum(1)


def first_rows_path(cache, lengths, accepted):
    return commit(cache, lengths, np.repeat(accepted[:1], len(accepted), 0))


def first_rows_count(cache, lengths, accepted):
    kept, _ = commit(cache, lengths, accepted)
    return kept, lengths + (accepted[0] >= 0).sum()


def rootless(cache, lengths, accepted):
    return commit(cache, lengths, accepted[:, 1:])


WRONG_COMMITS = [
    ("path kept as a dense prefix", dense),
    ("one row's path for all", first_rows_path),
    ("one row's count for all", first_rows_count),
    ("root not kept", rootless),
]


def test_plain_dictionaries_and_loops_pass():
    report = check_tree(build, commit)
    assert report.names("passed") == ["mask", "positions", "walk", "commit"], str(report)


@pytest.mark.parametrize(("name", "wrong"), WRONG_BUILDERS)
def test_a_wrong_builder_is_named(name, wrong):
    report = check_tree(wrong)
    assert report.fingerprints == {name}, str(report)
    assert TREE_CURES[name] in str(report)
    assert report.names("skipped") == ["commit"]


@pytest.mark.parametrize(("name", "wrong"), WRONG_COMMITS)
def test_a_wrong_commit_is_named(name, wrong):
    report = check_tree(commit=wrong)
    assert report.fingerprints == {name}, str(report)


def test_every_fingerprint_is_planted():
    planted = {name for name, _ in WRONG_BUILDERS + WRONG_COMMITS}
    assert planted == set(TREE_CURES)


def test_what_is_not_there_is_skipped_and_what_raises_fails():
    def one_root(parents, lengths):
        if (parents[:, 1:] < 0).any():
            raise NotImplementedError("one root")
        return {"mask": build(parents, lengths)["mask"]}

    report = check_tree(one_root)
    assert report.names("passed") == ["mask"]
    assert report.names("skipped") == ["positions", "walk", "commit"]

    def raises(parents, lengths):
        raise ValueError("no trees here")

    assert "one node: ValueError: no trees here" in str(check_tree(raises))
    with pytest.raises(TypeError, match="expected a function build or commit"):
        check_tree()


def test_an_unknown_mistake_is_placed():
    report = check_tree(changed(positions=at(7)))
    assert report.names("failed") == ["positions"] and report.fingerprints == set()
    assert "one node: [0, 0] is 10, expected 3" in str(report)


def test_a_walk_that_never_ends_fails():
    def circle(parents, lengths):
        answer = build(parents, lengths)
        return answer | {"next_sibling": np.zeros_like(parents)}

    report = check_tree(circle)
    assert report.names("failed") == ["walk"]


def test_batches_are_the_same_every_time_and_parents_come_first():
    for one, other in zip(tree_batches(), tree_batches(), strict=True):
        np.testing.assert_array_equal(one[1], other[1])
        np.testing.assert_array_equal(one[2], other[2])
        assert (one[1] < np.arange(one[1].shape[1])).all()


def test_a_part_that_is_known_to_fail():
    wrong = changed(positions=at(7))
    report = check_tree(wrong, expect={"positions": "counted from 7 on"})
    assert report and report.names("expected") == ["positions"], str(report)
    assert check_tree(wrong, only=["mask"]).names("passed") == ["mask"]
