"""Nine simulated devices, float64 at hand, and the package's jaxtyping shapes checked."""

import gc
import importlib.util

import hypothesis
import jax
import jaxtyping
import pytest

# Before anything imports treeattn: its annotations are checked at every call.
_hook = jaxtyping.install_import_hook("treeattn", "beartype.beartype")

from treeattn import simulate_devices  # noqa: E402

simulate_devices(9)
jax.config.update("jax_enable_x64", True)

hypothesis.settings.register_profile(
    "treeattn",
    deadline=None,  # the first case of a shape compiles
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("treeattn")


# Files, and tests of any file, that take seconds each: `make test-fast` goes without them.
SLOW = {
    "test_cluster.py",
    "test_examples.py",
    "test_gpu_benchmark.py",
    "test_llama.py",
    "test_llama_text.py",
    "test_readme.py",
    "test_steppers.py",
    "test_wheel.py",
    "test_a_long_prompt_in_pieces",
    "test_a_tiny_training_beats_chance",
    "test_any_order_of_any_split_is_dense_attention",
    "test_decoding_from_shards_passes",
    "test_eight_devices_and_a_cache_agree_with_transformers",
    "test_every_attention_agrees_with_the_full_pass",
    "test_every_small_beam",
    "test_other_meshes",
    "test_packed_llama_logits_in_float64",
    "test_our_kernel_passes",
    "test_prefill_of_several_lengths",
    "test_prefill_values_and_gradients",
    "test_reference_counts",
    "test_the_compiled_program_runs_what_the_model_counts",
    "test_the_packaged_drafter_saves_steps",
    "test_values_and_gradients",
    "test_what_is_found_of_jax_nn_dot_product_attention",
}


def pytest_collection_modifyitems(items):
    for item in items:
        if {item.path.name, getattr(item, "originalname", None)} & SLOW:
            item.add_marker("slow")


# Traced and compiled programs are millions of objects, which stay. Looking through them for garbage
# again and again took a sixth of the tests' time.
gc.set_threshold(100_000, 50, 100)


@pytest.fixture(scope="module", autouse=True)
def _garbage_once_a_file():
    yield
    gc.collect()
    gc.freeze()  # what is left is not looked at again: nor at the end, where xdist would not wait


@pytest.fixture
def unchecked():
    """The package's own errors, as users see them: without the shape checks of the tests."""
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
    """`treeattn.kernel.flash`, on a host without a GPU; the test is skipped without the package."""
    from treeattn.kernel import flash

    if importlib.util.find_spec("flash_attn_jax") is None:
        pytest.skip("flash-attn-jax is not installed")
    for module in flash.load():
        monkeypatch.setattr(module, "get_sm_count", lambda *_: 132)  # it would ask a driver
    return flash
