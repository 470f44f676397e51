"""The default random number generators of the host and of the emulated GPU.

Torch's own default generator is the GPU's, so that operations on the GPU need no change. The host's is `HOST`, which
replaces the default under the names that mean the host's (`torch.default_generator`, `torch.manual_seed`, ...) and is
passed to operations on host tensors. Both are torch's Mersenne Twister for CPUs, so a seed gives the same numbers on
either. (A GPU has Philox, with other numbers.)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_fp8.cpu.placement import is_on_host, put_on_host

GPU = torch._C.default_generator

_METHODS = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_")
_TAKE_A_GENERATOR = frozenset(
    "rand randn randint randperm normal bernoulli multinomial poisson trunc_normal_ orthogonal_ sparse_ "
    "xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_".split()
).union(_METHODS)
_TAKE_NONE = frozenset(
    "rand_like randn_like randint_like dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ "
    "feature_alpha_dropout feature_alpha_dropout_ dropout1d dropout2d dropout3d native_dropout rrelu rrelu_ "
    "scaled_dot_product_attention multi_head_attention_forward gumbel_softmax".split()
)
_one_at_a_time = threading.RLock()


class Generator(torch._C.Generator):
    """`torch.Generator` of the host or of a GPU."""

    on_gpu = False

    def get_state(self) -> torch.Tensor:
        """The state, uint8, on the host as CUDA's."""
        return put_on_host(super().get_state())

    def clone_state(self) -> Generator:
        """A generator with the same state."""
        copy = Generator()
        copy.set_state(super().get_state())
        copy.on_gpu = self.on_gpu
        return copy

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")


HOST = Generator()


def is_on_gpu(generator: torch.Generator) -> bool:
    """Whether `generator` draws for the GPU."""
    return generator is GPU or getattr(generator, "on_gpu", False)


def expect_generator(generator: torch.Generator | None, on_host: bool) -> None:
    """Raise torch's error if `generator` belongs to the other device."""
    if generator is not None and is_on_gpu(generator) == on_host:
        wanted, found = ("cpu", "cuda") if on_host else ("cuda", "cpu")
        raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{found}'")


def call_on_host(name: str, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """`function(*args, **kwargs)`, torch's operation `name`, drawing from the host's generator."""
    if name in _TAKE_A_GENERATOR:
        expect_generator(kwargs.get("generator"), on_host=True)
        if kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": HOST}
    elif name in _TAKE_NONE:
        with _one_at_a_time:
            gpus = GPU.get_state()
            GPU.set_state(HOST.get_state())
            try:
                return function(*args, **kwargs)
            finally:
                HOST.set_state(GPU.get_state())
                GPU.set_state(gpus)
    return function(*args, **kwargs)


def call_on_gpu(name: str, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """`function(*args, **kwargs)`, torch's operation `name` on the GPU; a given generator must be the GPU's."""
    if name in _TAKE_A_GENERATOR:
        expect_generator(kwargs.get("generator"), on_host=False)
    return function(*args, **kwargs)


def patch_generators() -> None:
    """Make `HOST` the host's default generator, with the GPU's seed, and check generators that operations are given."""
    HOST.manual_seed(GPU.initial_seed())
    torch.default_generator = torch.random.default_generator = HOST
    for name in _METHODS:
        setattr(torch.Tensor, name, _expecting_gpus(getattr(torch.Tensor, name)))
    for name in ("bernoulli", "multinomial", "poisson"):
        setattr(torch, name, _expecting_gpus(getattr(torch, name)))


def _expecting_gpus(draw: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(draw)
    def checked(*args: Any, **kwargs: Any) -> Any:
        generator = kwargs.get("generator")
        if generator is not None:
            expect_generator(generator, is_on_host(args[0]))
        return draw(*args, **kwargs)

    return checked
