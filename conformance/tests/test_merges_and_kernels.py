"""check_merge and check_attention: what is expected is right, and planted mistakes are named."""

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from public_bugs import GUARD, UNREAD, changed
from right_ones import kernel, kernel_by_blocks, merge_at_once

import treeattn_conformance
from treeattn_conformance import CURES, bfloat16, check_attention, check_merge, merge
from treeattn_conformance import attend as reference
from treeattn_conformance.__main__ import main
from treeattn_conformance.forward import attention_questions, merge_questions
from treeattn_conformance.kernel_mistakes import kernel_mistakes
from treeattn_conformance.merge_mistakes import merge_mistakes
from treeattn_conformance.reference import TOLERANCES, clean, rounded

DTYPES = tuple(TOLERANCES)
PACKAGE = Path(treeattn_conformance.__file__).parent


# The suite's right answers


def test_a_sink_is_a_key_whose_value_is_zero():
    (case,) = (case for case in attention_questions("float64") if case.name == "sinks")
    q, k, v = case.arguments.values()
    s = np.einsum("blhd,bnhd->blhn", q, k) / 4
    s = np.concatenate([s, np.broadcast_to(case.options["sinks"][:, None], (*s.shape[:-1], 1))], -1)
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    np.testing.assert_allclose(
        case.right[0], np.einsum("blhn,bnhd->blhd", p[..., :-1], v), atol=1e-12
    )
    np.testing.assert_allclose(case.right[1], np.log(np.exp(s).sum(-1)), atol=1e-12)


def test_of_no_keys_at_all_the_answer_is_nothing():
    q = np.ones((2, 3, 4, 16))
    nothing = np.ones((2, 0, 2, 16))
    out, lse = reference(q, nothing, nothing)
    np.testing.assert_array_equal(out, np.zeros((2, 3, 4, 16)))
    np.testing.assert_array_equal(lse, np.full((2, 3, 4), -np.inf))
    out, lse = reference(q, nothing, nothing, sinks=np.arange(4.0))
    np.testing.assert_array_equal(out, np.zeros((2, 3, 4, 16)))
    np.testing.assert_array_equal(lse, np.broadcast_to(np.arange(4.0), (2, 3, 4)))


