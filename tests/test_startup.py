"""What a run says of its rules before the first step: every coefficient in effect, and what is off."""

import pytest

from moex.cli import PRESETS
from moex.config import MemoryConfig, ParallelConfig, RouterConfig
from moex.models.pattern import Kind
from moex.pipeline.layout import layout
from moex.pipeline.schedules import one_f_one_b
from moex.startup import balance_rules, memory_rules, pipeline_rules, routing_rules, transport_rules


def rules(**fields):
    router = RouterConfig(**fields)
    return f"{routing_rules(router)}; {balance_rules(router)}"


@pytest.mark.parametrize(
    "fields, said",
    [
        (dict(aux_coefficient=0.02), ["balance loss x 0.02", "sequence, z, global-batch loss off", "drops nothing"]),
        (dict(aux_coefficient=0.0), ["balance, sequence, z, global-batch loss off", "bias not moved"]),
        (dict(sequence_coefficient=1e-4, z_coefficient=1e-3), ["sequence loss x 0.0001", "z loss x 0.001"]),
        (dict(global_coefficient=0.5), ["global-batch loss x 0.5"]),
        (dict(bias_rate=1e-3, bias_centred=True), ["bias rate 0.001, centred"]),
        (dict(renormalize=False, scaling_factor=2.5), ["weights as scored, x 2.5"]),
        (dict(num_groups=4, top_groups=2), ["within the best 2 of 4 groups by sum of best 2"]),
        (dict(num_groups=4, top_groups=2, group_score_top=1), ["by maximum"]),
        (dict(selection="quantile", quantile_decay=0.5), ["selection quantile, decay 0.5", "bias by quantiles"]),
        (dict(selection="sinkhorn"), ["selection sinkhorn"]),
        (dict(jitter=0.01), ["jitter 0.01"]),
        (dict(forced="skew", forced_skew=2.0), ["FORCED skew 2: random logits"]),
        (
            dict(capacity_factor=1.25, capacity_policy="position", pad_to_capacity=True),
            ["DROPS beyond 1.25 x balanced rows by position, padded"],
        ),
    ],
    ids=str,
)
def test_a_field_that_is_set_is_said(fields, said):
    text = rules(**fields)
    assert all(part in text for part in said), text
    assert text != rules()


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_coefficients_are_said_as_they_are(name):
    router = PRESETS[name]().model.router
    text = balance_rules(router)
    if router.aux_coefficient:
        assert f"balance loss x {router.aux_coefficient:g}" in text
    else:
        assert "balance" in text[: text.index("loss off")]
    assert (f"bias rate {router.bias_rate:g}" in text) == (router.bias_rate > 0)


def test_buffers_and_clones_are_said():
    assert transport_rules(ParallelConfig()) == "local; buffers for the worst case"
    bounded = dict(transport="alltoall", cell_factor=1, spill_factor=0.35, echo_slots=1)
    sizes = "alltoall; cells x 1, spill x 0.35 of balanced, 3 sizes up to the worst case"
    clones = "clones of hot experts{}: 1 a device, above x 1.1"
    assert transport_rules(ParallelConfig(**bounded)) == f"{sizes}; {clones.format('')}"
    waves = ParallelConfig(**bounded, waves=4, echo="retry")
    assert transport_rules(waves) == f"{sizes} of a 4th of the tokens at a time; {clones.format(' in retries')}"


def test_what_a_pipeline_costs_is_said():
    dense, sparse = Kind(False, 0), Kind(True, 0)
    text = pipeline_rules(layout([sparse] * 8, 4, 2), one_f_one_b(4, 2, 8))
    assert text.startswith("4 ranks x 2 stages of 1 layers; bubble 18.8% of a rank's work; what 11 stages keep")
    uneven = pipeline_rules(layout([dense, sparse, sparse], 2, 1), one_f_one_b(2, 1, 4))
    assert "2 ranks x 1 stages of 1 to 2 layers, 25.0% of slots without a layer; bubble 25.0%" in uneven


def test_what_the_backward_pass_keeps_is_said():
    assert memory_rules(MemoryConfig()) == "recompute nothing"
    stash = MemoryConfig(recompute=("attention", "moe"), stash=("experts",))
    assert memory_rules(stash) == "recompute attention, moe; stash experts: x 1.1 of balanced"
    assert memory_rules(MemoryConfig(stash=("experts",), stash_factor=0)).endswith("stash experts: the worst case")
