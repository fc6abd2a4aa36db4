"""The conformance suite's trees: ours pass, and each planted mistake is named, and nothing else."""

import numpy as np
import pytest
from public_bugs import changed
from right_ones import build, commit

from treeattn_conformance import check_tree
from treeattn_conformance.trees import TREE_CURES, tree_batches

TO_RETURN = "    return {"


def at_the_end(line):
    return changed(build, (TO_RETURN, f"    {line}\n{TO_RETURN}"))


def at(offset):
    return at_the_end(f"positions = positions + {offset}")


def of_first_tree(parents, lengths):
    return build(np.repeat(parents[:1], len(parents), 0), lengths)


def last_child_last(parents, lengths):
    """Walked rightly: the last child comes first, and each names the one before it."""
    answer = build(parents, lengths)
    links = answer["next_token"], answer["next_sibling"]
    for r, parent in enumerate(parents):
        for p in range(len(parent)):
            children = np.flatnonzero(parent == p)[::-1]
            links[0][r, p] = [*children, -1][0]
            links[1][r, children] = [*children[1:], -1][: len(children)]
    return answer


WRONG_BUILDERS = [
    ("one row's tree for all", of_first_tree),
    ("causal mask", at_the_end("mask[:] = np.tri(n, dtype=bool)")),
    (
        "whole levels seen",
        at_the_end("mask |= positions[:, None] < positions[:, :, None]"),
    ),
    (
        "only the parent seen",
        changed(build, ("mask[r, i] = mask[r, p]", "mask[r, i, p] = True")),
    ),
    ("a node does not see itself", at_the_end("mask &= ~np.eye(n, dtype=bool)")),
    ("mask transposed", at_the_end("mask = mask.swapaxes(1, 2)")),
    ("True means hidden", at_the_end("mask = ~mask")),
    ("root sees drafts", at_the_end("mask[:, 0] = True")),
    ("positions by index", at_the_end("positions = lengths[:, None] + np.arange(n) + 0 * parents")),
    ("positions without the prefix", at_the_end("positions = positions - lengths[:, None]")),
    (
        "one prefix length for all",
        at_the_end("positions = positions - lengths[:, None] + lengths.max()"),
    ),
    ("positions off by one", at(1)),
    ("positions off by one", at(-1)),
    ("drafts off by one", at("(parents >= 0)")),
]
WRONG_LINKS = [  # without a name
    at_the_end("next_sibling[:] = -1"),
    at_the_end("next_sibling[next_sibling < 0] = 0"),
    at_the_end("next_token[:] = [*range(1, n), -1]"),
    changed(build, ("            elif p >= 0:", "            if p >= 0:")),
]


def dense(cache, lengths, accepted):
    return cache, lengths + (accepted >= 0).sum(1)


def first_rows_count(cache, lengths, accepted):
    kept, _ = commit(cache, lengths, accepted)
    return kept, lengths + (accepted[0] >= 0).sum()


def rootless(cache, lengths, accepted):
    return commit(cache, lengths, accepted[:, 1:])


WRONG_COMMITS = [
    (dense, {"path kept as a dense prefix"}),
    (first_rows_count, set()),
    (rootless, set()),
]


@pytest.mark.parametrize("builder", [build, last_child_last])
def test_plain_loops_pass(builder):
    report = check_tree(builder, commit)
    assert report.names("passed") == ["mask", "positions", "walk", "commit"], str(report)


@pytest.mark.parametrize(("name", "wrong"), WRONG_BUILDERS)
def test_a_wrong_builder_is_named(name, wrong):
    report = check_tree(wrong)
    assert report.fingerprints == {name}, str(report)
    assert TREE_CURES[name] in str(report)
    assert report.names("skipped") == ["commit"]


@pytest.mark.parametrize("wrong", WRONG_LINKS)
def test_wrong_links_fail_at_a_node(wrong):
    report = check_tree(wrong)
    assert report.names("failed") == ["walk"] and "has the children" in str(report), str(report)


@pytest.mark.parametrize(("wrong", "names"), WRONG_COMMITS)
def test_a_wrong_commit_fails(wrong, names):
    report = check_tree(commit=wrong)
    assert report.names("failed") == ["commit"] and report.fingerprints == names, str(report)


def test_every_fingerprint_is_planted():
    planted = {name for name, _ in WRONG_BUILDERS}.union(*(names for _, names in WRONG_COMMITS))
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

    assert "several roots: ValueError: no trees here" in str(check_tree(raises))
    with pytest.raises(TypeError, match="expected a function build or commit"):
        check_tree()


def test_an_unknown_mistake_is_placed():
    report = check_tree(at(7))
    assert report.names("failed") == ["positions"] and report.fingerprints == set()
    assert "several roots: [0, 0] is 11, expected 4" in str(report)


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
    wrong = at(7)
    report = check_tree(wrong, expect={"positions": "counted from 7 on"})
    assert report and report.names("expected") == ["positions"], str(report)
    assert check_tree(wrong, only=["mask"]).names("passed") == ["mask"]
