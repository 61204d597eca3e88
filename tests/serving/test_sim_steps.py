"""Step times against the deployments that they stand for: the same bound, for any mixture of prompts and decodes."""

from __future__ import annotations

from functools import cache

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.accelerator import load_accelerator
from roofline.configs.load import load_model
from roofline.errors import InputError
from roofline.inference import Deployment
from roofline.parallel.mesh import Mesh
from roofline.serving.steps import BoundSteps, StepShape
from roofline.sharded import ShardedDeployment
from roofline.timing import time
from roofline.work import Ragged, Work

MODELS = ("llama-3-8b", "gpt-oss-20b", "mixtral-8x7b-v0.1", "deepseek-v2-lite", "qwen3-next-80b-a3b", "gemma-2-27b")
MESHES = (Mesh(), Mesh(tp=2), Mesh(pp=2), Mesh(tp=2, pp=2))


@cache
def deployment(name: str, mesh: Mesh) -> Deployment:
    return ShardedDeployment(load_model(name), load_accelerator("h100-sxm"), mesh=mesh)


def prompt(tokens: int, behind: int = 0) -> StepShape:
    return StepShape(tokens, tokens * behind + tokens * (tokens + 1) // 2, 1)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: mesh.flags or "one device")
@pytest.mark.parametrize("name", MODELS)
def test_a_uniform_step_is_the_deployments(name: str, mesh: Mesh) -> None:
    whole = deployment(name, mesh)
    for batch, context in ((1, 1), (1, 5000), (64, 8000), (256, 1024)):
        times = BoundSteps(whole, shortest=context, longest=context)
        shape = StepShape(decodes=batch, decode_context=batch * context)
        assert times.seconds(shape) == pytest.approx(whole.decode(batch, context).bound_s, rel=1e-9)
    times = BoundSteps(whole, longest=16384)
    for tokens, behind in ((1, 0), (500, 0), (2048, 4096), (8192, 0)):
        assert times.seconds(prompt(tokens, behind)) == pytest.approx(whole.prefill(1, tokens, cached=behind).bound_s, rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_a_verification_is_the_deployments(name: str) -> None:
    whole = deployment(name, Mesh())
    times = BoundSteps(whole, shortest=3000, longest=3000)
    shape = StepShape(decodes=16, decode_context=16 * 3000, drafted=3)
    assert times.seconds(shape) == pytest.approx(whole.decode(16, 3000, new_tokens=4).bound_s, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 8000), min_size=1, max_size=40), st.integers(1, 3000), st.integers(0, 3000))
def test_a_mixed_step_of_full_attention_is_the_ragged_batch(contexts: list[int], tokens: int, behind: int) -> None:
    whole = deployment("llama-3-8b", Mesh())
    groups = (*(Work(1, 1, context) for context in contexts), Work(1, tokens, behind))
    shape = StepShape(tokens, tokens * behind + tokens * (tokens + 1) // 2, 1, len(contexts), sum(contexts))
    exact = time(whole.model.cost(Ragged(groups)), whole.accelerator).bound
    assert BoundSteps(whole).seconds(shape) == pytest.approx(exact, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MODELS[:5]), st.lists(st.integers(0, 8000), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(1, 900), st.integers(0, 4000)), max_size=4),
)  # fmt: skip
def test_no_mixture_is_faster_than_its_bound(name: str, contexts: list[int], chunks: list[tuple[int, int]]) -> None:
    """The ragged batch costs at least what its sums say, windows or not: never an optimistic bound turned pessimistic."""
    whole = deployment(name, Mesh())
    decodes = time(whole.model.cost(Ragged(tuple(Work(1, 1, context) for context in contexts))), whole.accelerator).bound
    times = BoundSteps(whole, longest=8192)
    assert times.seconds(StepShape(decodes=len(contexts), decode_context=sum(contexts))) <= decodes * (1 + 1e-9)
    if chunks:
        model = whole.model.for_prefill
        prompts = time(model.cost(Ragged(tuple(Work(1, *chunk) for chunk in chunks))), whole.accelerator).bound
        tokens, pairs = sum(t for t, _ in chunks), sum(t * s + t * (t + 1) // 2 for t, s in chunks)
        assert times.seconds(StepShape(tokens, pairs, len(chunks))) <= prompts * (1 + 1e-9)


@pytest.mark.parametrize("mesh", MESHES[::3], ids=lambda mesh: mesh.flags or "one device")
@pytest.mark.parametrize("name", MODELS)
def test_a_run_of_steps_is_one_after_another(name: str, mesh: Mesh) -> None:
    times = BoundSteps(deployment(name, mesh), longest=16384)
    for batch, context in ((1, 7), (13, 4000), (200, 150_000)):
        run = times.decode_run(batch, context, 50)
        alone = [times.seconds(StepShape(decodes=batch, decode_context=context + batch * step)) for step in range(50)]
        numpy.testing.assert_allclose(run, alone, rtol=1e-9)


def test_the_lecture_has_no_steps_of_an_engine() -> None:
    with pytest.raises(InputError, match="convention: "):
        BoundSteps(Deployment(load_model("llama-2-13b"), load_accelerator("h100-sxm"), "lecture"))
