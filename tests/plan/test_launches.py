"""What the host launches in a step, counted in lists of thunks."""

import pytest

from moex.plan.hlo import parse
from moex.plan.launches import Launches, launches
from tests.plan.small_step import NUM_LAYERS, load

LOOPS = """HloModule jit_step, is_scheduled=true

%body (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  %inner = (s32[]) while(%p), condition=%test, body=%leaf, backend_config={"known_trip_count":{"n":"5"}}
}

%test (p: (s32[])) -> pred[] {
  %p = (s32[]) parameter(0)
}

%leaf (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
}

ENTRY %main (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  %outer = (s32[]) while(%p), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""
THUNKS = """\
000: kCommandBuffer [source | next=003 (1)]
    001: kCopy         [source | sink] kCopy
    002: kCustomKernel [source | sink] fusion
003: kWhile        [prev=000 (1) | sink]
condition:
    004: kCustomKernel [source | sink] compare
  body:
    005: kCustomKernel [source | sink] fusion
    006: kWhile        [prev=005 (1) | sink]
condition:
        007: kCustomKernel [source | sink] compare
      body:
        000: kCommandBuffer [source | sink]
            008: kAsyncStart [source | sink] stream=communication_stream[0], async_id=8
                009: kAllToAll [source | sink] kAllToAll
            010: kAsyncDone [source | sink] async_id=8
        011: kGemm [source | sink] kGemm
012: kAllReduce    [prev=003 (1) | sink] kAllReduce
"""


def test_loops_and_graphs_by_hand():
    """One product in 15 turns, one kernel in 3, one all-reduce; a graph of two and one all-to-all in each turn."""
    assert launches(THUNKS, parse(LOOPS)) == Launches(alone=15 + 3 + 1, graphs=1 + 15, inside=2 + 15)


def test_graphs_change_who_launches_and_not_what_runs():
    alone = THUNKS.replace("kCommandBuffer", "kSequential")
    assert launches(alone, parse(LOOPS)) == Launches(alone=19 + 17, graphs=0, inside=0)


def test_a_compiled_step():
    step = load("clean")
    found = launches(step.thunks, parse(step.text))
    assert found.graphs >= 1 and found.inside >= 2
    assert found.alone >= NUM_LAYERS * (4 + 3), "the all-to-alls and products of each layer"


@pytest.mark.parametrize(
    "thunks, told",
    [
        (THUNKS.replace("kGemm ", "kNewest "), "kind kNewest: is it launched by the host"),
        (THUNKS + "013: kWhile [source | sink]\n", "more loops than the module"),
        (THUNKS.splitlines()[0], "module has more loops"),
    ],
)
def test_what_cannot_be_counted_is_an_error(thunks, told):
    with pytest.raises(ValueError, match=told):
        launches(thunks, parse(LOOPS))
