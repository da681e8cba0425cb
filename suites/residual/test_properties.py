"""Properties that hold for every stack and every tensor, each searched for what falsifies it.

What a property says in full stands with it in `fixtures.runtime.properties`; the words here are its
name. A falsified one is told with its smallest example and a command that tries just that again.
"""

import pytest

from fixtures.properties.search import Search
from fixtures.verdict.plugin import Judge

pytestmark = pytest.mark.property


@pytest.mark.rule("S6")
def test_add_is_the_exact_sum_rounded_once(search: Search, judge: Judge) -> None:
    judge(search("exact add"))


@pytest.mark.rule("S6")
def test_add_has_the_residuals_dtype(search: Search, judge: Judge) -> None:
    judge(search("dtype of the add"))


@pytest.mark.rule("S6")
def test_add_of_views_is_that_of_copies(search: Search, judge: Judge) -> None:
    judge(search("add of views"))


@pytest.mark.rule("S6")
def test_dropout_of_everything_leaves_the_residual(search: Search, judge: Judge) -> None:
    judge(search("dropout of everything"))


@pytest.mark.rule("D1")
def test_zero_branches_leave_the_stream(search: Search, judge: Judge) -> None:
    judge(search("zero branches"))


@pytest.mark.rule("D1")
def test_zero_layers_change_nothing(search: Search, judge: Judge) -> None:
    judge(search("zero layers"))


@pytest.mark.rule("D1")
def test_stream_is_a_prefix_of_a_deeper_one(search: Search, judge: Judge) -> None:
    judge(search("prefix"))


@pytest.mark.rule("D1")
def test_scaled_embedding_scales_drift(search: Search, judge: Judge) -> None:
    judge(search("scaled embedding"))


@pytest.mark.rule("S5")
def test_gradient_is_linear_in_powers_of_two(search: Search, judge: Judge) -> None:
    judge(search("scaled gradient"))


@pytest.mark.rule("S5")
def test_gradient_flows_unrounded(search: Search, judge: Judge) -> None:
    judge(search("unrounded gradient"))


@pytest.mark.rule("P5")
def test_permuted_microbatches_permute_outputs(search: Search, judge: Judge) -> None:
    judge(search("permuted microbatches"))


# A world of two ranks an example.
@pytest.mark.full
@pytest.mark.rule("P5")
def test_pipeline_may_be_cut_at_any_layer(search: Search, judge: Judge) -> None:
    judge(search("pipeline splits"))
