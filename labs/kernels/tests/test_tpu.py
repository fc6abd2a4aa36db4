"""The kernels for TPUs: interpreted on simulated TPUs, and compiled for described ones."""

import contextlib
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import dense_attention, dense_weights

from labs.kernels import described_tpus, races, remote_merge
from labs.kernels.__main__ import plan_line
from labs.kernels.cases import draw
from labs.kernels.tpu_decode import (
    BUTTERFLY,
    ONE_SHOT,
    attend_on_tpu,
    merge_on_tpus,
    missing,
    one_kernel,
)
from treeattn import attend, kv_mesh, tree_decode

ALLOWED = 1e-5  # the error of a right result
LAB = races.PLANS.parents[1]
is_new = pytest.mark.skipif(bool(missing()), reason=str(missing()))


def check(p, shape, dtype, lengths=None, **options):
    """Asserts that `tree_decode` on p devices agrees with float64. A race raises."""
    q, k, v = draw(shape, dtype)
    n = shape[4]
    more = {} if lengths is None else {"kv_lengths": np.array(lengths, np.int32)}
    if lengths is not None:  # what stands past a length may be NaN
        past = (np.arange(n) >= more["kv_lengths"][:, None])[..., None, None]
        k, v = (jnp.where(past, jnp.nan, x) for x in (k, v))
    sharding = NamedSharding(kv_mesh(jax.devices()[:p]), P(None, "kv"))
    results = tree_decode(q, k, v, sharding=sharding, return_lse=True, **more, **options)
    out, lse = jax.block_until_ready(results)
    q, k, v = (np.nan_to_num(np.asarray(x, np.float64)) for x in (q, k, v))
    rounding = {"float32": 2e-6, "bfloat16": 1e-2}[dtype]  # of the output; lse is float32
    np.testing.assert_allclose(
        np.asarray(out, float), dense_attention(q, k, v, **more), atol=rounding
    )
    np.testing.assert_allclose(lse, dense_weights(q, k, **more)[1], rtol=1e-6, atol=2e-6)


# (p, (batch, queries, heads, key heads, keys, head_dim, value head_dim), dtype, lengths, protocol)
CASES = {
    "grouped heads, rows, a row without keys": (
        (4, (2, 1, 16, 2, 1100, 128, 128), "float32", [700, 0]),
        {"slots": 1},
    ),
    "bfloat16, several queries, wide values": (
        (2, (1, 3, 4, 2, 300, 64, 256), "bfloat16", [290]),
        {},
    ),
    "three devices, fewer keys than devices": (
        (3, (1, 1, 3, 3, 2, 512, 64), "float32", None),
        {"protocol": ONE_SHOT},
    ),
}


@is_new
@pytest.mark.parametrize("case", CASES)
def test_one_kernel_against_float64(case):
    arguments, options = CASES[case]
    check(*arguments, **one_kernel(**options))


@is_new
@pytest.mark.parametrize("protocol", [BUTTERFLY, ONE_SHOT], ids=["butterfly", "one-shot"])
def test_its_parts_are_an_implementation_and_a_method(protocol):
    method = functools.partial(merge_on_tpus, protocol=protocol)
    check(4, (1, 1, 4, 2, 130, 64, 64), "float32", method=method, implementation=attend_on_tpu)


@is_new
def test_states_without_keys_and_nan():
    """The contract: −∞ merges with anything, and a NaN that a query sees is not lost."""
    nan = draw((1, 1, 2, 1, 8, 64, 64), "float32")
    nan[1] = nan[1].at[0, 3].set(jnp.nan)
    sharding = NamedSharding(kv_mesh(jax.devices()[:4]), P(None, "kv"))
    options = one_kernel()
    out, lse = tree_decode(*nan, sharding=sharding, return_lse=True, **options)
    assert np.all(np.isnan(out)) and np.all(np.isnan(lse))
    none = np.zeros(1, np.int32)
    out, lse = tree_decode(*nan, sharding=sharding, return_lse=True, kv_lengths=none, **options)
    assert not np.any(out) and np.all(np.isneginf(lse))
    low = [jnp.full_like(x, 1e19) for x in nan]  # scores of −∞ in float32, and all are equal
    out = tree_decode(-low[0], *low[1:], sharding=sharding, **options)
    np.testing.assert_allclose(out, 1e19, rtol=1e-6)
    q, k, v = draw((1, 1, 4, 2, 40, 64, 64), "float32")  # sums of values are ∞ and −∞ in float32
    out = tree_decode(q, k, 3e38 * jnp.sign(v), sharding=sharding, **options)
    assert np.all(np.isfinite(out))


