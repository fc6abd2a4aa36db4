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
    "test_cluster_merge.py",
    "test_conformance.py",
    "test_drawn_figures.py",
    "test_examples.py",
    "test_gpu_benchmark.py",
    "test_llama.py",
    "test_llama_cache.py",
    "test_llama_steps.py",
    "test_llama_text.py",
    "test_pallas.py",
    "test_readme.py",
    "test_recurrent.py",
    "test_sharded_weights.py",
    "test_speculation.py",
    "test_steppers.py",
    "test_wheel.py",
    "test_a_batch_that_is_sharded_too_stays_where_it_is",
    "test_a_traced_scale_is_compiled_once_and_has_a_gradient",
    "test_advice_that_no_choice_of_constants_changes",
    "test_any_order_of_any_split_is_dense_attention",
    "test_beam_search_by_a_model",
    "test_blocks_give_the_same_bits_from_every_number_of_devices",
    "test_butterfly_needs_two_more_rounds_for_other_numbers",
    "test_byte_pairs_of_gguf",
    "test_causal_halves_values_and_gradients",
    "test_derivatives_by_every_field_against_finite_differences",
    "test_drawn_candidates_are_drawn_from_what_they_say",
    "test_dtypes",
    "test_eight_devices_and_a_cache_agree_with_transformers",
    "test_every_device_has_the_same_bits",
    "test_every_method_sends_what_its_formula_says",
    "test_every_small_beam",
    "test_gguf_quantizations_decode",
    "test_inside_shard_map_whichever_fields_differ_between_devices",
    "test_memory_does_not_grow_with_the_keys",
    "test_memory_of_the_gradient",
    "test_narrow_lengths_are_widened",
    "test_no_keys_no_nan",
    "test_nothing_beyond_the_lengths_matters",
    "test_numerators_on_the_wire_in_16_bits",
    "test_one_query_of_every_width",
    "test_output_and_gradients_in_the_inputs_dtype",
    "test_packed_llama_logits_in_float64",
    "test_parts_merge_to_the_whole",
    "test_prefill_values_and_gradients",
    "test_reference_counts",
    "test_rounding_by_order_and_dtype",
    "test_scattered_heads",
    "test_the_compiled_program_runs_what_the_model_counts",
    "test_the_suffix_draft_is_calibrated",
    "test_they_send_what_the_table_says",
    "test_values_and_gradients",
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
