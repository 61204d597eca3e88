"""The component's FLOPs are held against what the reference needs, and what the tiles execute does not follow from them."""

from __future__ import annotations

from unittest.mock import PropertyMock

import pytest

pytest.importorskip("triton")

from roofline.cost import Cost
from roofline.kernels.registry import load_all
from roofline.kernels.spec import Spec
from roofline.validate.counted import Counts
from roofline.validate.prove import mismatches

SPECS = load_all()
DOTTED = [spec for spec in SPECS if spec.expected(spec.cases[0], spec.inputs(spec.cases[0], "cpu")).dot]


def test_most_kernels_that_multiply_matrices_are_here() -> None:
    assert len(DOTTED) >= 18


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_component_counts_what_the_reference_needs(spec: Spec) -> None:
    for case in spec.cases:
        expected = spec.expected(case, spec.inputs(case, "cpu"))
        assert expected.useful.matrix_flops == expected.needed()
        assert expected.executed >= expected.needed()


@pytest.mark.parametrize("spec", DOTTED, ids=lambda spec: spec.name)
def test_a_component_that_counts_seven_times_as_much_is_found_at_every_case(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in spec.cases:
        inputs = spec.inputs(case, "cpu")
        right = spec.expected(case, inputs)
        with monkeypatch.context() as patch:
            wide = PropertyMock(return_value=7 * right.useful.matrix_flops)
            patch.setattr(Cost, "matrix_flops", wide)
            wrong = spec.expected(case, inputs)
            assert (wrong.executed, wrong.needed(), wrong.dots) == (right.executed, right.needed(), right.dots)
            failures = [one for one in mismatches(wrong, Counts()) if "the reference needs" in one]
        assert failures or not right.needed()