@is_new
@pytest.mark.parametrize("name", ["right", *races.MISTAKES])
def test_every_planted_mistake_is_a_race(name):
    """Right numbers or not, if copies run at once and the first device is late."""
    found = races.run(races.planted(name), *races.SCHEDULES[1])
    if name == "right":
        assert found["error"] < ALLOWED and found["counters"]
        assert not found["race"] and not found["stopped"]
    else:  # a copy into an inbox that is not there yet stops the interpreter
        assert found["race"] or "KeyError" in found["stopped"]


@is_new
def test_a_race_raises():
    """Each kernel of a test that runs several is searched: JAX's own flag is about the last one."""
    names = dict(vars(remote_merge))
    exec(races.planted("overwrites what it sends"), names)
    options = one_kernel(protocol=BUTTERFLY._replace(run=names["butterfly"]), slots=1)
    shape = 1, 1, 2, 1, 24, 64, 64
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        check(4, shape, "float32", **options)
    pltpu.reset_tpu_interpret_mode_state()
    with contextlib.suppress(jax.errors.JaxRuntimeError, ExceptionGroup):
        jax.effects_barrier()
    check(4, shape, "float32", **one_kernel(slots=1))


@is_new
def test_an_interpreter_that_stops_says_why():
    """Code may fail for other reasons than a race."""
    found = races.run(races.CODE.replace("], inbox[slot]", "], inbox[me + 9]"), "on_wait", False)
    assert not found["race"] and "Out-of-bounds" in found["stopped"]


@is_new
def test_code_that_waits_forever_is_told(monkeypatch):
    monkeypatch.setattr(races, "LIMIT", 20)
    with pytest.raises(TimeoutError, match="no answer in 20 seconds: probably a device waits"):
        races.ask(races.CODE.replace("copy.start()", "pass"))


@is_new
def test_kernels_along_different_axes_have_different_barriers():
    """A device that has entered the kernel of one axis must not count for the other's barrier."""
    mesh = kv_mesh(jax.devices()[:4], nodes=2)
    q, k, v = draw((1, 1, 2, 1, 24, 64, 64), "float32")
    numbers = set()
    for axis in mesh.axis_names:
        sharding = NamedSharding(mesh, P(None, axis))
        f = functools.partial(tree_decode, sharding=sharding, **one_kernel(axis))
        numbers.update(re.findall(r"collective_id=(\w+)", str(jax.make_jaxpr(f)(q, k, v))))
        np.testing.assert_allclose(f(q, k, v), dense_attention(q, k, v), atol=2e-6)
    assert numbers == {"0", "1"}


@is_new
def test_float64_is_refused():
    """With JAX's 64 bits, float32 is taken, and float64 is not rounded without a word."""
    shape = 1, 1, 2, 1, 24, 64, 64
    with jax.enable_x64(True):
        check(2, shape, "float32", [20], **one_kernel())
        with pytest.raises(ValueError, match=r"^q: .* take bfloat16 and float32.*, got float64"):
            check(2, shape, "float64", **one_kernel())


