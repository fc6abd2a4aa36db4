"""Users' tests rely on copies of arguments, on a report's truth, and on its printed text."""

import io
import subprocess
import sys

import numpy as np
import pytest

from treeattn_conformance import attend, check_attention, check_merge, folded, merge
from treeattn_conformance.__main__ import main


def in_place(parts):
    out, lse = merge(parts)
    parts[0][0][...] = out
    return out, lse


def shifted_in_place(parts):
    for _, lse in parts:
        lse -= 1
    out, lse = merge(parts)
    return out, lse + 1


def masks_in_place(q, k, v, *, mask=None):
    if mask is None:
        return attend(q, k, v)
    np.logical_not(mask, out=mask)
    return attend(q, k, v, mask=~mask)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("check", "wrong", "right", "named"),
    [
        (check_merge, in_place, merge, "parts"),
        (check_merge, shifted_in_place, merge, "parts"),
        (check_attention, masks_in_place, attend, "mask"),
    ],
)
def test_a_function_that_writes_into_its_arguments_spoils_no_later_check(
    check, wrong, right, named
):
    report = check(wrong)
    assert report.names("failed") == ["arguments"], str(report)
    assert f"it writes into {named}" in str(report)
    assert not check(right).names("failed"), str(check(right))


def test_a_report_is_true_where_something_passed_and_nothing_failed():
    def unfinished(parts):
        raise NotImplementedError("not for a CPU")

    assert check_merge(merge)
    assert not check_merge(lambda parts: (2 * merge(parts)[0], merge(parts)[1]))
    report = check_merge(unfinished)
    assert not report and not report.names("passed") and not report.names("failed")


def test_a_skipped_line_is_one_line():
    def dispatcher(parts):
        raise NotImplementedError("\n".join(["Could not run 'op' on this backend.", *"abc" * 20]))

    report = check_merge(dispatcher)
    lines = str(report).splitlines()
    assert len(lines) == len(report.results) + 1, str(report)
    assert all("Could not run 'op' on this backend." in line for line in lines[:-1])
    assert "no success" in lines[-1]


def test_a_failed_line_is_one_line():
    def refuses(parts):
        raise ValueError("first line\n" * 30)

    lines = str(check_merge(refuses)).splitlines()
    assert len(lines) == len(check_merge(refuses).results)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_a_report_prints_on_any_terminal(encoding, monkeypatch):
    def finite(parts):
        out, lse = merge(parts)
        if len(parts) == 2:
            raise ValueError("−∞, and ☃")
        return out, np.where(np.isneginf(lse), -1e30, lse)

    with np.errstate(all="ignore"):
        report = check_merge(finite)
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    print(report)
    terminal.flush()
    said = terminal.buffer.getvalue().decode(encoding)
    infinite = "−∞".encode(encoding, "backslashreplace").decode(encoding)
    assert f"ValueError: {infinite}, and" in said and f"write {infinite}" in said


def test_from_a_shell_in_ascii(tmp_path):
    (tmp_path / "asked_in_ascii.py").write_text(
        "from treeattn_conformance import merge\n"
        "def wrong(parts):\n"
        "    out, lse = merge(parts)\n"
        "    return out, lse.clip(-1e30)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "treeattn_conformance", "merge", "asked_in_ascii:wrong"],
        cwd=tmp_path,
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        timeout=60,
    )
    assert done.returncode == 1 and b"finite lse for no keys" in done.stdout, done.stderr


def stale_kernel(q, k, v, *, kv_lengths=None):
    out, lse = attend(q, k, v, kv_lengths=kv_lengths)
    return out + 0 * np.einsum("bnhd->b", v)[:, None, None, None], lse


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_failure_that_is_known_is_expected():
    reason = "callers never leave NaN behind"
    report = check_attention(stale_kernel, expect={"stale NaN": reason})
    assert report and report.names("expected") == ["stale NaN"], str(report)
    assert f"stale NaN                expected {reason}: stale NaN" in str(report)
    assert not check_attention(stale_kernel)
    assert not check_attention(stale_kernel, expect=["mean(V) for no keys"])
    report = check_merge(merge, expect="two shards")
    assert report and "two shards               passed   expected to fail" in str(report)
    with pytest.raises(ValueError, match=r"expect has .*'stele NaN'"):
        check_attention(stale_kernel, expect=["stele NaN"])


def test_failures_that_a_mistake_explains_can_be_expected_by_its_name():
    def zero(parts):
        out, lse = merge(parts)
        return out, np.where(np.isneginf(lse), 0, lse)

    report = check_merge(zero, expect={"no keys as lse 0": "written so on purpose"})
    assert report and report.names("expected") and not report.names("failed"), str(report)


def test_only_some_questions():
    report = check_merge(merge, only=["two shards", "ragged"])
    assert report.names("passed") == ["two shards", "ragged"] and len(report.results) == 2
    with pytest.raises(ValueError, match=r"only has .*'three shards'"):
        check_merge(merge, only=["three shards"])


