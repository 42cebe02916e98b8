"""Every objective, aggregation and correction: one gradient, however the batch is cut."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from update_oracle import GROUPS, LONGEST, TEMPERATURE, TINY, Batch, oracle, weights

from evojax.config import AlgorithmConf
from evojax.grpo.aggregation import AGGREGATIONS
from evojax.grpo.correction import CORRECTIONS
from evojax.grpo.gradient import batch_gradient
from evojax.grpo.kl import KL_LOSSES
from evojax.grpo.objectives import OBJECTIVES
from evojax.grpo.pack import pack
from evojax.grpo.update import Updater

gradient_of = jax.jit(batch_gradient, static_argnames=("cfg", "spec"))


@st.composite
def algorithms(draw):
    """Any algorithm that can be chosen: corrections need log-probabilities of the trainer."""
    correction = draw(st.sampled_from(list(CORRECTIONS)))
    trainer = correction != "none" or draw(st.booleans())
    objective = draw(st.sampled_from(list(OBJECTIVES)))
    return AlgorithmConf(
        objective=objective,
        aggregation=draw(st.sampled_from(list(AGGREGATIONS))),
        correction=correction,
        correction_low=0.8,
        correction_high=1.2,
        old_logprobs="trainer" if trainer else "rollout",
        epochs=draw(st.sampled_from([1, 2])),
        eps_low=draw(st.sampled_from([0.03, 0.2])),
        eps_high=draw(st.sampled_from([0.05, 0.28])),
        dual_clip=draw(st.sampled_from([None, 1.3])) if objective == "clip" else None,
        kl_coef=draw(st.sampled_from([0.0, 0.3])),
        kl_loss=draw(st.sampled_from(list(KL_LOSSES))),
        entropy_coef=draw(st.sampled_from([0.0, 0.2])),
    )


def widened(packed, nodes=5, lines=2, tokens=3, rows=1):
    """The same batch with more padding on every axis."""
    extra = {
        "tokens": (rows, 0, nodes), "positions": (rows, 0, nodes), "shared_end": (rows, 0, nodes),
        "parent": (rows, 0, 0), "tail": (rows, 0, 0, 0),
        "head": (rows, 0, nodes),
    }  # fmt: skip
    arrays = {
        name: np.pad(value, [(0, more) for more in extra.get(name, (rows, 0, lines, tokens))])
        for name, value in packed.rows._asdict().items()
        if name != "rows"
    }
    owner = np.pad(packed.owner, [(0, rows), (0, 0), (0, lines), (0, 0)], constant_values=-1)
    new = type(packed.rows)(**arrays, rows=packed.rows.rows)
    return type(packed)(new, owner, packed.stats)


def scored_pack(trainer, batch, conf, per_row, groups=None):
    packed = pack(
        batch.prompts,
        batch.completions,
        batch.advantages,
        per_row,
        aggregation=conf.aggregation,
        horizon=LONGEST,
        include_dead=trainer.spec.needs_dead,
        groups=groups,
    )
    assert packed is not None
    trainer.reference(weights(3))
    packed = trainer.score_reference(packed)
    if trainer.spec.scores_old:
        packed = trainer.score_old({"params": weights(2)}, packed)
    return packed


def assert_same(left, right, rtol=2e-4):
    """Equal leaf by leaf, to ``rtol`` of the gradient's largest element."""
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(right))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=rtol * largest + 1e-7),
        left,
        right,
    )


@settings(max_examples=8, derandomize=True)
@given(
    conf=algorithms(),
    seed=st.integers(0, 20),
    cut=st.sampled_from([(1, True), (4, False)]),
    order=st.permutations(range(GROUPS)),
)
def test_packed_loss_and_gradient_equal_the_unpacked_oracle(conf, seed, cut, order):
    trainer = Updater(TINY, conf, TEMPERATURE)
    loss, gradient = oracle(weights(), Batch(seed), conf, LONGEST, weights(2), weights(3))
    per_row, wide = cut
    packed = scored_pack(trainer, Batch(seed, order), conf, per_row)
    packed = widened(packed) if wide else packed
    found, sums = gradient_of(weights(), TINY, trainer.spec, trainer.hyper, packed.rows)
    assert float(sums["loss"]) == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert_same(found, gradient)


CUTS = [
    AlgorithmConf(),
    AlgorithmConf(
        objective="gspo", aggregation="seq_mean_token_mean", old_logprobs="trainer", epochs=2,
        correction="sequence_tis", correction_high=1.2, kl_coef=0.1, entropy_coef=0.1,
    ),
]  # fmt: skip


@pytest.mark.parametrize("conf", CUTS, ids=["plain", "everything"])
def test_rows_padding_and_order_change_neither_gradient_nor_metrics(conf):
    trainer = Updater(TINY, conf, TEMPERATURE)
    results = []
    for per_row, order, wide in (
        (4, range(4), False),
        (1, (2, 0, 3, 1), True),
        (2, (3, 2, 1, 0), 0),
    ):
        packed = scored_pack(trainer, Batch(5, order), conf, per_row)
        rows = (widened(packed) if wide else packed).rows
        results.append(gradient_of(weights(), TINY, trainer.spec, trainer.hyper, rows))
    for gradient, sums in results[1:]:
        assert_same(gradient, results[0][0], 1e-5)
        for name, value in sums.items():
            np.testing.assert_allclose(value, results[0][1][name], rtol=1e-4, atol=1e-5)


def test_gradient_accumulates_over_minibatches_only_with_their_own_denominators():
    """Two halves, each with the whole batch's weights, add up to the batch's gradient."""
    conf = CUTS[0]
    trainer = Updater(TINY, conf, TEMPERATURE)
    batch = Batch(7)
    whole = scored_pack(trainer, batch, conf, 2)
    expected, _ = gradient_of(weights(), TINY, trainer.spec, trainer.hyper, whole.rows)
    parts = []
    counted = batch.advantages.weight
    lengths = np.array([[len(c.token_ids) for c in group] for group in batch.completions])
    for groups in ([0, 1], [2, 3]):
        part = scored_pack(trainer, batch, conf, 2, groups)
        share = (lengths * counted)[groups].sum() / (lengths * counted).sum()
        gradient, _ = gradient_of(weights(), TINY, trainer.spec, trainer.hyper, part.rows)
        parts.append(jax.tree.map(lambda g, share=share: g * share, gradient))
    assert_same(jax.tree.map(lambda a, b: a + b, *parts), expected, 1e-5)


def test_the_oracle_sees_clipping_masking_and_both_kl_losses():
    """The examples above would prove little if no bound ever acted."""
    batch = Batch(5)
    ids, mask, sampler, adv = batch.arrays()
    assert (adv > 0).any() and (adv < 0).any() and not mask.all()
    base = CUTS[1]
    losses = {
        change: oracle(
            weights(), batch, dataclasses.replace(base, **dict([change])), LONGEST, weights(2),
            weights(3),
        )[0]
        for change in (("epochs", 2), ("eps_low", 0.01), ("correction", "geometric_mask"),
                       ("kl_loss", "k3_is"), ("kl_coef", 0.0), ("entropy_coef", 0.0),
                       ("aggregation", "seq_mean_token_sum"), ("objective", "cispo"))
    }  # fmt: skip
    assert len({round(value, 7) for value in losses.values()}) >= len(losses) - 1
    assert np.isfinite(sampler).all() and ids.shape[0] == mask.shape[0]
