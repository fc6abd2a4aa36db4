"""The kernel by Mosaic GPU: interpreted, with races looked for, and lowered for CUDA.

The interpreter takes a second or two a program: the shapes are few and small.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
import pytest
import test_riding
from oracles import dense_attention, dense_weights
from test_pallas import check, draw, hidden_by, lowered, on_cuda, shapes

import treeattn
from treeattn import attend, attention, finalize
from treeattn.kernel import choice, mosaic, mosaic_merge, mosaic_program, mosaic_tiles, pallas
from treeattn.kernel.attend import attend_inputs
from treeattn.kernel.choice import resolve
from treeattn.kernel.inputs import NewKeys, check_inputs

lacking = mosaic.missing()
with_mosaic = pytest.mark.skipif(lacking is not None, reason=str(lacking))

ERROR = {"float32": 2e-6, "bfloat16": 3e-5, "float16": 3e-6}  # of values near 1
CALL = "mosaic_gpu"

# (batch, queries, heads, key heads, keys, head_dim, value head_dim), which options, dtype
CASES = {
    "two splits, blocks that overlap": ((1, 1, 2, 1, 330, 64, 64), (), "bfloat16"),
    "every option, padded widths": (
        (2, 3, 4, 2, 300, 40, 72),
        ("mask", "bias", "kv_lengths"),
        "float16",
    ),
    "two chunks of a width, two tiles": ((1, 10, 2, 1, 70, 192, 256), ("mask",), "float32"),
    "fewer keys than a block": ((2, 1, 3, 3, 5, 64, 64), ("bias", "kv_lengths"), "bfloat16"),
}

eager = functools.partial(attend, implementation="mosaic")
run = jax.jit(eager, static_argnames="causal")


@pytest.fixture(autouse=True)
def no_race(capfd):
    """JAX 0.11.2 prints that it found one; later, it is an error."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


@with_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_against_float64_without_a_race(name):
    shape, which, dtype = CASES[name]
    arrays, options = draw(3, shape, which, dtype)
    check(arrays, run(*arrays, **options), error=ERROR[dtype], **options)


@with_mosaic
@pytest.mark.slow
def test_causal_with_lengths_and_a_scale_that_comes_later():
    arrays, _ = draw(0, (2, 40, 4, 2, 40, 64, 64), (), "bfloat16")
    options = {"kv_lengths": np.array([30, 7]), "scale": jnp.float32(-0.2)}
    state = run(*arrays, causal=True, **options)
    error = ERROR["bfloat16"]
    check(arrays, state, error=error, mask=np.tri(40, dtype=bool), **options | {"scale": -0.2})


@with_mosaic
@pytest.mark.slow
def test_what_nobody_sees_may_be_nan_and_a_nan_that_is_seen_is_not_lost():
    """Rows: of 70 keys, NaN past them; of none; of all, of which one value is NaN, or one key."""
    (q, k, v), _ = draw(0, (4, 1, 2, 1, 200, 64, 64), (), "bfloat16")
    lengths = np.array([70, 0, 200, 200], np.int32)
    past = (np.arange(200) >= lengths[:, None])[..., None, None]
    poisoned = [jnp.where(past, jnp.nan, x) for x in (k, v)]
    poisoned[0] = poisoned[0].at[3, 130].set(jnp.nan)
    poisoned[1] = poisoned[1].at[2, 130, :, :32].set(jnp.nan)
    state = run(q, *poisoned, kv_lengths=lengths)
    first = [x[:1] for x in (q, k, v)]
    check(first, jax.tree.map(lambda x: x[:1], state), error=3e-5, kv_lengths=lengths[:1])
    assert np.all(np.isneginf(state.max[1]))
    assert not np.any(state.denominator[1]) and not np.any(state.numerator[1])
    out, lse = finalize(state)
    assert np.all(np.isnan(out[2, ..., :32])) and np.all(np.isfinite(out[2, ..., 32:]))
    np.testing.assert_allclose(lse[2], dense_weights(*_wide(q[2:3], k[2:3]))[1][0], atol=1e-5)
    assert np.all(np.isnan(out[3])) and np.all(np.isnan(lse[3]))