@is_new
@pytest.mark.parametrize("options", [one_kernel(), {"implementation": attend_on_tpu}])
def test_what_the_kernels_lack_is_named(options):
    """Masks, biases, dtypes, and heads that are too wide. The error says what takes them."""
    sharding = NamedSharding(kv_mesh(jax.devices()[:2]), P(None, "kv"))
    decode = functools.partial(tree_decode, sharding=sharding)
    q, k, v = draw((1, 1, 2, 1, 24, 64, 64), "float32")
    given = {"mask": np.ones(24, bool), "bias": np.zeros(24, np.float32)}
    for name, x in given.items():
        with pytest.raises(ValueError, match=f"^{name}: .* no {name}; use implementation='block"):
            decode(q, k, v, **{name: x}, **options)
        instead = options | {"implementation": "blockwise"}
        out = decode(q, k, v, **{name: x}, **instead)
        np.testing.assert_allclose(out, dense_attention(q, k, v), atol=2e-6)
    with pytest.raises(ValueError, match=r"^causal: the kernels for TPUs take no causal"):
        attend(q, q, q, causal=True, implementation=attend_on_tpu)
    half = [x.astype(jnp.float16) for x in (k, v)]
    with pytest.raises(ValueError, match=r"^k: .* take bfloat16 and float32, got float16; use"):
        decode(q, *half, **options)
    wide = draw((1, 1, 2, 1, 24, 64, 100_000), "float32")
    with pytest.raises(ValueError, match=r"^k, v: 12 keys of 1 heads with .* and 100000 take"):
        decode(*wide, **options)


@is_new
@pytest.mark.parametrize(
    "options",
    [one_kernel(), {"implementation": attend_on_tpu}, {"method": merge_on_tpus}],
    ids=["one kernel", "implementation", "method"],
)
def test_a_gradient_is_refused(options):
    """Also under `jax.jit`, and in both modes."""
    sharding = NamedSharding(kv_mesh(jax.devices()[:2]), P(None, "kv"))
    q, k, v = draw((1, 1, 2, 1, 24, 64, 64), "float32")

    def loss(q):
        return tree_decode(q, k, v, sharding=sharding, **options).sum()

    for derivative in (jax.grad(loss), jax.jit(jax.grad(loss)), lambda q: jax.jvp(loss, [q], [q])):
        with pytest.raises(NotImplementedError, match=r"^implementation, method: .* no gradient"):
            derivative(q)


@is_new
def test_a_loop_of_steps_with_donated_caches():
    """Under `jax.jit` and `lax.scan`, each step writes a key, and decodes."""
    queries, k, v = draw((1, 3, 4, 2, 40, 64, 64), "float32")
    sharding = NamedSharding(kv_mesh(jax.devices()[:4]), P(None, "kv"))
    options = one_kernel(slots=1)

    def step(caches, new):
        i, query, *rows = new
        at = 0, i, 0, 0
        caches = [lax.dynamic_update_slice(x, y, at) for x, y in zip(caches, rows, strict=True)]
        return caches, tree_decode(
            query, *caches, sharding=sharding, kv_lengths=i[None] + 1, **options
        )

    places = jnp.arange(30, 33)
    rows = [jnp.swapaxes(x, 0, 1)[:, None] for x in (queries, k[:, 30:33], v[:, 30:33])]
    caches = [jax.device_put(x.at[:, 30:].set(jnp.nan), sharding) for x in (k, v)]
    decode = jax.jit(lambda *x: lax.scan(step, list(x[:2]), x[2:]), donate_argnums=(0, 1))
    _, out = decode(*caches, places, *rows)
    assert caches[0].is_deleted()
    for step_out, query, i in zip(out, rows[0], places, strict=True):
        expected = dense_attention(query, k[:, : i + 1], v[:, : i + 1])
        np.testing.assert_allclose(step_out, expected, atol=2e-6)


@is_new
def test_the_devices_must_fit():
    q, k, v = draw((1, 1, 2, 1, 24, 64, 64), "float32")
    mesh = kv_mesh(jax.devices()[:3])
    with pytest.raises(ValueError, match=r"^protocol: BUTTERFLY needs 2, 4, 8, … devices, got 3"):
        tree_decode(q, k, v, sharding=NamedSharding(mesh, P(None, "kv")), **one_kernel())
    two = NamedSharding(kv_mesh(jax.devices()[:4], nodes=2), P(None, ("node", "device")))
    with pytest.raises(ValueError, match=r"^axis: expected an axis of the mesh, got 'kv'"):
        tree_decode(q, k, v, sharding=two, **one_kernel())
    with pytest.raises(ValueError, match=r"^sharding: expected keys along 'node' only"):
        tree_decode(q, k, v, sharding=two, **one_kernel("node"))
    with pytest.raises(ValueError, match=r"^sharding: the kernels for TPUs merge along one axis"):
        tree_decode(q, k, v, sharding=two, method=merge_on_tpus)


