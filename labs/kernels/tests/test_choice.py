"""Which implementation runs: by the arguments, the device, and what is installed."""

import importlib.util
import sys
from types import SimpleNamespace

import jax
import jax.experimental.pallas
import numpy as np
import pytest
from oracles import dense_attention
from test_pallas import CALL, draw, lowered, on_cuda, shapes

import treeattn
from treeattn.kernel import choice, flash, mosaic, pallas, tiles
from treeattn.kernel.attend import attend_inputs
from treeattn.kernel.causal import CAUSAL_BLOCK
from treeattn.kernel.choice import device_platform, platform_of, resolve
from treeattn.kernel.inputs import check_inputs

DECODING = "mosaic" if mosaic.missing() is None else "pallas"  # a token or a few, no mask


def device(platform, capability=None, version=None):
    """What JAX tells of a device."""
    found = SimpleNamespace(platform=platform)
    if capability is not None:
        found.compute_capability = capability
    if version is not None:
        found.client = SimpleNamespace(platform_version=version)
    return found


CUDA = "PJRT C API\ncuda 12090"
H200 = device("gpu", "9.0", CUDA)
T4 = device("gpu", "7.5", CUDA)
MI300 = device("gpu", "gfx942", "PJRT C API\nrocm 60300")
CPU = device("cpu", version="cpu")
DEVICES = {
    "H200": (H200, "cuda"),
    "A100": (device("gpu", "8.0", CUDA), "cuda"),
    "L4": (device("gpu", "8.9", CUDA), "cuda"),
    "B200": (device("gpu", "10.0", CUDA), "cuda"),
    "described, of no client": (device("gpu", "9.0"), "cuda"),
    "T4": (T4, "gpu"),
    "P100": (device("gpu", "6.0", CUDA), "gpu"),
    "MI300": (MI300, "gpu"),
    "MI300, of no client": (device("gpu", "gfx942"), "gpu"),
    "Intel's": (device("gpu", "12.5", "oneapi"), "gpu"),
    "a GPU that says nothing": (device("gpu"), "gpu"),
    "a CPU": (CPU, "cpu"),
    "a TPU": (device("tpu", version="TPU v5"), "tpu"),
}


@pytest.mark.parametrize("name", DEVICES)
def test_the_platform_of_a_device_and_its_default(name):
    described, platform = DEVICES[name]
    assert device_platform(described) == platform
    expected = DECODING if platform == "cuda" else "blockwise"
    inputs = resolve(None, check_inputs(*empty()), device_platform(described))
    assert (inputs.implementation, inputs.elsewhere) == (expected, None)
    assert inputs.by_row == (platform not in ("cuda", "gpu"))


@pytest.mark.parametrize(
    ("host", "traced", "other"),
    [(H200, None, "cuda"), (T4, "gpu", "gpu"), (MI300, "gpu", "gpu"), (CPU, "cpu", "cpu")],
    ids=["H200", "T4", "MI300", "CPU"],
)
def test_the_platform_of_an_array(monkeypatch, host, traced, other):
    monkeypatch.setattr(choice, "host_device", lambda: host)
    found, x = [], np.ones(2)
    jax.make_jaxpr(lambda x: found.append(platform_of(x)))(x)
    assert found == [traced]
    assert platform_of(x) == other
    assert platform_of(jax.numpy.asarray(x)) == "cpu"  # it lies there, whatever else there is
    for cpu in ("cpu", jax.devices("cpu")[0]):
        with jax.default_device(cpu):
            assert platform_of(x) == "cpu"


@pytest.mark.parametrize("host", [H200, T4, MI300], ids=["H200", "T4", "MI300"])
def test_a_program_for_the_cpu_of_a_host_with_a_gpu(monkeypatch, host):
    """It is neither the kernel, which would not run there, nor the kernel interpreted."""
    monkeypatch.setattr(choice, "host_device", lambda: host)
    (q, k, v), _ = draw(0, (1, 1, 4, 2, 60, 16, 16), (), "float32")
    with jax.default_device(jax.devices("cpu")[0]):
        f = jax.jit(lambda q, k, v: treeattn.attention(q, k, v))
        np.testing.assert_allclose(f(q, k, v), dense_attention(q, k, v), atol=1e-5)
        assert "stablehlo.while" not in f.lower(q, k, v).as_text()  # one block, no kernel


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("host", [H200, T4, MI300], ids=["H200", "T4", "MI300"])
def test_a_program_lowered_for_gpus(monkeypatch, host, platform):
    """The kernel where it can run; and never the interpreter, whose programs are loops."""
    monkeypatch.setattr(choice, "host_device", lambda: host)
    (q, k, v), _ = draw(0, (1, 1, 4, 2, 60, 16, 16), (), "float32")
    with on_cuda()[1]:
        traced = jax.jit(lambda q, k, v: treeattn.attention(q, k, v)).trace(q, k, v)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert (CALL in text) == (host is H200 and platform == "cuda")
    assert "stablehlo.while" not in text


def empty(**changes):
    return [np.zeros(x.shape, x.dtype) for x in shapes(**changes)]