def _wide(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


@with_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_hidden_from_all_may_be_nan(dtype):
    arrays, poisoned, options = hidden_by("mask")
    arrays, poisoned = ([x.astype(dtype) for x in some] for some in (arrays, poisoned))
    check(arrays, run(*poisoned, **options), error=ERROR[dtype], **options)


@with_mosaic
@pytest.mark.slow
def test_the_largest_numbers_make_no_nan():
    top = float(jnp.finfo(jnp.float32).max)
    q, k, v = (np.full((1, n, 1, 64), top, np.float32) for n in (1, 70, 70))
    k[0, ::2] *= -1
    v[0, 1::2, :, 0] *= -1  # of the keys that are seen at all
    out, lse = finalize(run(q, k, v))
    assert np.all(np.isfinite(lse)) and np.all(np.isfinite(out))
    assert np.all(np.sign(out[0, 0, 0]) == [-1] + 63 * [1])  # of sums that saturate


@with_mosaic
@pytest.mark.slow
def test_a_copy_that_does_not_wait_for_those_who_read_is_a_race(monkeypatch, capfd):
    """The interpreter finds it, of more blocks than are on their way at once."""
    monkeypatch.setattr(mosaic_program.Copies, "commit", lambda self: None)
    arrays, _ = draw(0, (1, 1, 1, 1, 256, 256, 64), (), "bfloat16")
    found = ""
    try:
        jax.block_until_ready(jax.jit(eager)(*arrays))
    except Exception as error:
        found = str(error)
    assert "RACE DETECTED" in found + capfd.readouterr().out
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


@with_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2, 16])
def test_the_second_kernel_merges_and_divides(splits):
    """Ten queries of two heads in two tiles of 8; of all splits, some saw no keys, one a NaN."""
    rng = np.random.default_rng(splits)
    b, l, h, h_kv, dv = 1, 5, 4, 2, 64
    each = splits, b, h_kv, 2, 8
    m = rng.normal(size=each).astype(np.float32)
    m[rng.random(each) < 0.3] = -np.inf
    d = np.where(np.isneginf(m), 0, 1 + rng.random(each)).astype(np.float32)
    n = rng.normal(size=(*each[:4], dv, 8)).astype(np.float32)
    n[np.broadcast_to(d[..., None, :] == 0, n.shape)] = 0
    for x in (m, d):
        x[-1, 0, 1, 0, 3] = np.nan  # query 1, head 3

    weight = np.exp(m.astype(np.float64))
    expected = [np.sum(d * weight, axis=0), np.sum(n * weight[..., None, :], axis=0)]

    def by_heads(x):  # (b, h_kv, tiles, …, rows) to (b, l, h, …)
        x = np.moveaxis(x, -1, 3).reshape(b, h_kv, 16, *x.shape[3:-1])[:, :, : l * h // h_kv]
        x = x.reshape(b, h_kv, l, h // h_kv, *x.shape[3:])
        return x.swapaxes(1, 2).reshape(b, l, h, *x.shape[4:])

    total, values = map(by_heads, expected)
    out = values / np.where(total == 0, 1, total)[..., None]
    merge = functools.partial(mosaic_merge.merge_splits, (m, d, n), (b, l, h, dv), interpret=True)
    state = treeattn.AttentionState(*jax.jit(merge)())
    found, lse = finalize(state)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.log(total), atol=2e-6)
    np.testing.assert_allclose(found, out, atol=2e-6)
    (found,) = jax.jit(functools.partial(merge, output_dtype=jnp.bfloat16))()
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), out, atol=2e-6, rtol=2**-8)


@with_mosaic
@pytest.mark.slow
def test_the_gradient_is_the_blockwise_one():
    (q, k, v), options = draw(4, (1, 1, 2, 1, 70, 64, 64), ("mask",), "float32")

    def loss(v, implementation):
        return jnp.sum(attention(q, k, v, implementation=implementation, **options) ** 2)

    found = jax.jit(jax.grad(loss), static_argnums=1)
    np.testing.assert_allclose(found(v, "mosaic"), found(v, "blockwise"), atol=1e-5)


@with_mosaic
@pytest.mark.slow
def test_mapped_over_queries_and_in_a_loop():
    """A kernel takes all of a mapped axis at once; keys that are not mapped are shared."""
    (q, k, v), _ = draw(0, (3, 1, 2, 1, 70, 64, 64), (), "bfloat16")
    lengths = np.array([70, 3, 64])

    def one(q, length):
        own = functools.partial(attention, k=k[:1], v=v[:1], kv_lengths=length[None])
        step = functools.partial(own, implementation="mosaic")
        return jax.lax.scan(lambda x, _: (step(x), None), q[None], length=2)[0][0]

    expected = []
    for i, n in enumerate(lengths):
        x = q[i : i + 1]
        for _ in range(2):
            x = jnp.asarray(dense_attention(*_wide(x, k[:1, :n], v[:1, :n])), "bfloat16")
        expected.append(x[0])
    found = jax.jit(jax.vmap(one))(q, lengths)
    np.testing.assert_allclose(*_wide(found, jnp.stack(expected)), atol=1e-2)