def test_an_older_jax_is_told():
    if not missing():
        pytest.skip("this JAX has the interpreter")
    q, k, v = draw((1, 1, 2, 1, 24, 64, 64), "float32")
    sharding = NamedSharding(kv_mesh(jax.devices()[:2]), P(None, "kv"))
    with pytest.raises(ValueError, match=r"need JAX 0\.12 or newer"):
        tree_decode(q, k, v, sharding=sharding, **one_kernel())


def test_stored_answers_are_of_todays_code():
    stored = json.loads(races.PLANS.read_text())["plans"]
    assert set(stored) == {"right", *races.MISTAKES}
    for name, rows in stored.items():
        assert any(row["race"] for row in rows) == (name != "right")
        lines = {line for row in rows for pair in row["lines"] for line in pair}
        code = {line.strip() for line in races.planted(name).splitlines()}
        assert lines <= code | {"the inbox is cleared"}
    assert all(row["error"] < ALLOWED and row["counters"] for row in stored["right"])


def test_an_answer_that_is_not_stored_says_so(monkeypatch):
    monkeypatch.setattr(races, "newest_python", lambda: None)
    commented = races.CODE.replace("copy.start()", "copy.start()  # a comment changes nothing")
    assert races.ask(commented)["error"] < ALLOWED
    with pytest.raises(RuntimeError, match="after `make tpu` it is run"):
        races.ask(races.CODE.replace("r % slots", "0"))


@pytest.mark.slow
@is_new
@pytest.mark.parametrize(
    ("chips", "q", "k", "dtype"),
    [
        ("v5e:2x4", (16, 128), (4, 128), jnp.bfloat16),
        ("v5p:2x2x2", (9, 64), (3, 64), jnp.float32),
        ("v6e:2x4", (8, 256), (8, 256), jnp.bfloat16),
    ],
)
def test_the_kernel_compiles_for_described_tpus(chips, q, k, dtype):
    try:
        mesh = described_tpus.tpus(chips)
    except ImportError as reason:
        pytest.skip(str(reason))
    for options in (one_kernel(slots=1), one_kernel(protocol=ONE_SHOT)):
        program = described_tpus.compiled(mesh, q=q, k=k, n=1024, dtype=dtype, **options)
        found = described_tpus.row("one kernel, butterfly", mesh, program)
        assert found["kernels"] == 1 and found["collectives"] == 0


def test_the_table_of_chips_is_of_todays_programs():
    stored = json.loads((LAB / "results" / "chips.json").read_text())
    assert {"date", "jax", "libtpu"} <= set(stored["about"])
    assert {row["chips"] for row in stored["chips"]} == set(described_tpus.CHIPS)
    assert {row["program"] for row in stored["chips"]} == set(described_tpus.PROGRAMS)
    for row in stored["chips"]:
        assert row["kernels"] == ("kernel" in row["program"])


def test_the_readme_has_the_stored_tables():
    page = (LAB / "README.md").read_text()
    for name, rows in json.loads(races.PLANS.read_text())["plans"].items():
        assert f"{name:28} {plan_line(rows)}\n" in page
    for row in json.loads((LAB / "results" / "chips.json").read_text())["chips"]:
        cells = (f"{x:,}" if isinstance(x, int) else x for x in row.values())
        assert f"| {' | '.join(cells)} |\n" in page


def test_the_notebooks_protocol_is_the_kernels():
    """The reader's cell and the module have the same code, comments aside."""
    cells = json.loads((LAB / "the_merge_inside_the_kernel.ipynb").read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells]
    (code,) = [code for code in codes if code.startswith("def butterfly")]
    assert races._bare(code) == races._bare(races.CODE)
