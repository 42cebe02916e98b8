"""What the backward pass of a layer keeps, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

_KEPT = "kept"
_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names(_KEPT),
}


def kept(x: jax.Array) -> jax.Array:
    """Mark ``x`` as one of the values that ``remat=names`` keeps; the value itself."""
    return checkpoint_name(x, _KEPT)


def rematerialised(step: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """The body of a scan over layers under one of the policies.

    What a layer is given is kept in every case. Besides, and from most memory to least:

    - ``none``: everything that its backward pass reads.
    - ``dots``: the products with weights; norms, attention and gates are computed again.
    - ``names``: what is marked by ``kept``: queries, keys, values and the attention's output,
      which are small beside what the MLP makes.
    - ``full``: nothing; the whole layer is computed again.

    Args:
        step: (carry, layer) -> (carry, output). policy: one of ``evojax.policy.shape.REMAT``.
    """
    if policy == "none":
        return step
    # A scan already keeps the two passes apart, so that nothing has to be hidden from XLA.
    return jax.checkpoint(step, policy=_POLICIES[policy], prevent_cse=False)
