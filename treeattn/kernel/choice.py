"""Which implementation runs: by the arguments, the platform, and what is installed."""

import importlib.util
import re
from collections.abc import Callable
from typing import NamedTuple

import jax

from treeattn.idea.state import AttentionState
from treeattn.kernel import exactly, flash, hook
from treeattn.kernel.causal import CAUSAL_BLOCK
from treeattn.kernel.inputs import Implementation, Inputs

KERNELS = "flash", "pallas", "mosaic"
AMPERE = (8, 0)  # the least compute capability that FlashAttention-2 and XLA's Triton take


class Kernel(NamedTuple):
    """A kernel for GPUs.

    attend:    runs it: from inputs to a state
    obstacle:  says why it cannot run (None where it can)
    attention: from inputs to the output, where that is less than a state and `finalize`
    """

    attend: Callable[[Inputs], AttentionState]
    obstacle: Callable[[Inputs], str | None]
    attention: Callable | None = None


def load_kernel(name: str) -> Kernel:
    """The kernel of that name, one of `KERNELS`."""
    if name == "flash":
        return Kernel(flash.flash_attend, flash.obstacle)
    if name == "mosaic":
        from treeattn.kernel import mosaic

        return Kernel(mosaic.mosaic_attend, mosaic.obstacle, mosaic.mosaic_attention)
    from treeattn.kernel import pallas  # when asked for: it takes a fifth of JAX's time to import

    return Kernel(pallas.pallas_attend, pallas.obstacle, pallas.pallas_attention)


def resolve(implementation: Implementation, inputs: Inputs, platform: str | None) -> Inputs:
    """The inputs with the implementation that will run them on that platform.

    platform: as `platform_of` gives it; None when only the program's compiler will know, which
    then chooses between CUDA and the rest.
    Raises ValueError for another name, and for a kernel that cannot run; TypeError for a function
    that cannot be hashed.
    """
    names = (None, "blockwise", *KERNELS, "exact")
    elsewhere = None
    if inputs.quantized and (callable(implementation) or implementation in names):
        implementation = _blockwise_alone(implementation, inputs)
    if callable(implementation):
        hook.check_hashable(implementation)
        if (problem := hook.obstacle(inputs, implementation)) is not None:
            raise ValueError(problem)
    elif implementation not in names:
        raise ValueError(
            f"implementation: expected one of {names}, or a function, got {implementation!r}"
        )
    elif implementation in KERNELS:
        problem = _wrong_platform(implementation, platform)
        problem = problem or load_kernel(implementation).obstacle(inputs)
        if problem is not None:
            raise ValueError(problem)
    elif implementation == "exact":
        if (problem := exactly.obstacle(inputs)) is not None:
            raise ValueError(problem)
    elif implementation is None:
        implementation = _best_on_cuda(inputs) if platform in (None, "cuda") else "blockwise"
        if platform is None and implementation in KERNELS:
            elsewhere = "blockwise"
    # A GPU has room for all rows at once.
    by_row = inputs.by_row and platform not in (None, "cuda", "gpu")
    return inputs.replace(
        implementation=implementation,
        elsewhere=elsewhere,
        on_cuda=platform == "cuda",
        by_row=by_row,
    )


def _blockwise_alone(implementation: Implementation, inputs: Inputs) -> str:
    """ "blockwise", which alone takes scales; a ValueError for another implementation."""
    if implementation not in (None, "blockwise"):
        came = hook.name_of(implementation) if callable(implementation) else repr(implementation)
        raise ValueError(
            f"implementation: {came} takes no keys of {inputs.k.dtype} with scales; use "
            "'blockwise', or floats: dequantize(k, key_scale)"
        )
    return "blockwise"


def _wrong_platform(name: str, platform: str | None) -> str | None:
    """Why the kernel of that name cannot run there; None if it can."""
    if platform in (None, "cuda"):
        return None
    if name != "flash" and platform != "gpu":
        return None  # what is no GPU has the kernel interpreted
    least = ".".join(map(str, AMPERE))
    came = "other GPUs" if platform == "gpu" else f"{platform} devices"
    return (
        f"implementation: {name!r} needs CUDA devices of compute capability {least} or higher, "
        f"got {came}"
    )


def _best_on_cuda(inputs: Inputs) -> str:
    """The implementation for CUDA devices, as the table of `attend` has it."""
    long_text = inputs.q.shape[1] > CAUSAL_BLOCK
    installed = importlib.util.find_spec("flash_attn_jax") is not None
    if long_text and installed and flash.obstacle(inputs) is None:
        return "flash"
    other = "pallas" if load_kernel("pallas").obstacle(inputs) is None else "blockwise"
    from treeattn.kernel import mosaic

    host = host_device()
    foreign = device_platform(host) == "cuda" and not mosaic.compiles_for(host)
    if foreign or mosaic.obstacle(inputs) is not None:
        return other
    return "mosaic" if other == "blockwise" or mosaic.suits(inputs) else other


def platform_of(x) -> str | None:
    """Where `x` is or will be computed on, as `device_platform` gives it.

    None for a traced array on a host with GPUs that the kernels take: its program may as well be
    one for the host's CPU. JAX runs what is not on a device yet on `jax.default_device`.
    """
    if isinstance(x, jax.core.Tracer):
        platform = device_platform(host_device())
        return None if platform == "cuda" else platform
    if isinstance(x, jax.Array):
        return device_platform(next(iter(x.devices())))
    chosen = jax.config.jax_default_device
    if isinstance(chosen, str):
        chosen = jax.local_devices(backend=chosen)[0]
    return device_platform(host_device() if chosen is None else chosen)


def host_device() -> jax.Device:
    """This process's first device: a GPU, where it has one and JAX is not told otherwise."""
    return jax.local_devices()[0]


def device_platform(device) -> str:
    """The device's platform: "cuda" for a GPU that the kernels take, "gpu" for any other GPU.

    JAX says "gpu" for NVIDIA's and AMD's alike. Their compute capabilities tell them apart: "9.0"
    is NVIDIA's, "gfx942" AMD's.
    """
    if device.platform not in ("gpu", "cuda", "rocm"):
        return device.platform
    version = getattr(getattr(device, "client", None), "platform_version", "cuda")
    capability = str(getattr(device, "compute_capability", ""))
    number = re.fullmatch(r"(\d+)\.(\d+)", capability)
    if number is None or "cuda" not in version.lower():
        return "gpu"
    return "cuda" if tuple(map(int, number.groups())) >= AMPERE else "gpu"
