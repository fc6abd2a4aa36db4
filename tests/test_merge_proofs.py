"""The merge's algebra in sympy, for any pivots: the maximum guards range, and nothing else."""

import pytest
import sympy as sp

REAL = dict(real=True)
M, M1, M2 = sp.symbols("M M1 M2", **REAL)


def state(name):
    """(m, d, n) with symbols of its own; the numerator's components are alike, so one will do."""
    return (
        sp.Symbol(f"m_{name}", **REAL),
        sp.Symbol(f"d_{name}", positive=True),
        sp.Symbol(f"n_{name}", **REAL),
    )


def merge(a, b, pivot):
    wa, wb = sp.exp(a[0] - pivot), sp.exp(b[0] - pivot)
    return pivot, a[1] * wa + b[1] * wb, a[2] * wa + b[2] * wb


def stands_for(x):
    """(m, d, n) ↦ (d·eᵐ, n·eᵐ)"""
    return sp.Matrix([x[1] * sp.exp(x[0]), x[2] * sp.exp(x[0])])


def finalize(x):
    return x[2] / x[1], x[0] + sp.log(x[1])


def is_zero(x):
    return all(sp.simplify(sp.expand(e)) == 0 for e in sp.Matrix([x]))


A, B, C = state("a"), state("b"), state("c")


def test_merge_is_a_homomorphism_into_addition_for_every_pivot():
    assert is_zero(stands_for(merge(A, B, M)) - stands_for(A) - stands_for(B))


def test_a_merge_without_rescaling_is_none():
    def broken(a, b, pivot):
        return pivot, a[1] + b[1], a[2] + b[2]

    assert not is_zero(stands_for(broken(A, B, M)) - stands_for(A) - stands_for(B))


def test_associativity_and_commutativity_with_free_pivots():
    left = merge(merge(A, B, M1), C, M)
    right = merge(A, merge(B, C, M2), M)
    assert is_zero(sp.Matrix(left) - sp.Matrix(right))  # the inner pivots cancel, field by field
    assert is_zero(sp.Matrix(merge(A, B, M)) - sp.Matrix(merge(B, A, M)))


def test_maxima_as_pivots_agree_too():
    a, b, c = A[0], B[0], C[0]
    assert sp.Max(sp.Max(a, b), c) == sp.Max(a, sp.Max(b, c))
    assert sp.Max(a, b) == sp.Max(b, a)


def test_the_derivative_by_a_pivot_vanishes():
    """Why stopping the pivot's gradient loses nothing."""
    assert is_zero(stands_for(merge(A, B, M)).diff(M))
    out, lse = finalize(merge(A, B, M))
    assert is_zero(sp.Matrix([out, lse]).diff(M))


@pytest.mark.parametrize("field", range(3))
def test_derivatives_through_a_stopped_pivot_are_those_of_the_sums(field):
    stopped = stands_for(merge(A, B, M)).diff(A[field])
    assert is_zero(stopped - (stands_for(A) + stands_for(B)).diff(A[field]))


def test_no_keys_is_the_identity_in_the_limit():
    empty = (sp.Symbol("m_0", **REAL), sp.S(0), sp.S(0))
    assert is_zero(stands_for(merge(A, empty, M)) - stands_for(A))
    # Even with sums beside it: what a pivot of −∞ stands for is nothing.
    for e in merge(A, B, A[0])[1:]:
        assert e.limit(B[0], -sp.oo) in A[1:]
    assert sp.limit(finalize(B)[1], B[0], -sp.oo) == -sp.oo


def test_attention_depends_only_on_what_a_state_stands_for():
    d, n = stands_for(A)
    out, lse = finalize(A)
    assert is_zero(sp.Matrix([out - n / d, sp.exp(lse) - d]))


def test_logsumexp_and_max_are_associative():
    """The two displayed equations of v1 and v2, section 5.1."""
    r, s, t = sp.symbols("R S T", **REAL)

    def lse(x, y):
        return sp.log(sp.exp(x) + sp.exp(y))

    assert sp.simplify(lse(t, lse(r, s)) - lse(lse(t, r), s)) == 0
    assert sp.Max(sp.Max(t, r), s) == sp.Max(t, sp.Max(r, s))


def test_the_output_form_and_the_sigmoid_form():
    oa, ob, la, lb = sp.symbols("o_a o_b l_a l_b", **REAL)
    out, lse = finalize(merge((la, sp.S(1), oa), (lb, sp.S(1), ob), M))
    total = sp.exp(la) + sp.exp(lb)
    assert is_zero(sp.Matrix([out - (oa * sp.exp(la) + ob * sp.exp(lb)) / total]))
    assert is_zero(sp.Matrix([sp.exp(lse) - total]))
    gate = 1 / (1 + sp.exp(la - lb))  # sigmoid(l_b − l_a)
    assert is_zero(sp.Matrix([oa + gate * (ob - oa) - out]))
    kept = 1 / (1 + sp.exp(lb - la))  # sigmoid(l_a − l_b)
    assert is_zero(sp.Matrix([sp.exp(la) / kept - total]))
