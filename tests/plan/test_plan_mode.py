"""mode=plan from end to end: settings, verdicts, and the compiled programs on pretended devices."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from evojax.config import HardwareConf, PlanConf
from evojax.errors import InputError
from evojax.evolution.config_edit import compose_conf
from evojax.evolution.workshop import typed
from evojax.guards import hiding, notes
from evojax.modes import plan as mode
from evojax.modes.job import Job
from evojax.overrides import group_options, nested_options
from evojax.paths import conf_dir
from evojax.plan import compiler
from evojax.plan.case import case_of, shape_of
from evojax.plan.compiler import Compiled, compile_programs
from evojax.plan.report import plan_data, show, verdict
from evojax.preflight import check, missing_experiment, preflight, recipe_problems
from evojax.training.interrupt import InterruptGuard

TREE = conf_dir()
PAPER = [name for name in nested_options("experiment", [TREE]) if name.startswith("paper/")]
NOT_RUN = Compiled({}, "for a test", 0.0)
WIDE = ["policy=random_tiny", "policy.arch.vocab_size=512", "policy.arch.hidden_size=64"]


def composed(*overrides: str) -> DictConfig:
    return compose_conf(TREE, ["+experiment=plan", *overrides])


def planned(*overrides: str, compiled: Compiled = NOT_RUN) -> dict[str, Any]:
    conf = typed(composed(*overrides))
    case = case_of(conf, shape_of(conf.policy))
    return plan_data(conf.hardware.name, conf.policy.source, case, compiled)


def shown(data: dict[str, Any]) -> str:
    console = Console(record=True, width=150, file=open("/dev/null", "w"))
    show(data, console)
    return console.export_text()


@pytest.mark.parametrize("name", group_options("hardware", [TREE]))
def test_hardware_presets_are_whole(name: str):
    cfg = composed(f"hardware={name}", "policy=random_tiny")
    hardware = cfg.hardware
    assert recipe_problems(cfg) == []
    assert hardware.name == name and hardware.chips % hardware.host_chips == 0
    if hardware.platform == "tpu":
        layout = hardware.topology.partition(":")[2]
        assert math.prod(int(n) for n in layout.split("x")) == hardware.chips
        assert hardware.topology.startswith(name.split("_")[1] + ":")
    else:
        assert hardware.topology is None


def test_a_mesh_for_another_number_of_chips_is_refused():
    (problem,) = recipe_problems(composed("hardware=h200_8", "hardware.mesh.fsdp=4"))
    assert problem.where == "hardware.mesh" and "product is 8" in problem.remedy
    assert recipe_problems(composed("hardware=h200_8", "hardware.mesh.fsdp=4", "mode=train")) == []
    (problem,) = recipe_problems(composed("hardware.platform=quantum"))
    assert problem.where == "hardware.platform"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chips", "4"), ("host_chips", "1"), ("hbm_gb", "3.0"), ("peak_tflops", "7.0"),
        ("hbm_gb_s", "9.0"), ("ici_gb_s", "2.0"), ("name", "other"),
    ],
)  # fmt: skip
def test_every_number_of_the_hardware_changes_the_plan(key: str, value: str):
    more = ["hardware.mesh.data=2"] if key != "chips" else ["hardware.mesh.data=4"]
    base = [*WIDE, "hardware.chips=2", "hardware.host_chips=2", "hardware.mesh.data=2"]
    assert planned(*base) != planned(*base, *more, f"hardware.{key}={value}")


def test_the_plans_own_settings_act():
    assert planned(*WIDE) != planned(*WIDE, "plan.prompt_tokens=64")
    assert compiler.missing(composed("plan.programs=[]")) == "plan.programs is empty"
    training, planning = composed("mode=train"), composed()
    for conf, section in ((PlanConf, "plan"), (HardwareConf, "hardware")):
        for name in conf.__dataclass_fields__:
            known = ("name", "mesh", "distributed")
            guard = hiding(training, f"{section}.{name}")
            assert (guard is None) == (section == "hardware" and name in known), name
            assert hiding(planning, f"{section}.{name}") is None


def test_a_machine_described_for_planning_is_no_news_in_training():
    cfg = composed("mode=train", "hardware=h200_1", "policy=random_tiny")
    assert recipe_problems(cfg) == [] and not any("hardware.chips" in n for n in notes(cfg))


def test_compile_timeout_and_failure_are_told(tmp_path: Path, monkeypatch):
    slow = compile_programs(composed(*WIDE, "plan.timeout_s=0.05"), tmp_path)
    assert slow.report == {} and "plan.timeout_s=0.05" in slow.why
    broken = composed(*WIDE)
    OmegaConf.update(broken, "policy.arch.hidden_size", 63)
    failed = compile_programs(broken, tmp_path)
    assert not failed.whole and "the compiler ended with 1" in failed.why
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    without = compile_programs(composed(*WIDE, "hardware=tpu_v5e_4"), tmp_path)
    assert "libtpu is not installed" in without.why
    assert "Not compiled: update: the package libtpu" in shown(planned(*WIDE, compiled=without))


def test_the_mode_counts_compiles_and_writes_the_plan(tmp_path: Path, capsys):
    run = tmp_path / "run"
    (run / ".hydra").mkdir(parents=True)
    job = Job(composed(*WIDE), run, ["+experiment=plan", *WIDE], TREE)
    with InterruptGuard() as guard:
        assert mode.plan(job, guard) == 0
    data = json.loads((run / "plan.json").read_text())
    text = capsys.readouterr().out
    assert data["compiled"]["for"] == "cpu" and data["compiled_not_run"] == ""
    assert data["fits"] and data["peak_by"] == "compiler" and "FITS" in text
    found = data["compiled"]["update"]
    assert found["donated"] and found["collectives"] == {} and found["gathers_logits"] == []
    # weights, both moments, gradients and what lies between are counted from shapes alone
    stays = data["memory"]["resident"]
    state = stays["weights"] + stays["optimizer"]
    assert found["state"] == pytest.approx(state, rel=0.01)
    counted = state + sum(data["memory"]["update"].values())
    assert 0.5 < counted / found["device_bytes"] < 2


def test_programs_on_a_mesh_send_no_logits_and_write_in_place(tmp_path: Path):
    mesh = "hardware.mesh={data:2,fsdp:2,tp:2}"
    words = [*WIDE, "hardware=h200_8", mesh, "plan.programs=[update]"]
    compiled = compile_programs(composed(*words), tmp_path)
    assert "update" in compiled.report, compiled.why
    update = compiled.report["update"]
    assert update["donated"] and update["gathers_logits"] == []
    assert update["collectives"]["all-gather"]["bytes"] > 0
    assert update["collectives"]["all-reduce"]["runs"] > 0
    assert compiled.report["cross_lowered"]["platform"] == "cuda"
    text = shown(planned(*words, compiled=compiled))
    assert "in place and gathers no logits" in text and "No GPU compiler was asked" in text


def test_what_does_not_fit_says_what_to_change():
    data = planned(*WIDE, "hardware.hbm_gb=0.002")
    assert not data["fits"] and data["peak_by"] == "count" and data["changes"]
    text = shown(data)
    assert "DOES NOT FIT" in text and "policy.compute_dtype=bfloat16" in text
    assert "FITS" in shown(planned(*WIDE))


def test_the_compiler_is_believed_before_the_count():
    conf = typed(composed(*WIDE, "hardware.hbm_gb=1.0"))
    case = case_of(conf, shape_of(conf.policy))
    programs = {name: {"device_bytes": 2e9} for name in ("update", "rollout")}
    found = verdict(case, Compiled({"for": "tpu", **programs}, "", 1.0))
    assert found.by == "compiler" and not found.fits and found.peak > 2e9
    assert verdict(case, Compiled({"for": "cuda", **programs}, "", 1.0)).by == "count"


def test_a_program_that_the_compiler_finds_no_room_for_does_not_fit():
    words = "RESOURCE_EXHAUSTED: Ran out of memory on HBM"
    refused = Compiled({"for": "tpu", "update_too_large": words}, f"update: {words}", 1.0)
    data = planned(*WIDE, compiled=refused)
    assert not data["fits"] and data["memory"]["counted_peak"] < data["limit_bytes"]
    assert "found no room" in shown(data) and words in shown(data)
    assert not any(one["fits"] for one in data["changes"] if one["peak_bytes"] > 8e9)


@pytest.mark.parametrize("name", PAPER)
def test_paper_recipes_compose_and_say_what_they_lack(name: str):
    cfg = compose_conf(TREE, [f"+experiment={name}"])
    assert cfg.experiment == name and cfg.policy.source == "hub"
    problems = {problem.where: problem for problem in preflight(cfg)}
    assert "domain.path" in problems
    if name == "paper/math_4b":
        assert "domain.name" not in problems
    else:
        assert "it needs a" in problems["domain.name"].what
    if "swe" in name:
        assert "judge model" in problems["reward.components"].what or any(
            "judge model" in problem.what for problem in preflight(cfg)
        )
    with pytest.raises(InputError):
        check(cfg)


@pytest.mark.parametrize("name", PAPER)
def test_paper_recipes_are_planned_without_what_they_lack(name: str):
    words = [f"+experiment={name}", "mode=plan", "hardware=tpu_v5p_64"]
    cfg = compose_conf(TREE, [*words, "sampling.max_new_tokens=256"])
    assert preflight(cfg) == []
    conf = typed(cfg)
    case = case_of(conf, shape_of(conf.policy))
    data = plan_data(conf.hardware.name, "x", case, NOT_RUN)
    assert data["policy"]["parameters"] > 3.5e9 and data["update"]["seconds"] > 0


def test_nested_experiments_are_offered_by_name():
    empty = OmegaConf.create({"experiment": "???"})
    (problem,) = missing_experiment(empty, [TREE])
    assert "paper/math_4b" in problem.remedy