@with_mosaic
def test_mapped_it_is_two_kernels_still():
    arrays = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in shapes()]
    mapped = jax.vmap(jax.vmap(functools.partial(attention, implementation="mosaic")))
    arrays = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in arrays]
    text = lowered(mapped, *arrays, context=on_cuda()[1])
    assert text.count(f"custom_call @{CALL}") == 2 and "stablehlo.while" not in text


# (batch, queries, heads, key heads, cached keys, new keys, head_dim), dtype: as in test_riding.py
RIDING = {
    "trees over caches of two splits": ((2, 5, 6, 2, 300, 5, 64), "float16"),
    "one new key, a block not begun": ((2, 1, 4, 2, 300, 1, 64), "bfloat16"),
    "the last of some, in three parts": ((1, 1, 2, 2, 20, 7, 64), "float32"),
    "a block of them": ((1, 64, 1, 1, 70, 64, 64), "bfloat16"),
}


@with_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("name", RIDING)
def test_new_keys_ride(name):
    shape, dtype = RIDING[name]
    inputs, new, arrays, mask = test_riding.draw(1, shape, dtype)
    out = test_riding.run(inputs.replace(implementation="mosaic"), new)
    assert out.dtype == dtype
    rounding = float(jnp.finfo(dtype).eps) if dtype != "float32" else 0
    expected = dense_attention(*_wide(*arrays), mask=mask)
    error = 5 * ERROR[dtype]
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=error, rtol=rounding)


@with_mosaic
@pytest.mark.parametrize(("keys", "new_keys", "padded"), [(304, 8, False), (300, 1, True)])
def test_new_keys_ride_in_two_kernels(keys, new_keys, padded):
    """Keys of a number that is no multiple of 8 are copied before, by XLA."""
    shape = 2, new_keys, 4, 2, keys, new_keys, 64
    inputs, new, *_ = test_riding.draw(0, shape, "bfloat16")
    inputs = inputs.replace(implementation="mosaic")
    text = lowered(test_riding.attention_with_new, inputs, new, context=on_cuda()[1])
    assert len(re.findall(rf"custom_call @{CALL}", text)) == 2
    assert bool(re.search(r"stablehlo.pad.*2x\d+x2x64xbf16", text)) == padded


# Without running it.


