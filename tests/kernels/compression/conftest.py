"""What the tests of compression work on: a layer, a decoder with correlated activations, and the model of its sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from roofline.kernels.compression.gptq import Hessian
    from roofline.kernels.compression.network import Decoder
    from roofline.model import Model

SIZES = {"vocabulary": 256, "D": 128, "F": 256, "N": 4, "K": 2, "H": 32, "layers": 2}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Operations here are small: threads would wait for one another."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def layer() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """By seed a weight, and correlated inputs with large channels: some to work against, others to judge by."""
    import torch

    @cache
    def drawn(seed: int, inputs: int = 128, outputs: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        mix = torch.randn(16, inputs, generator=generator) / 4
        gains = torch.exp(torch.randn(inputs, generator=generator))

        def draw() -> torch.Tensor:
            noise = 0.3 * torch.randn(512, inputs, generator=generator)
            return (torch.randn(512, 16, generator=generator) @ mix + noise) * gains

        return torch.randn(outputs, inputs, generator=generator) * inputs**-0.5, draw(), draw()

    return drawn


@pytest.fixture(scope="session")
def hessian_of() -> Callable[[torch.Tensor], Hessian]:
    """The Hessian of some inputs."""
    from roofline.kernels.compression.gptq import Hessian

    def made(x: torch.Tensor) -> Hessian:
        hessian = Hessian(x.shape[1])
        hessian.add(x)
        return hessian

    return made


@pytest.fixture(scope="session")
def correlated() -> Callable[[int], tuple[Decoder, torch.Tensor, torch.Tensor]]:
    """By seed a decoder whose activations are correlated, tokens to work against, tokens to judge by."""
    import torch

    from roofline.kernels.compression.network import Decoder, Sizes

    @cache
    def drawn(seed: int) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 + seed)
        tokens = torch.randint(0, SIZES["vocabulary"], (2, 8, 64), generator=generator)
        return Decoder.seeded(Sizes(**SIZES), seed, rank=16), tokens[0], tokens[1]

    return drawn


@pytest.fixture(scope="session")
def described() -> Model:
    """The model of those sizes in 16 bits."""
    from roofline.configs.load import load_model
    from roofline.kernels.compression.network import Sizes

    return load_model(Sizes(**SIZES).config())