def test_raise_for_failures():
    check_merge(merge).raise_for_failures()
    with pytest.raises(AssertionError, match=r"two shards +failed"):
        check_merge(lambda parts: (2 * merge(parts)[0], merge(parts)[1])).raise_for_failures()


def test_out_alone_is_judged_by_out():
    def alone(*arguments, **options):
        return attend(*arguments, **options)[0]

    def tiled(q, k, v):
        groups = q.shape[2] // k.shape[2]
        return alone(q, np.tile(k, (1, 1, groups, 1)), np.tile(v, (1, 1, groups, 1)))

    assert check_attention(alone), str(check_attention(alone))
    report = check_attention(tiled)
    assert report.fingerprints == {"heads tiled"}, str(report)
    report = check_attention(lambda q, k, v: (*attend(q, k, v), None))
    assert "3 arrays came, expected (out, lse), or out alone" in str(report)


def test_a_merge_of_two_is_asked_folded():
    def flat(out, lse, other_out, other_lse):
        return merge([(out, lse), (other_out, other_lse)])

    def of_pairs(a, b):
        return merge([a, b])

    for two in (flat, of_pairs):
        with pytest.raises(TypeError, match=r"check_merge\(folded\(merge\)\)"):
            check_merge(two)
        report = check_merge(folded(two))
        assert report, str(report)


def test_some_questions_from_a_shell(capsys):
    place = "treeattn_conformance:attend"
    assert main(["attention", place, "--only", "plain", "--only", "mask"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split() for line in said] == [["plain", "passed"], ["mask", "passed"]]
    for wrong, message in (
        (["tree", place, "--dtype", "float32"], "unexpected keyword argument 'dtype'"),
        (["attention", place, "--only", "no such"], "only has"),
        ([], "the following arguments are required"),
    ):
        with pytest.raises(SystemExit):
            main(wrong)
        assert message in capsys.readouterr().err


def test_faults_of_size_are_seen():
    """Blocks of 64 or 128, buffers of 64 or 8, one byte for a length: all are right for 40 keys."""

    def lengths_as_bytes(q, k, v, *, kv_lengths=None):
        return attend(
            q, k, v, kv_lengths=None if kv_lengths is None else kv_lengths.astype("uint8")
        )

    def not_rescaled(q, k, v):
        m, d, n = -np.inf, 0, 0
        for i in range(0, k.shape[1], 64):
            out, lse = attend(q, k[:, i : i + 64], v[:, i : i + 64])
            m, old = np.maximum(m, lse), m
            w = np.exp(lse - m)
            d, n = d * np.exp(old - m) + w, n + w[..., None] * out
        return n / d[..., None], m + np.log(d)

    def cut(axis, most):
        def kernel(q, k, v):
            out, lse = attend(q, k, v)
            out, lse = out.copy(), lse.copy()
            out[(slice(None),) * axis + (slice(most, None),)] = 0
            return out, lse

        return kernel

    def first_columns(q, k, v):
        scale = q.shape[-1] ** -0.5
        return attend(q[..., :64], k[..., :64], v, scale=scale)

    faults = {
        "the second split is lost": lambda q, k, v: attend(q, k[:, :256], v[:, :256]),
        "the last partial block": lambda q, k, v: attend(
            q, *(x[:, : max(k.shape[1] // 64 * 64, k.shape[1] % 64)] for x in (k, v))
        ),
        "not rescaled": not_rescaled,
        "queries beyond 64": cut(1, 64),
        "heads beyond 8": cut(2, 8),
        "columns beyond 64": cut(3, 64),
        "columns beyond 128": cut(3, 128),
        "d beyond 64": first_columns,
        "lengths as bytes": lengths_as_bytes,
    }
    for name, fault in faults.items():
        report = check_attention(fault)
        assert report.names("failed"), name
        assert report.fingerprints == set(), f"{name}: {report}"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_out_alone_of_another_shape_is_reported():
    turned = check_attention(lambda q, k, v: attend(q, k, v)[0].swapaxes(1, 2))
    assert "shapes [(2, 4, 3, 16)], expected [(2, 3, 4, 16)]" in str(turned)
    nothing = check_merge(lambda parts: None)
    assert "the function returned None, expected (out, lse)" in str(nothing)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_some_questions_alone_name_no_mistake():
    """Fewer answers fit more mistakes: wrong names, too."""

    def pivot_of_all(parts):
        out, lse = (np.stack(x).astype("float32") for x in zip(*parts, strict=True))
        w = np.exp(lse - lse.max())
        return (out * w[..., None]).sum(0) / w.sum(0)[..., None], lse.max() + np.log(w.sum(0))

    assert "pivot of other rows" in check_merge(pivot_of_all).fingerprints
    report = check_merge(pivot_of_all, only=["one shard", "two shards", "rows far apart"])
    assert report.names("failed") and not report.fingerprints


def test_a_loosened_tolerance_holds_for_lse():
    def off(parts):
        out, lse = merge(parts)
        return out, lse + 1e-3

    assert check_merge(off).names("failed")
    assert check_merge(off, tolerance=5e-3)
    assert not check_merge(off, tolerance=1e-6)