@with_mosaic
def test_three_parts_are_a_float32():
    """And of a weight, two parts of each dtype leave out less than the output shows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=1000).astype(np.float32)
    x[:2] = float(jnp.finfo(jnp.float32).max), -1e-30
    parts = mosaic_tiles.parts_of(jnp.asarray(x), jnp.bfloat16, 3)
    np.testing.assert_array_equal(sum(np.asarray(part, np.float64) for part in parts), x)
    p = np.abs(x[2:]) / np.max(np.abs(x[2:]))
    for dtype, error in (("bfloat16", 2**-15), ("float16", 2**-18)):
        parts = mosaic_tiles.parts_of(jnp.asarray(p), jnp.dtype(dtype), 2)
        left = p - sum(np.asarray(part, np.float64) for part in parts)
        assert np.max(np.abs(left) / np.maximum(p, 2**-6)) <= error


@with_mosaic
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_is_two_kernels_that_read_the_cache_where_it_lies(dtype):
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = lowered(run, *shapes(dtype), context=on_cuda()[1], kv_lengths=lengths)
    assert len(re.findall(rf"custom_call @{CALL}", text)) == 2
    short = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    lines = [line for line in text.splitlines() if f"tensor<2x4096x4x128x{short}>" in line]
    for copy in ("transpose", "convert", "pad", "concatenate", "gather", "dynamic_slice"):
        assert not any(f"stablehlo.{copy}" in line for line in lines), copy


@pytest.fixture
def h100(monkeypatch):
    """A host that has one: what traced calls run on is left to their compiler."""
    device = SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(choice, "host_device", lambda: device)


def loop(q, k, v):
    return jax.lax.scan(lambda x, _: (attention(x, k, v), None), q, length=2)[0]


def slope(q, k, v):
    return jax.value_and_grad(lambda v: jnp.sum(attention(q, k, v)))(v)


def mapped(q, k, v):
    return jax.vmap(attention)(q[None], k[None], v[None])


def on_a_mesh(q, k, v):
    mesh, _ = on_cuda(2)
    return treeattn.tree_decode(q, k, v, mesh=mesh, axis="kv")


@with_mosaic
@pytest.mark.parametrize("f", [loop, slope, mapped, on_a_mesh])
def test_what_jax_makes_of_a_call_takes_it_by_default(f, h100):
    """For CUDA; and for a CPU of the same host neither it nor its interpreter."""
    devices = 2 if f is on_a_mesh else 1
    text = lowered(f, *shapes("float32"), context=on_cuda(devices)[1])
    assert text.count(f"custom_call @{CALL}") == 2
    if devices == 1:
        text = jax.jit(f).lower(*shapes("float32")).as_text()
        assert "mosaic" not in text and "callback" not in text


@with_mosaic
def test_in_a_mesh_of_present_gpus_it_is_compiled():
    """JAX calls their platform "gpu"."""
    about = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("kv",), axis_types=axis_types, abstract_device=about)
    text = lowered(run, *shapes(), context=jax.sharding.use_abstract_mesh(mesh))
    assert text.count(f"custom_call @{CALL}") == 2


@with_mosaic
def test_interpreted_on_several_devices_it_is_refused():
    """It would find the barriers of another device, and raise an error of its own."""
    (q, k, v), _ = draw(0, (1, 1, 2, 1, 130, 64, 64), (), "float32")

    def run(mesh):
        given = {"mesh": mesh, "axis": "kv", "implementation": "mosaic"}
        return jax.eval_shape(lambda *x: treeattn.tree_decode(*x, **given), q, k, v)

    devices = np.array(jax.devices())
    assert run(jax.sharding.Mesh(devices[:1], "kv")).shape == q.shape
    message = "'mosaic' is interpreted here, which takes one device, and this is a mesh of 2"
    with pytest.raises(ValueError, match=message):
        run(jax.sharding.Mesh(devices[:2], "kv"))


@with_mosaic
def test_where_only_the_compiler_knows_it_is_never_interpreted():
    """Its interpreter's steps come in an order, and would stay in a program for a CPU."""
    q, k, v = (jnp.asarray(x) for x in draw(0, (1, 2, 4, 2, 70, 64, 64), (), "float32")[0])
    inputs = check_inputs(q, k, v).replace(implementation="mosaic", elsewhere="blockwise")
    state = jax.jit(attend_inputs)
    np.testing.assert_allclose(finalize(state(inputs))[0], dense_attention(q, k, v), atol=1e-5)
    assert "callback" not in state.lower(inputs).as_text()
    assert lowered(attend_inputs, inputs, context=on_cuda()[1]).count(f"custom_call @{CALL}") == 2
    new = NewKeys(k[:, :1], v[:, :1])
    out = jax.jit(test_riding.attention_with_new)
    both = (jnp.concatenate([x, x[:, :1]], axis=1) for x in (k, v))
    np.testing.assert_allclose(out(inputs, new), dense_attention(q, *both), atol=1e-5)
    assert "callback" not in out.lower(inputs, new).as_text()


@pytest.mark.skipif(lacking is None, reason="this JAX has what it needs")
def test_an_older_jax_refuses_it_by_name_and_never_chooses_it(monkeypatch):
    inputs = check_inputs(*empty())
    for platform in ("cuda", "cpu"):
        with pytest.raises(ValueError, match=r"implementation: 'mosaic' needs JAX 0\.11\.2"):
            resolve("mosaic", inputs, platform)
    monkeypatch.setattr(pallas, "triton", None)
    assert resolve(None, inputs, "cuda").implementation == "blockwise"


def empty(**changes):
    return [np.zeros(x.shape, x.dtype) for x in shapes(**changes)]


