"""Weights used in several places and stored in one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from roofline.components.base import Component, State
from roofline.cost import Cost
from roofline.work import Batch


@dataclass(frozen=True)
class Shared(Component):
    """A component that runs with the weights of an equal one elsewhere: it costs and remembers the same, stores nothing.

    The weights are read here again: between two uses the layers in between have passed through the caches.

    Attributes:
        original: the component whose weights are shared.
    """

    original: Component

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The kind of the original."""
        return self.original.kind

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the original."""
        return self.original.name

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        """The kernels of the original, each sharing its weights."""
        kernels = self.original.parts
        return (self,) if kernels == (self.original,) else tuple(Shared(part) for part in kernels)

    def cost(self, work: Batch) -> Cost:
        return self.original.cost(work)

    def state(self) -> State:
        return self.original.state()

    def prefill_form(self) -> Component:
        """The original's prefill form, with shared weights."""
        form = self.original.prefill_form()
        return self if form is self.original else Shared(form)
