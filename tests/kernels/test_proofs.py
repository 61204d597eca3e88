"""Every kernel at every case: outputs against float64, traffic and FLOPs against the component's Cost, as integers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from roofline.kernels.registry import load_all
from roofline.kernels.spec import Case, Spec
from roofline.validate.prove import prove

SPECS = load_all()
POINTS = [pytest.param(spec, case, id=f"{spec.name}-{case.name}") for spec in SPECS for case in spec.cases]


@pytest.mark.parametrize(("spec", "case"), POINTS)
def test_kernel_is_right_and_moves_what_the_model_says(spec: Spec, case: Case) -> None:
    assert prove(spec, case).failures == ()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_has_enough_cases(spec: Spec) -> None:
    assert len({case.name for case in spec.cases}) == len(spec.cases) >= 3
    assert {case.precision for case in spec.cases} == set(spec.tolerance)
