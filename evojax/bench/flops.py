"""How much arithmetic an update needs, and how fast XLA alone does it on the same shapes.

Floating-point operations are counted as 2 per weight and token forward and 4 backward, for the
tokens that are really computed (prefix-tree nodes; the head for the nodes that predict). Padding,
attention scores and recomputation count nothing, so the ratio to the matmul rate is honest.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from evojax.bench.timing import note, timed
from evojax.grpo.pack import Packed
from evojax.policy.decoder import ModelConfig
from evojax.policy.products import across, dot

HEAD_ROWS = 512  # at most: more rows do not change the head's rate, only the memory it takes
_INNER_FLOPS, _INNER_CALLS = 2e9, 50  # a timed run repeats a small product up to these
_LAYOUTS = {
    "forward": lambda x, w, d: dot(x, w, 1, 0),
    "input_gradient": lambda x, w, d: dot(d, w, 1, 1),
    "weight_gradient": lambda x, w, d: across(x, d),
}


def layer_products(cfg: ModelConfig) -> dict[tuple[int, int], int]:
    """Matrices of one layer as (inputs, outputs) -> how many there are.

    >>> layer_products(ModelConfig(16, 4, 8, 2, 2, 1, 2, 1e4, 1e-5, 64))
    {(4, 4): 2, (4, 2): 2, (4, 8): 2, (8, 4): 1}
    """
    width, inner = cfg.hidden_size, cfg.intermediate_size
    heads, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    found: dict[tuple[int, int], int] = {}
    for shape in (
        (width, heads),
        (heads, width),
        *[(width, kv)] * 2,
        *[(width, inner)] * 2,
        (inner, width),
    ):
        found[shape] = found.get(shape, 0) + 1
    return found


def predicting_nodes(packed: Packed) -> int:
    """Nodes whose next-token distribution is computed, over all rows of a batch."""
    rows = packed.rows
    return sum(
        len(np.unique(rows.slot[m, a][rows.response_mask[m, a]]))
        for m, a in np.ndindex(rows.slot.shape[:2])
    )


def update_flops(cfg: ModelConfig, packed: Packed) -> float:
    """Floating-point operations of one update; see the module's text for what is counted."""
    layer = sum(k * n * times for (k, n), times in layer_products(cfg).items())
    body = cfg.num_layers * layer * packed.stats["tokens_packed"]
    return 6.0 * (body + cfg.hidden_size * cfg.vocab_size * predicting_nodes(packed))


def matmul_ceiling(cfg: ModelConfig, packed: Packed, dtype: str, repeats: int) -> dict[str, Any]:
    """XLA's own rate on an update's products: its operations over the seconds they take alone.

    Every product of the model, forward and both of its gradients, is timed by itself with the rows
    that a micro-batch of ``packed`` has, and weighted by how often it occurs.

    Args:
        dtype: of the products. repeats: timed runs of each.

    Returns:
        {dtype, gflop_per_s, products: [{shape: [m, k, n], which, times, gflop_per_s, ...}]}.
    """
    rows = {"layer": packed.rows.tokens[0].size, "head": packed.rows.head[0].size}
    wanted = [(rows["layer"], k, n, t) for (k, n), t in layer_products(cfg).items()]
    wanted = [(m, k, n, times * cfg.num_layers) for m, k, n, times in wanted]
    head = min(rows["head"], HEAD_ROWS)
    wanted.append((head, cfg.hidden_size, cfg.vocab_size, rows["head"] / head))
    products = [
        _product(m, k, n, times, which, dtype, repeats)
        for m, k, n, times in wanted
        for which in _LAYOUTS
    ]
    work = sum(_gflop(p) * p["times"] for p in products)
    seconds = sum(_gflop(p) * p["times"] / p["gflop_per_s"] for p in products)
    note(f"matmuls of an update, {rows['layer']} rows, {dtype}: {work / seconds:.1f} GFLOP/s")
    return {"dtype": dtype, "gflop_per_s": work / seconds, "products": products}


def _gflop(product: dict[str, Any]) -> float:
    m, k, n = product["shape"]
    return 2e-9 * m * k * n


def _product(
    m: int, k: int, n: int, times: float, which: str, dtype: str, repeats: int
) -> dict[str, Any]:
    """Rate of one product of ``x [m, k]``, ``w [k, n]``, ``d [m, n]``."""
    multiply = jax.jit(_LAYOUTS[which])
    x, w, d = (jnp.ones(shape, dtype) for shape in ((m, k), (k, n), (m, n)))
    inner = min(_INNER_CALLS, max(1, int(_INNER_FLOPS // (2 * m * k * n))))

    def run() -> None:
        for _ in range(inner):
            multiply(x, w, d).block_until_ready()

    seconds = timed(run, repeats, budget_s=2.0)
    product = {"shape": [m, k, n], "which": which, "times": times}
    return product | {"gflop_per_s": _gflop(product) * inner / seconds["median_s"], **seconds}