@with_mosaic
@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        ("mosaic", {}),
        ("mosaic", {"dtype": "float32", "d": 256, "dv": 256}),
        ("mosaic", {"l": 8}),  # 32 queries of a key head
        ("pallas", {"l": 9}),
        ("pallas", {"l": 8, "dtype": "float32"}),
        ("pallas", {"d": 96}),  # what it would copy
        ("pallas", {"dv": 96}),
        ("pallas", {"n": 4100}),
        ("pallas", {"n": 56}),
        ("pallas", {"n": 0}),
        ("mosaic", {"d": 576, "dv": 512, "h_kv": 1}),
        ("mosaic", {"d": 257}),
        ("blockwise", {"d": 577}),
        ("blockwise", {"d": 576, "dv": 512, "dtype": "float32"}),  # too large a block
        ("blockwise", {"dtype": "float64"}),
    ],
)
def test_where_it_is_the_default(monkeypatch, expected, changes):
    inputs = check_inputs(*empty(**changes))
    assert resolve(None, inputs, "cuda").implementation == expected
    for platform in ("cpu", "gpu", "tpu"):
        assert resolve(None, inputs, platform).implementation == "blockwise"
    monkeypatch.setattr(pallas, "triton", None)  # JAX without it
    without = "mosaic" if expected == "pallas" else expected
    assert resolve(None, inputs, "cuda").implementation == without
    monkeypatch.setattr(mosaic, "plgpu", None)  # and without Mosaic
    assert resolve(None, inputs, "cuda").implementation == "blockwise"


@with_mosaic
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_a_mask_or_a_bias_takes_the_other_kernel_by_default(name):
    x = np.zeros((1, 1, 1, 1), {"mask": bool, "bias": np.float32}[name])
    assert resolve(None, check_inputs(*empty(), **{name: x}), "cuda").implementation == "pallas"


@with_mosaic
@pytest.mark.parametrize(("capability", "expected"), [("9.0", "mosaic"), ("8.0", "pallas")])
def test_no_default_is_compiled_for_another_gpu(monkeypatch, capability, expected):
    """Where JAX's default device is the host's CPU, Mosaic compiles for 9.0 whatever the GPU is."""
    host = SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(choice, "host_device", lambda: host)
    inputs = check_inputs(*empty())
    assert resolve(None, inputs, "cuda").implementation == expected
    monkeypatch.setattr(jax.extend.backend, "get_default_device", lambda: host)
    assert resolve(None, inputs, "cuda").implementation == "mosaic"


@with_mosaic
def test_what_fits_depends_on_the_gpu(monkeypatch):
    inputs = check_inputs(*empty(d=576, dv=512, h_kv=1))
    for capability, fits in (((8, 0), True), ((8, 9), False), ((9, 0), True), ((12, 0), False)):
        monkeypatch.setattr(mosaic, "capability", lambda: capability)  # noqa: B023
        assert (mosaic.obstacle(inputs) is None) == fits, capability
    with pytest.raises(ValueError, match="shared memory, of 101,376"):
        resolve("mosaic", inputs, "cuda")


@with_mosaic
@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("q: the mosaic kernel takes float16.*float64", {"dtype": "float64"}),
        ("q: the mosaic kernel takes a head_dim up to 576, got 600", {"d": 600}),
        ("v: the mosaic kernel takes a head_dim up to 576, got 600", {"dv": 600}),
        ("shared memory", {"d": 576, "dv": 512, "dtype": "float32"}),
    ],
)
def test_what_does_not_fit_is_refused(message, changes):
    with pytest.raises(ValueError, match=message):
        resolve("mosaic", check_inputs(*empty(**changes)), "cuda")


@with_mosaic
def test_old_gpus_refuse_it_and_no_keys_or_one_take_no_kernel():
    with pytest.raises(ValueError, match="'mosaic' needs CUDA devices of compute capability 8"):
        resolve("mosaic", check_inputs(*empty()), "gpu")
    for n in (0, 1):
        (q, k, v), _ = draw(0, (1, 2, 4, 2, n, 16, 16), (), "float32")
        inputs = resolve("mosaic", check_inputs(q, k, v), "cpu")
        text = jax.jit(attend_inputs).lower(inputs).as_text()
        assert CALL not in text and "callback" not in text
        state = treeattn.attend(q, k, v, implementation="mosaic")
        np.testing.assert_allclose(finalize(state)[0], dense_attention(q, k, v), atol=1e-6)


@with_mosaic
@pytest.mark.slow
def test_compiled_where_the_compiler_is():
    """The script says what it lacks, or what NVIDIA's assembler says of each GPU."""
    root = Path(__file__).parent.parent
    pytest.importorskip("jax_plugins.xla_cuda13", reason="JAX's plugin for CUDA is not installed")
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "mosaic_programs.py"), "--smoke"],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    # Two kernels, of neither of which anything is spilled, for five GPUs.
    assert len(re.findall(r"\| 2 \| \d+ \| 0, 0 \| [\d,]+ \| \d+ \| 0, 0 \|", done.stdout)) == 5
