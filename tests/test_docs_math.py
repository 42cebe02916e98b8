"""docs/math.md names functions and tests: they exist, and every registered name is described."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

from evojax.grpo.advantages import ADVANTAGES
from evojax.grpo.aggregation import AGGREGATIONS
from evojax.grpo.correction import CORRECTIONS
from evojax.grpo.filters import GROUP_FILTERS
from evojax.grpo.kl import KL_LOSSES
from evojax.grpo.objectives import OBJECTIVES
from evojax.grpo.optimizer import OPTIMIZERS, SCHEDULES
from evojax.registry import Registry

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "math.md").read_text(encoding="utf-8")
FUNCTIONS = sorted(set(re.findall(r"`(evojax\.[\w.]+)`", TEXT)))
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))


@cache
def defined_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_page_names_functions_and_tests():
    assert len(FUNCTIONS) > 40 and len(TESTS) > 60


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_named_function_exists(name: str):
    module, _, function = name.rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_a_named_test_exists(path: str, name: str):
    assert name in defined_in(path)


REGISTRIES: list[Registry] = [
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    GROUP_FILTERS,
    KL_LOSSES,
    OBJECTIVES,
    OPTIMIZERS,
    SCHEDULES,
]


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_every_registered_name_is_described(registry: Registry):
    for name in registry:
        function = registry.get(name, "docs/math.md")
        assert f"{function.__module__}.{function.__name__}" in FUNCTIONS, name


def test_every_line_that_points_at_a_test_is_understood():
    assert len(re.findall(r"tests/[\w/]+\.py::", TEXT)) == len(
        re.findall(r"`tests/[\w/]+\.py::\w+`", TEXT)
    )
