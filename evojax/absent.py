"""Names that published recipes use and this version does not have, with what each would take."""

from __future__ import annotations

DOMAINS = {
    "coding": "a sandbox that runs programs against input and output pairs",
    "swe": "a container for each repository, tools, and rollouts of many turns",
}
REWARDS = {
    "tests_passed": "the domain swe, whose hidden tests it counts",
    "instruction_following": "a judge model that scores how instructions were followed",
    "search_before_edit": "the domain swe, whose tool calls it reads",
    "test_after_edit": "the domain swe, whose tool calls it reads",
}
