"""Nine simulated devices, float64 at hand, and the packages' jaxtyping shapes checked."""

import ctypes
import gc
import importlib.util
import os
from collections import Counter

import hypothesis
import jax
import jaxtyping
import pytest

# Before anything imports them.
jaxtyping.install_import_hook(["treeattn", "treeattn_llama"], "beartype.beartype")

from treeattn import simulate_devices  # noqa: E402

simulate_devices(9)
jax.config.update("jax_enable_x64", True)
# Most of a test's time is compiling. The Makefile says more, and 0 for `make test-latest`.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", True)

hypothesis.settings.register_profile(
    "treeattn",
    deadline=None,  # the first case of a shape compiles
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(  # the first example that fails, not the smallest one
    "once",
    hypothesis.settings.get_profile("treeattn"),
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
hypothesis.settings.load_profile("treeattn")


# Of the other files those with the most tests take longest. The last three have few, long tests.
LONGEST = (
    "09_speculative_decoding_with_a_prefix_tree.ipynb",
    "08_a_real_llama_with_a_sharded_cache.ipynb",
    "05_tree_decoding_on_many_devices.ipynb",
    "test_composition.py",
    "test_decode.py",
    "test_llama_cache.py",
    "test_attend.py",
    "test_speculate.py",
    "test_ours_conform.py",
    "test_checkpoint.py",
    "test_lab.py",
    "test_faults.py",
    "test_real_code.py",
)


def pytest_generate_tests(metafunc):
    """Tests have the same names in each process: a set has another order in each of them."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        values = mark.args[1] if len(mark.args) > 1 else mark.kwargs["argvalues"]
        named = values if "ids" in mark.kwargs and isinstance(values, list | tuple) else ()
        if any(isinstance(x, set | frozenset) for x in (values, *named)):
            raise pytest.UsageError(f"{metafunc.definition.nodeid}: a set as parameter: {values}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n` alone, too, a file stays with one process: a notebook's cells share a kernel."""
    if config.getoption("dist") == "load":
        from xdist.scheduler import LoadFileScheduling

        return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(config, items):
    """What takes longest comes first where several processes share the files: the last one to be
    finished then is a short one. So notebooks begin, whose kernels need gigabytes, while there is
    little in the processes that wait for them; then files that are slow throughout."""
    if not hasattr(config, "workerinput"):  # there is only one process
        return
    tests = Counter(item.path for item in items)
    place = {name: i for i, name in enumerate(LONGEST)}

    def turn(item):
        module = item.getparent(pytest.Module)
        slow = module is not None and module.get_closest_marker("slow") is not None
        rank = place.get(item.path.name, len(place))
        return item.path.suffix != ".ipynb", not slow, rank, -tests[item.path]

    items.sort(key=turn)


# Traced and compiled programs are millions of objects, which stay until their file is done. Looking
# through them for garbage again and again took a sixth of the tests' time.
gc.set_threshold(100_000, 50, 100)


# glibc keeps what is free for later, gigabytes in all; this hands it back to the system.
_libc = ctypes.CDLL(None) if os.name == "posix" else None
_give_back = getattr(_libc, "malloc_trim", lambda _: None)


@pytest.fixture(scope="module", autouse=True)
def _garbage_once_a_file():
    yield
    jax.clear_caches()  # no other file runs these programs: kept, they were gigabytes at the end
    gc.collect()
    gc.freeze()  # what is left is not looked at again: nor at the end, where xdist would not wait
    _give_back(0)


# Files whose own arrays are never broadcast to a higher rank: nor may the package's be.
SAME_RANKS = {
    "test_attend.py",
    "test_composition.py",
    "test_numbers.py",
    "test_token_tree.py",
}


@pytest.fixture(scope="module", autouse=True)
def _same_ranks(request):
    with jax.numpy_rank_promotion("raise" if request.path.name in SAME_RANKS else "allow"):
        yield


@pytest.fixture
def unchecked():
    """The packages' own errors, as users see them: without the shape checks of the tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def optimized():
    """All that XLA does to a program, also where `make test` goes without most of it."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def flash(monkeypatch):
    """`treeattn.flash`, on a host without a GPU; the test is skipped without flash-attn-jax."""
    import treeattn.flash as flash

    if importlib.util.find_spec("flash_attn_jax") is None:
        pytest.skip("flash-attn-jax is not installed")
    for module in flash.load():
        monkeypatch.setattr(module, "get_sm_count", lambda *_: 132)  # it would ask a driver
    return flash
