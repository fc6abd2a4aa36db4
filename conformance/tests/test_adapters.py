"""adapters.py: known failures of other libraries are found, and adapters add none.

A stand-in replaces each library that is not installed, with the signature, axes and base of its
source, so these tests test the adapter. torch is no dependency of this project, and its tests are
skipped without it.
"""

import functools
import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from treeattn_conformance import attend, check_attention, merge

EXAMPLE = Path(__file__).parent.parent / "adapters.py"


@pytest.fixture
def adapters(monkeypatch):
    spec = importlib.util.spec_from_file_location("adapters", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    return module


@pytest.fixture
def stand_in(monkeypatch):
    """stand_in(module, name, function) makes `from module import name` give the function."""

    def put(module, name, function):
        parts = module.split(".")
        for i in range(1, len(parts) + 1):
            found = types.ModuleType(".".join(parts[:i]))
            monkeypatch.setitem(sys.modules, found.__name__, found)
        setattr(found, name, function)

    return put


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_pytorchs_kernels(adapters):
    pytest.importorskip("torch")
    report = check_attention(adapters.torch_sdpa)
    rows = ["a row without keys", "stale NaN", "hidden blocks"]
    assert report.names("failed") == rows, str(report)
    assert report.fingerprints == {"no keys as lse 0", "stale NaN"}
    report = check_attention(adapters.flex)
    assert report.names("failed") == ["stale NaN"], str(report)


def test_flash_attns_adapter(adapters, stand_in):
    torch = pytest.importorskip("torch")

    def with_kvcache(q, k_cache, v_cache, cache_seqlens, softmax_scale, return_softmax_lse):
        assert q.dtype == torch.bfloat16 and return_softmax_lse
        lengths = None if cache_seqlens is None else cache_seqlens.numpy()
        q, k, v = (x.float().numpy() for x in (q, k_cache, v_cache))
        out, lse = attend(q, k, v, kv_lengths=lengths, scale=softmax_scale)
        lse = torch.from_numpy(lse).float().transpose(1, 2)
        return torch.from_numpy(out).bfloat16(), lse

    stand_in("flash_attn", "flash_attn_with_kvcache", with_kvcache)
    report = check_attention(adapters.flash_attn, dtype="bfloat16")
    assert not report.names("failed"), str(report)
    assert {"a row without keys", "stale NaN"} <= set(report.names("passed"))
    assert not adapters.ADAPTERS["flash_attn"][1]().names("failed")


def test_flash_attn_jaxs_adapter(adapters, stand_in):
    pytest.importorskip("jax")

    def flash_mha_fwd(q, k, v, *, softmax_scale, window_size_left, window_size_right):
        assert q.dtype == "bfloat16" and window_size_left == window_size_right == -1
        q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
        out, lse = attend(q, k, v, scale=softmax_scale)
        return out, lse.swapaxes(1, 2).astype(np.float32)

    stand_in("flash_attn_jax.flash_fwd", "flash_mha_fwd", flash_mha_fwd)
    report = check_attention(adapters.flash_attn_jax, dtype="bfloat16")
    assert not report.names("failed"), str(report)
    assert {"plain", "grouped heads", "large scores"} <= set(report.names("passed"))
    assert not adapters.ADAPTERS["flash_attn_jax"][1]().names("failed")


def merged(torch, *arrays, base=np.e, lse_axes=(0, 1)):
    """The right merge of tensors (n, h, d) and lse, with lse's axes in this order, in this base."""
    outs, lses = arrays[::2], arrays[1::2]
    factor = np.log(base)
    parts = [
        (o.float().numpy()[None], l.numpy().transpose(lse_axes)[None] * factor)
        for o, l in zip(outs, lses, strict=True)
    ]
    out, lse = merge(parts)
    return torch.from_numpy(out[0]).to(outs[0].dtype), torch.from_numpy(
        (lse[0] / factor).transpose(lse_axes).astype(np.float32)
    )


def test_the_merges_adapters(adapters, stand_in):
    torch = pytest.importorskip("torch")

    def merge_states(v, s):
        assert v.dtype == torch.bfloat16 and v.shape[-1] >= 64 and s.dtype == torch.float32
        pairs = (x for i in range(v.shape[1]) for x in (v[:, i], s[:, i]))
        return merged(torch, *pairs, base=2)

    def merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse):
        assert prefix_lse.shape == prefix_output.shape[1::-1]
        arrays = prefix_output, prefix_lse, suffix_output, suffix_lse
        out, lse = merged(torch, *arrays, lse_axes=(1, 0))
        output.copy_(out)
        output_lse.copy_(lse)

    def merge_attention(out, lse, other_out, other_lse):
        assert out.shape[:-1] == lse.shape
        flat = (x.flatten(0, 1) for x in (out, lse, other_out, other_lse))
        found, found_lse = merged(torch, *flat)
        return found.reshape(out.shape), found_lse.reshape(lse.shape)

    stand_in("flashinfer", "merge_states", merge_states)
    stand_in("vllm.v1.attention.ops.merge_attn_states", "merge_attn_states", merge_attn_states)
    triton = "sglang.srt.layers.attention.triton_ops.merge_state"
    stand_in(triton, "merge_state", functools.partial(merged, torch))
    stand_in("attn_gym.utils", "merge_attention", merge_attention)
    for name in ("vllm_merge", "sglang_merge", "gym_merge", "flashinfer_merge"):
        report = adapters.ADAPTERS[name][1]()
        assert not report.names("failed"), f"{name}: {report}"


def test_what_is_not_installed_is_said(adapters, capsys):
    adapters.main(["vllm_merge"])
    if importlib.util.find_spec("vllm") is None:
        assert capsys.readouterr().out == "vllm_merge: vllm is not installed\n\n"
    assert all(callable(check) for _, check in adapters.ADAPTERS.values())