def test_expected_merges_are_weighted_means():
    for case in merge_questions("float64"):
        parts = case.arguments["parts"]
        out, lse = (np.stack(x) for x in zip(*parts, strict=True))
        keys = np.isfinite(lse)
        pivot = lse[keys].mean() if keys.any() else 0
        assert (np.isneginf(case.right[1]) == ~keys.any(0)).all() and (
            case.right[0][~keys.any(0)] == 0
        ).all()
        w = np.where(keys, np.exp((lse - pivot).astype(np.longdouble)), 0)
        some = keys.any(0)
        mean = (np.where(keys[..., None], out, 0) * w[..., None]).sum(0)[some] / w.sum(0)[
            some, None
        ]
        np.testing.assert_allclose(case.right[0][some], mean.astype(float), rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(np.log(w.sum(0)[some]), case.right[1][some] - pivot, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_are_the_same_every_time_and_exact_in_their_dtype(dtype):
    for cases in (merge_questions, attention_questions):
        for one, other in zip(cases(dtype), cases(dtype), strict=True):
            np.testing.assert_equal(one, other)
    for x in attention_questions(dtype)[0].arguments.values():
        assert x.dtype == ("float32" if dtype == "bfloat16" else dtype)
        np.testing.assert_array_equal(rounded(x, dtype), x)


def test_a_copy_under_another_name_needs_numpy_alone(tmp_path):
    """From an otherwise empty folder."""
    shutil.copytree(PACKAGE, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    code = """
import sys
sys.path.insert(0, ".")
import numpy
before = set(sys.modules)
import mine, mine.__main__
news = {name.split(".")[0] for name in set(sys.modules) - before}
print(*sorted(news - set(sys.stdlib_module_names)))
print(mine.check_merge(mine.merge).names("failed"))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["mine", "[]"], done.stderr


def test_asked_from_a_shell(tmp_path, monkeypatch, capsys):
    lines = (
        "from treeattn_conformance import attend, merge",
        "def wrong(parts):",
        "    return 2 * merge(parts)[0], merge(parts)[1]",
        "def tree(parents, lengths):",
        "    return {}",
    )
    (tmp_path / "asked_from_a_shell.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["merge", "asked_from_a_shell:merge", "--dtype", "float64"]) == 0
    assert main(["attention", "asked_from_a_shell:attend"]) == 0
    assert main(["tree", "asked_from_a_shell:tree"]) == 1  # all are skipped
    assert "failed" not in capsys.readouterr().out
    assert main(["merge", "asked_from_a_shell:wrong"]) == 1
    assert (
        "two shards               failed   out is 2 times what it should be"
        in capsys.readouterr().out
    )
    for place, message in (
        ("asked_from_a_shell", "expected module:function"),
        ("asked_from_a_shell:there", "has no attribute 'there'"),
        ("not_there:merge", "No module named 'not_there'"),
    ):
        with pytest.raises(SystemExit):
            main(["merge", place])
        assert message in capsys.readouterr().err


# Failures and their fingerprints


def half(x):
    return x.astype(np.float16).astype(np.float64)


def in_turn(carry_out=lambda x: x, carry_lse=lambda x: x):
    def step(a, b):
        out, lse = merge([a, b])
        return carry_out(out), carry_lse(lse)

    return lambda parts: functools.reduce(step, parts)


def not_rescaled(parts):
    """An online softmax that forgets its old sums when a larger maximum comes."""
    out, lse = (np.stack(x).astype(np.float64) for x in zip(*parts, strict=True))
    lse = np.where(np.isposinf(lse), -np.inf, lse)
    m = np.maximum.accumulate(lse)
    w = np.where(np.isneginf(lse), 0, np.exp(lse - np.where(np.isneginf(m), 0, m)))
    n = (w[..., None] * np.where(w[..., None] == 0, 0, out)).sum(0)
    d = w.sum(0)
    return n / np.where(d == 0, 1, d)[..., None], m[-1] + np.log(d)


def zero_for_none(parts):
    """Shards without keys leave zeros in their memory."""
    return merge(
        [
            (np.where(np.isinf(lse)[..., None], 0, out), np.where(np.isinf(lse), 0, lse))
            for out, lse in parts
        ]
    )


READS = "np.where(np.isposinf(lse), -np.inf, lse)"
SUM = "d = w.sum(axis=0)"
SHARES = (  # each weight divided before it is multiplied, by a weight of this form
    (SUM, f"{SUM}\n    w = w / np.where(d > 0, d, 1)"),
    (" / np.where(d > 0, d, 1)[..., None], pivot", ", pivot"),
)
WEIGHED = "out, 0) * w[..., None]"
WRONG_MERGES = [
    ("stale pivot", not_rescaled),
    ("no keys as lse 0", zero_for_none),
    ("epsilon in the sum", changed(merge_at_once, (SUM, f"{SUM} + 1e-10"))),
    (
        "axes of lse",
        changed(
            merge_at_once,
            *SHARES,
            (WEIGHED, "out, 0) * w.swapaxes(2, 3).reshape(w.shape)[..., None]"),
        ),
    ),
    (
        "axes of lse",
        changed(merge_at_once, *SHARES, (WEIGHED, "out, 0) * w.swapaxes(2, 3)[..., None]")),
    ),
    ("log base 2", lambda parts: (merge(parts)[0], merge(parts)[1] / np.log(2))),
    ("lse +inf for no keys", changed(merge_at_once, (READS, "lse"))),
    (
        "mean(V) for no keys",
        changed(
            merge_at_once,
            (READS, "np.where(np.isinf(lse), -1e30, lse)"),
            ("pivot + np.log(d)", "np.where(m < -1e29, -np.inf, pivot + np.log(d))"),
        ),
    ),
    ("stale NaN", changed(merge_at_once, ("np.where(w[..., None] > 0, out, 0)", "out"))),
    ("lse in bfloat16", in_turn(carry_lse=bfloat16)),
    ("lse in float16", lambda parts: merge([(o, half(l)) for o, l in parts])),
    ("lse in float16", in_turn(carry_lse=half)),
    ("lse + block_lse", lambda parts: (merge(parts)[0], sum(lse for _, lse in parts))),
    ("rounded to 16 bits", in_turn(carry_out=bfloat16)),
    ("rounded to 16 bits", in_turn(carry_out=half)),
    (
        "−∞ is a number that scores reach",
        changed(merge_at_once, ("lse.max(axis=0)", "lse.max(axis=0, initial=-1e4)")),
    ),
    ("NaN lost", lambda parts: (np.nan_to_num(merge(parts)[0]), merge(parts)[1])),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "wrong"), WRONG_MERGES)
def test_a_planted_mistake_of_a_merge_has_its_own_fingerprint(name, wrong):
    report = check_merge(wrong)
    assert report.fingerprints == {name}, str(report)
    assert CURES["merge"][name] in str(report)


def bfloat16_shares(parts):
    """Every device's share of the output, exp(lse − total) out, added one by one in bfloat16."""
    lse, total = merge(parts)[1], np.float32(0)
    for out, own in parts:
        share = np.exp(own - np.where(np.isinf(lse), 0, lse))[..., None] * out
        total = bfloat16(total + bfloat16(np.where(np.isinf(own)[..., None], 0, share)))
    return total, lse


@pytest.mark.slow
def test_sums_in_bfloat16_fail_by_the_number_of_devices():
    """With outs in bfloat16 anyway, two shards are as good as their dtype; 256 are not."""
    report = check_merge(bfloat16_shares, dtype="bfloat16")
    assert report.names("failed") == ["256 shards", "many small shards"]
    assert report.fingerprints == {"rounded to 16 bits"}


def forgets_every_64th_time(parts):
    """A loop that does not rescale its sums where the number of a shard is a multiple of 64."""
    m, d, n = np.full(parts[0][1].shape, -np.inf), 0, 0
    for i, (out, lse) in enumerate(
        zip(*clean(*map(np.stack, zip(*parts, strict=True))), strict=True)
    ):
        new = np.maximum(m, lse)
        old, w = (np.where(np.isneginf(x), 0, np.exp(x - new)) for x in (m, lse))
        old = 1 if i and i % 64 == 0 else old
        m, d, n = new, d * old + w, n * np.expand_dims(old, -1) + w[..., None] * out
    return n / np.where(d == 0, 1, d)[..., None], m + np.log(d)


def loses_the_last_of_many(parts):
    return merge(parts[:-1] if len(parts) > 8 and len(parts) % 2 else parts)


@pytest.mark.parametrize("wrong", [forgets_every_64th_time, loses_the_last_of_many])
def test_a_fault_of_many_shards_is_seen(wrong):
    assert "301 shards, lse rising" in check_merge(wrong).names("failed")


def as_kernel(finish=lambda answer: answer, **fixed):
    def kernel(q, k, v, **options):
        return finish(reference(q, k, v, **{**options, **fixed}))

    return kernel


def lse_as(change):
    return as_kernel(lambda answer: (answer[0], change(answer[1])))


def shards_with_sinks(q, k, v, *, sinks=None, **options):
    if sinks is None:
        return reference(q, k, v, **options)
    halves = [slice(i, i + 10) for i in range(0, 40, 10)]
    return merge([reference(q, k[:, x], v[:, x], sinks=sinks) for x in halves])


def local_bounds(q, k, v, *, query_positions=None, key_positions=None, **options):
    """Four devices with every fourth key each, whose causal bound uses local key numbers."""
    if query_positions is None:
        return reference(q, k, v, **options)
    parts = []
    for stripe in (slice(r, None, 4) for r in range(4)):
        n = k[:, stripe].shape[1]
        l = len(query_positions)
        mask = np.arange(n) <= n - l + np.arange(l)[:, None]
        parts.append(reference(q, k[:, stripe], v[:, stripe], mask=mask[None, None]))
    return merge(parts)


def two_by_two(x):
    return x[:, :, np.r_[0 : x.shape[2] : 2, 1 : x.shape[2] : 2]]


def forgetful(size, *changes):
    """FlashAttention's loop: its pivot is the largest score so far, and sums keep an old one."""
    return changed(kernel_by_blocks, ("16", str(size)), *changes)


OLD_D, OLD_N = ("d * old", "d"), ("n * old[..., None]", "n")
WRONG_KERNELS = [
    ("heads regrouped", as_kernel(lambda answer: tuple(map(two_by_two, answer)))),
    ("heads regrouped", as_kernel(lambda answer: (np.roll(answer[0], 1, 2), answer[1]))),
    ("no keys as lse 0", lse_as(lambda lse: np.where(np.isneginf(lse), 0, lse))),
    ("finite lse for no keys", lse_as(lambda lse: np.where(np.isneginf(lse), -49993.98, lse))),
    ("axes of lse", lse_as(lambda lse: lse.swapaxes(1, 2).reshape(lse.shape))),
    ("axes of lse", lse_as(lambda lse: lse.swapaxes(1, 2))),
    (
        "mean(V) for no keys",
        changed(
            kernel,
            ("s = np.where(seen, s, -np.inf)", "s = np.where(seen, s, -1e30)"),
            ("np.where(seen, np.exp(s - m[..., None]), 0)", "np.exp(s - m[..., None])"),
            (UNREAD, "v = np.nan_to_num(v)"),
            ("(m + np.log(d))", "np.where(m < -1e29, -np.inf, m + np.log(d))"),
        ),
    ),
    (
        "NaN for no keys",
        as_kernel(lambda answer: (answer[0] + 0 / np.isfinite(answer[1])[..., None], answer[1])),
    ),
    ("lse in bfloat16", lse_as(bfloat16)),
    ("lse in float16", lse_as(half)),
    ("rounded to 16 bits", as_kernel(lambda answer: (bfloat16(answer[0]), answer[1]))),
    (
        "keys lost beside hidden ones",
        lambda *x, mask=None: reference(*x, mask=None if mask is None else mask & mask[..., :1]),
    ),
    (
        "another first key of the window",
        lambda *x, window=None: reference(*x, window=window and window - 1),
    ),
    ("sinks once a shard", shards_with_sinks),
    ("sinks ignored", as_kernel(sinks=None)),
    ("local positions", local_bounds),
    ("exp overflows", changed(kernel, (GUARD, "m = np.zeros_like(m)"))),
    *(
        ("stale pivot", forgetful(size, *changes))
        for size in (8, 32)
        for changes in ([OLD_N], [OLD_D], [OLD_D, OLD_N])
    ),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "wrong"), WRONG_KERNELS)
def test_a_planted_mistake_of_a_kernel_has_its_own_fingerprint(name, wrong):
    report = check_attention(wrong)
    assert report.fingerprints == {name}, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["merge", "attention"])
def test_what_is_not_planted_here_is_named_as_the_suite_has_it(kind):
    """One form of each mistake, checked as a function under test."""
    check = check_merge if kind == "merge" else check_attention
    mistakes = merge_mistakes() if kind == "merge" else kernel_mistakes()
    known = {name for name, _ in WRONG_MERGES + WRONG_KERNELS}
    for mistake in mistakes:
        if mistake.name not in known:
            report = check(mistake.wrong(7.0) if hasattr(mistake, "low") else mistake.wrong)
            assert mistake.name in report.fingerprints, str(report)
            known.add(mistake.name)
    assert set(CURES[kind]) <= known


def test_a_mistake_that_nobody_knows_is_described():
    report = check_merge(lambda parts: (3 * merge(parts)[0], merge(parts)[1]))
    assert report.fingerprints == set()
    assert "out is 3 times what it should be" in str(report)
    report = check_attention(lambda q, k, v: (reference(q, k, v)[0], reference(q, k, v)[1] + 1))
    assert report.fingerprints == set()
    assert "lse is +1 off, everywhere the same" in str(report)

    def of_another_head(q, k, v):
        out, lse = reference(q, k, v)
        out[:, :, -1] = out[:, :, 0]
        return out, lse

    detail = check_attention(of_another_head).results[0].detail
    assert detail.startswith("out is off by up to") and detail.endswith("in head 3 of 4")


def test_a_kernel_without_options_is_asked_what_it_can_answer():
    report = check_attention(lambda q, k, v: reference(q, k, v))
    assert not report.names("failed")
    assert report.names("skipped") == [
        case.name
        for case in attention_questions()
        if case.options and case.name != "all options at once"
    ], str(report)
    assert "it has no option kv_lengths" in str(report)


def test_what_is_no_function_is_refused():
    for check in (check_merge, check_attention):
        with pytest.raises(TypeError, match="expected a function, got 3"):
            check(3)


def test_what_raises_or_has_another_shape_fails_and_what_is_not_there_is_skipped():
    def unfinished(q, k, v, **options):
        if "sinks" in options:
            raise NotImplementedError("no sinks")
        if "mask" in options:
            raise ValueError("cannot mask")
        out, lse = reference(q, k, v, **options)
        return out, lse[0]

    report = check_attention(unfinished)
    without = ["sinks", "large sinks", "all options at once"]
    assert report.names("skipped") == without and not report.names("passed")
    assert "ValueError: cannot mask" in str(report) and "no sinks" in str(report)
    assert "shapes [(2, 3, 4, 16), (3, 4)], expected [(2, 3, 4, 16), (2, 3, 4)]" in str(report)
