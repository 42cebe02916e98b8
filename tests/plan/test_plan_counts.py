"""Memory and time of a plan by hand, and against the arrays that a run really makes."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from evojax.bench.flops import layer_products
from evojax.config import AlgorithmConf
from evojax.errors import InputError
from evojax.grpo.update import Updater
from evojax.plan import advice, memory, rates
from evojax.plan.case import Case, Chip, Work, example_batch, row_shape
from evojax.policy.cache import unstack
from evojax.policy.decoder import init_params
from evojax.policy.shape import LinearConfig, ModelConfig, num_params

CHIP = Chip(memory=1e9, flops=1e12, memory_rate=1e11, link_rate=1e10)
MODEL = ModelConfig(64, 32, 64, 2, 4, 2, 8, 1e4, 1e-5, 4096)
WORK = Work(groups=8, samples=4, prompt=10, new=20, micro_groups=2, max_batch=8)
CASE = Case(MODEL, WORK, CHIP, chips=1, host_chips=1, mesh=(1, 1, 1))
WEIGHTS = 64 * 32 + 32 + 2 * (2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)


def with_mesh(data: int, fsdp: int, tp: int, **changes) -> Case:
    case = dataclasses.replace(CASE, **changes)
    chips = data * fsdp * tp
    return dataclasses.replace(case, chips=chips, host_chips=chips, mesh=(data, fsdp, tp))


def tree_bytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_resident_bytes_are_those_of_the_real_state_and_engine():
    params = init_params(MODEL, 0)
    state = Updater(MODEL, AlgorithmConf(), 1.0).init(params)
    found = memory.resident(CASE)
    assert num_params(MODEL) == WEIGHTS
    assert found["weights"] == found["kl_reference"] == tree_bytes(params) == 4 * WEIGHTS
    real = tree_bytes(state["opt_state"])
    assert found["optimizer"] == 8 * WEIGHTS and abs(real - found["optimizer"]) <= 8
    assert found["engine_weights"] == tree_bytes(unstack(params, MODEL))
    half = dataclasses.replace(CASE, model=dataclasses.replace(MODEL, compute_dtype="bfloat16"))
    assert memory.resident(half)["engine_weights"] == 2 * WEIGHTS
    assert found["adapters"] == 0 and memory.memory(CASE).sync == {}


def test_a_mesh_cuts_what_its_rules_cut():
    norms = 32 + 4 * 32
    cut = memory.weights_per_device(with_mesh(1, 2, 2))
    assert cut == (WEIGHTS - norms) / 4 + norms
    assert memory.weights_per_device(with_mesh(4, 1, 1)) == WEIGHTS


def test_an_engine_is_cut_over_the_devices_of_its_process():
    assert memory.engine_share(CASE) == WEIGHTS
    norms, key_values = 32 + 4 * 32, 2 * 2 * 32 * 16
    two = dataclasses.replace(CASE, chips=8, host_chips=2, mesh=(8, 1, 1))
    assert memory.engine_share(two) == (WEIGHTS - norms) / 2 + norms
    four = dataclasses.replace(CASE, chips=4, host_chips=4, mesh=(4, 1, 1))
    cut = WEIGHTS - norms - key_values  # two heads of keys and values are not cut over four
    assert memory.engine_share(four) == cut / 4 + norms + key_values
    found = memory.memory(two).sync
    assert found["handed_weights"] == 4 * memory.engine_share(two)
    assert (
        found["whole_matrix"] == 4 * 2 * 32 * 64 and memory.memory(four).sync["whole_matrix"] == 0
    )


def test_heads_that_the_mesh_does_not_divide_are_an_error_with_names():
    with pytest.raises(InputError) as caught:
        memory.weights_per_device(with_mesh(1, 1, 4))
    assert any("tp" in problem.where for problem in caught.value.problems)


def test_optimizers_keep_what_they_keep():
    kept = {name: memory.moments_per_weight(name) for name in ("adamw", "lion", "adafactor")}
    assert kept["adamw"] == 2.0 and kept["lion"] == 1.0 and 0 < kept["adafactor"] < 0.01


def test_adapters_replace_gradients_and_moments():
    case = dataclasses.replace(CASE, lora_rank=2, lora_targets=("q", "down"))
    trained = 2 * 2 * ((32 + 32) + (64 + 32))
    assert memory.adapter_count(case) == trained
    found = memory.memory(case)
    assert found.resident["optimizer"] == 8 * trained and found.resident["kl_reference"] == 0
    assert found.resident["adapters"] == 4 * trained
    assert found.update["gradients"] == 8 * trained


def test_cache_bytes_are_those_of_the_buffers():
    # two prompts of 10, eight rows of 32 places; keys and values of 2 heads of 8, float32, 2 layers
    assert memory.cache_bytes(CASE) == 2 * 2 * 8 * 4 * 2 * (2 * 10 + 8 * 32)


def test_remat_keeps_less_in_the_documented_order():
    long = dataclasses.replace(CASE, work=dataclasses.replace(WORK, prompt=400, new=300))
    sizes = []
    for remat in ("none", "dots", "names", "full"):
        case = dataclasses.replace(
            long, model=dataclasses.replace(MODEL, remat=remat, num_layers=8)
        )
        sizes.append(sum(memory.activations(case).values()))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 2 * sizes[-1]


def test_the_row_is_the_one_that_packing_makes():
    row = row_shape(CASE)
    rows = example_batch(CASE, 8).rows
    assert row.nodes == rows.tokens.shape[-1] and row.slots == rows.head.shape[-1]
    assert rows.slot.shape[-2:] == (row.responses, row.length) == (8, 32)
    assert row.pairs == row.shared**2 + row.lines * row.width * (row.shared + row.width)
    assert int(rows.rows) == 4 and np.asarray(rows.response_mask).sum() == 8 * 4 * 20


def test_multiplications_of_a_token_are_the_matrices():
    products = sum(k * n * times for (k, n), times in layer_products(MODEL).items())
    assert rates.products_per_token(MODEL) == MODEL.num_layers * products


def test_micro_batches_and_empty_rows():
    assert rates.micro_batches(CASE) == 4
    assert rates.micro_batches(with_mesh(1, 4, 1)) == 1
    eight = with_mesh(2, 4, 1)
    assert rates.micro_batches(eight) == 1
    (words,) = [w for w in advice.remarks(eight, 4) if "rows of a pass are empty" in w]
    assert words.startswith("4 of the 8 rows")
    steps = dataclasses.replace(CASE, work=dataclasses.replace(WORK, minibatches=4))
    assert rates.micro_batches(steps) == 4


def test_update_by_hand():
    row, found = row_shape(CASE), rates.update(CASE)
    body = 2 * (rates.products_per_token(MODEL) * row.nodes + 2 * 4 * 8 * row.pairs * 2)
    head = 2 * 64 * 32 * row.slots
    assert found.flops == found.model_flops == 4 * 3 * (body + head)
    assert found.compute_s == found.flops / 1e12 and found.links_s == 0
    assert found.tokens == 8 * 4 * 20
    again = dataclasses.replace(CASE, model=dataclasses.replace(MODEL, remat="full"))
    assert rates.update(again).flops == found.flops + 4 * body
    assert rates.update(again).model_flops == found.model_flops
    scored = dataclasses.replace(CASE, work=dataclasses.replace(WORK, scored=0.5))
    assert rates.update(scored).flops == found.flops + 4 * 0.5 * (body + head)


def test_what_a_device_sends():
    assert rates.update(with_mesh(2, 1, 1)).link_bytes == 2 * (2 * 4 * WEIGHTS / 2)
    fsdp = rates.update(with_mesh(1, 2, 1)).link_bytes
    assert fsdp == 2 * (2 * 4 * WEIGHTS / 2 + 4 * WEIGHTS / 2)
    nodes = row_shape(CASE).nodes
    assert rates.update(with_mesh(1, 1, 2)).link_bytes == 4 * (2 * 0.5 * 4 * 4 * nodes * 32 * 2)


def test_rollout_reads_weights_and_caches_for_every_token():
    found = rates.rollout(CASE)
    read = 4 * WEIGHTS + memory.cache_bytes(CASE)
    assert found.memory_s == 4 * 21 * read / 1e11  # 32 responses, 8 at once, 20 tokens and a start
    hosts = dataclasses.replace(CASE, chips=4, host_chips=1, mesh=(4, 1, 1))
    assert rates.rollout(hosts).memory_s == found.memory_s / 4 and found.links_s == 0
    together = dataclasses.replace(hosts, chips=2, host_chips=2, mesh=(2, 1, 1))
    assert rates.rollout(together).memory_s == found.memory_s / 2
    sent = 4 * (20 + 10 / 4) * 8 * (2 * 0.5 * 2 * 4 * 32 * 2)
    assert rates.rollout(together).link_bytes == sent
    assert found.bound == "memory"


def test_a_hybrid_has_states_instead_of_most_keys():
    linear = LinearConfig(4, 2, 4, 8, 8, 4)
    hybrid = dataclasses.replace(
        MODEL, family="qwen3_5", num_layers=4, qk_norm=True, attn_gate=True, linear=linear
    )
    case = dataclasses.replace(CASE, model=hybrid)
    keys = 2 * 2 * 8 * 4 * (2 * 10 + 8 * 32)
    assert memory.cache_bytes(case) == keys + 4 * (4 * 8 * 8) * 8 * 3
    assert rates.update(case).flops > 0 and memory.memory(case).fits


def test_what_to_change_is_found_and_is_enough():
    need = memory.memory(CASE).peak
    tight = dataclasses.replace(CASE, chip=dataclasses.replace(CHIP, memory=0.6 * need))
    assert not memory.memory(tight).fits
    single = advice.single_changes(tight)
    assert [one.peak for one in single] == sorted(one.peak for one in single)
    assert all(one.peak < need for one in single)
    enough = advice.together(tight)
    assert enough is not None and enough.fits and memory.memory(enough.case).fits
    for word in enough.overrides if len(enough.overrides) > 1 else ():
        rest = [(other,) for other in enough.overrides if other != word]
        without = advice._applied(tight, rest)
        assert without is None or not without.fits, word
    keys = [word.split("=")[0] for word in enough.overrides]
    assert len(keys) == len(set(keys))


def test_nothing_is_promised_where_nothing_helps():
    tiny = dataclasses.replace(CASE, chip=dataclasses.replace(CHIP, memory=10.0))
    assert advice.together(tiny) is None and advice.chips_needed(tiny) is None


def test_more_chips_help_while_something_is_cut():
    large = dataclasses.replace(MODEL, hidden_size=1024, intermediate_size=4096, num_layers=8)
    case = with_mesh(1, 2, 1, model=dataclasses.replace(large, compute_dtype="bfloat16"))
    whole = memory.memory(case)
    fixed = whole.resident["engine_weights"]
    limit = fixed + 0.6 * (whole.peak - fixed)
    tight = dataclasses.replace(case, chip=dataclasses.replace(CHIP, memory=limit))
    assert advice.chips_needed(tight) in (4, 8, 16)
