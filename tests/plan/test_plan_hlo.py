"""Collectives read from program text: kinds, bytes, loops, and the gather that must not be."""

from __future__ import annotations

import pytest

from evojax.plan.hlo import Collective, array_bytes, collectives, gathering, totals

MODULE = """\
HloModule jit_update, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add.1 (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.2 = f32[] add(%x, %y)
}

%layer (p: (s32[], f32[4,16])) -> (s32[], f32[4,16]) {
  %p = (s32[], f32[4,16]{1,0}) parameter(0)
  %w = bf16[4,16]{1,0} constant({...})
  %gather = bf16[64,16]{1,0:T(8,128)(2,1)} all-gather(%w), channel_id=1, dimensions={0}
  %start = (f32[4,16]{1,0}, f32[8,16]{1,0}) all-gather-start(%g), channel_id=2, dimensions={0}
  %done = f32[8,16]{1,0} all-gather-done(%start)
}

%layer_condition (p: (s32[], f32[4,16])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%micro (p: (s32[], f32[4,16])) -> (s32[], f32[4,16]) {
  %inner = (s32[], f32[4,16]{1,0}) while(%t), condition=%layer_condition, body=%layer, \
backend_config={"known_trip_count":{"n":"36"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %scatter = f32[2,16]{1,0} reduce-scatter(%g), channel_id=3, to_apply=%add.1, dimensions={0}
}

%micro_condition (p: (s32[], f32[4,16])) -> pred[] {
  ROOT %lt.2 = pred[] compare(%i, %rows), direction=LT
}

ENTRY %main.5_spmd (param: f32[8]) -> f32[8] {
  %outer = (s32[], f32[4,16]{1,0}) while(%t2), condition=%micro_condition, body=%micro
  %norm = (f32[], f32[3]{0}) all-reduce(%a, %b), channel_id=4, to_apply=%add.1
  ROOT %r = f32[8]{0} collective-permute(%param), channel_id=5
}
"""


def test_loops_with_known_turns_multiply_and_others_count_once():
    found = {(one.kind, one.shapes): (one.bytes, one.times) for one in collectives(MODULE)}
    assert found == {
        ("all-gather", ("bf16[64,16]",)): (2048, 36),
        ("all-gather", ("f32[8,16]",)): (512, 36),
        ("reduce-scatter", ("f32[2,16]",)): (128, 1),
        ("all-reduce", ("f32[]", "f32[3]")): (16, 1),
        ("collective-permute", ("f32[8]",)): (32, 1),
    }


def test_a_tpus_loops_and_fused_scatters_are_understood():
    """There the turns stand in the loop's condition, and a reduce-scatter is a fusion's name."""
    known = ', backend_config={"known_trip_count":{"n":"36"},'
    text = MODULE.replace(known + '"known_init_step":{"init":"0","step":"1"}}', "")
    text = text.replace(
        "  ROOT %lt = pred[] compare(%i, %n), direction=LT",
        "  %n.3 = s32[]{:T(128)} constant(28)\n"
        "  ROOT %lt = pred[]{:T(512)} compare(%i, %n.3), direction=LT, metadata={}",
    )
    text = text.replace(
        "ENTRY ",
        "%all-reduce-scatter.1 (input: f32[64,16]) -> f32[16,16] {\n"
        "  %ar = f32[64,16]{1,0} all-reduce(%input), channel_id=9, to_apply=%add.1\n"
        "  ROOT %ds = f32[16,16]{1,0} dynamic-slice(%ar, %a, %b)\n}\n\nENTRY ",
    ).replace(
        "  %norm = ",
        "  %f = f32[16,16]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1\n  %norm = ",
    )
    found = {(one.kind, one.shapes): one.times for one in collectives(text)}
    assert found["all-gather", ("f32[8,16]",)] == 28
    assert found["reduce-scatter", ("f32[16,16]",)] == 1
    assert ("all-reduce", ("f32[64,16]",)) not in found


def test_totals_by_kind():
    table = totals(collectives(MODULE))
    assert table["all-gather"] == {"places": 2, "runs": 72, "bytes": 36 * 2560}
    assert table["all-reduce"] == {"places": 1, "runs": 1, "bytes": 16}


def test_an_unused_computation_counts_nothing():
    assert collectives(MODULE.replace("body=%micro\n", "body=%nothing\n")) == [
        Collective("all-reduce", ("f32[]", "f32[3]"), 16, 1),
        Collective("collective-permute", ("f32[8]",), 32, 1),
    ]


@pytest.mark.parametrize(
    ("kind", "dims", "size"),
    [("s4", "3", 2), ("u8", "2,2", 4), ("f8e4m3fn", "4", 4), ("bf16", "", 2), ("f64", "2", 16)],
)
def test_bytes_of_array_types(kind: str, dims: str, size: int):
    assert array_bytes(kind, dims) == size


def test_gathered_logits_are_told_from_a_gathered_matrix():
    def gather(shape: str, kind: str = "all-gather") -> Collective:
        return Collective(kind, (shape,), 0, 1)

    matrix, logits = gather("bf16[512,64]"), gather("f32[128,512]")
    turned, part = gather("f32[64,512]"), gather("f32[128,64]")
    summed = gather("f32[128,512]", "all-reduce")
    found = [matrix, logits, turned, part, summed]
    assert gathering(found, rows=128, vocabulary=512, hidden=64) == [logits]