@pytest.mark.parametrize(
    ("expected", "changes", "options"),
    [
        (DECODING, {}, {}),
        (DECODING, {"dtype": "float16"}, {"kv_lengths": np.ones(2, int)}),
        (DECODING, {"dtype": "float32"}, {}),
        ("pallas", {"l": 7}, {"mask": np.ones((1, 1, 7, 4096), bool)}),
        ("flash", {"l": CAUSAL_BLOCK + 1}, {}),
        ("flash", {"l": 4096}, {"causal": True}),
        ("pallas", {"l": 4096}, {"mask": np.ones((1, 1, 1, 1), bool)}),
        ("pallas", {"l": 4096, "dtype": "float32"}, {"causal": True}),
        ("pallas", {"l": 4096, "dv": 64}, {}),
        ("blockwise", {"dtype": "float64"}, {}),
        ("blockwise", {"d": 577, "l": 200}, {}),
        ("blockwise", {"dv": 577}, {}),
    ],
)
def test_the_best_that_can_run(monkeypatch, expected, changes, options):
    found = [True]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found[0] or None)
    inputs = check_inputs(*empty(**changes), **options)
    assert resolve(None, inputs, "cuda").implementation == expected
    for platform in ("cpu", "gpu", "tpu"):
        assert resolve(None, inputs, platform).implementation == "blockwise"
    unknown = resolve(None, inputs, None)
    assert unknown.implementation == expected
    assert unknown.elsewhere == (None if expected == "blockwise" else "blockwise")
    found[0] = False  # flash-attn-jax, which is not installed then
    without = "pallas" if expected == "flash" else expected
    assert resolve(None, inputs, "cuda").implementation == without
    monkeypatch.setattr(mosaic, "plgpu", None)
    if without == "mosaic":
        assert resolve(None, inputs, "cuda").implementation == "pallas"
    monkeypatch.setattr(pallas, "triton", None)
    assert resolve(None, inputs, "cuda").implementation == "blockwise"


def test_which_implementation_would_run(monkeypatch):
    """Asked of any machine; the answer "flash" means that it can be imported."""
    loaded = []
    monkeypatch.setattr(flash, "load", lambda: loaded.append("flash"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    which = treeattn.which_implementation
    arrays = empty(l=4096)
    assert which(*arrays) == "blockwise" and not loaded
    assert which(*arrays, platform="cuda", implementation="pallas") == "pallas" and not loaded
    assert which(*arrays, platform="cuda", causal=True) == "flash" and loaded == ["flash"]
    with pytest.raises(ValueError, match="'flash' needs CUDA devices"):
        which(*arrays, implementation="flash")
    with pytest.raises(ValueError, match="bias: the flash kernel takes none"):
        bias = np.zeros((1, 1, 1, 1), np.float32)
        which(*arrays, implementation="flash", platform="cuda", bias=bias)

    def absent():
        raise ImportError("flash-attn-jax cannot be imported")

    monkeypatch.setattr(flash, "load", absent)
    with pytest.raises(ImportError, match="cannot be imported"):
        which(*arrays, platform="cuda", causal=True)


def test_what_the_compiler_chooses_by_its_platform():
    def f(q, k, v):
        inputs = resolve(None, check_inputs(q, k, v), None)
        return treeattn.finalize(attend_inputs(inputs))[0]

    (q, k, v), _ = draw(0, (1, 1, 4, 2, 60, 16, 16), (), "float32")
    np.testing.assert_allclose(jax.jit(f)(q, k, v), dense_attention(q, k, v), atol=1e-5)
    assert "stablehlo.while" not in jax.jit(f).lower(q, k, v).as_text()  # one block, no kernel
    assert CALL in lowered(f, q, k, v, context=on_cuda()[1])


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("q: the pallas kernel takes float16.*float64", {"dtype": "float64"}),
        ("q: the pallas kernel takes a head_dim up to 256, got 300", {"d": 300}),
        ("v: the pallas kernel takes a head_dim up to 256, got 300", {"dv": 300}),
    ],
)
def test_what_does_not_fit_is_refused(message, changes):
    inputs = check_inputs(*empty(**changes))
    with pytest.raises(ValueError, match=message):
        resolve("pallas", inputs, "cuda")


@pytest.mark.parametrize(
    ("name", "platform", "came"),
    [
        ("pallas", "gpu", "other GPUs"),
        ("flash", "gpu", "other GPUs"),
        ("flash", "cpu", "cpu devices"),
        ("flash", "tpu", "tpu devices"),
    ],
)
def test_where_a_kernel_cannot_run_it_is_refused(name, platform, came):
    message = f"implementation: '{name}' needs CUDA devices of compute capability 8.0.*got {came}"
    with pytest.raises(ValueError, match=message):
        resolve(name, check_inputs(*empty()), platform)


def test_a_jax_without_triton(monkeypatch):
    """Its backend for Pallas is deprecated: where it is gone, the module still can be imported."""
    monkeypatch.delattr(jax.experimental.pallas, "triton")
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    spec = importlib.util.spec_from_file_location("tiles_without_triton", tiles.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(pallas, "triton", module.triton)
    assert "needs jax.experimental.pallas.triton" in pallas.obstacle(check_inputs(*empty()))
    with pytest.raises(ValueError, match=r"implementation: 'pallas' needs jax\.experimental"):
        resolve("pallas", check_inputs(*empty()), "cuda")
    left = "mosaic" if mosaic.missing() is None else "blockwise"
    assert resolve(None, check_inputs(*empty()), "cuda").implementation == left
