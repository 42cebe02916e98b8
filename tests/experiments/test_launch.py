"""Launchers: the printed commands, word for word, and what happens after an interruption."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from evojax.overrides import group_options
from evojax.paths import conf_dir
from experiments.launch import jobset, keep_going, shell, slurm, tpu_vm

ROOT = Path(__file__).resolve().parents[2]
PLACE = ["--name", "evojax", "--zone", "europe-west4-b", "--project", "lab"]
TPUS = [name for name in group_options("hardware", [conf_dir()]) if name.startswith("tpu_")]


def printed(capsys: pytest.CaptureFixture[str], main, *words: str) -> list[str]:
    assert main(list(words)) == 0
    return capsys.readouterr().out.splitlines()


def test_a_slice_is_created_and_given_back(capsys):
    words = ["create", *PLACE, "--hardware", "tpu_v5e_16", "--spot", "--dry-run"]
    assert printed(capsys, tpu_vm.main, *words) == [
        "gcloud compute tpus tpu-vm create evojax --zone europe-west4-b --project lab "
        "--accelerator-type v5litepod-16 --version v2-alpha-tpuv5-lite --spot"
    ]
    assert printed(capsys, tpu_vm.main, "delete", *PLACE) == [
        "gcloud compute tpus tpu-vm delete evojax --zone europe-west4-b --project lab --quiet"
    ]


def test_a_queued_slice(capsys):
    assert printed(capsys, tpu_vm.main, "queue", *PLACE, "--hardware", "tpu_v6e_16") == [
        "gcloud compute tpus queued-resources create evojax --node-id evojax "
        "--zone europe-west4-b --project lab --accelerator-type v6e-16 "
        "--runtime-version v2-alpha-tpuv6e --valid-until-duration 6h",
        "gcloud compute tpus queued-resources describe evojax --zone europe-west4-b --project lab",
    ]
    assert printed(capsys, tpu_vm.main, "delete", *PLACE, "--queued") == [
        "gcloud compute tpus queued-resources delete evojax --zone europe-west4-b --project lab "
        "--force --quiet"
    ]


def test_every_host_runs_the_same_detached_line(capsys):
    words = ["run", *PLACE, "--hardware", "tpu_v5e_16", "--run-dir", "/runs/a b"]
    (line,) = printed(capsys, tpu_vm.main, *words, "+experiment=math", "reward.components={a: 1}")
    remote = shlex.split(line)
    assert remote[:9] == shlex.split("gcloud compute tpus tpu-vm ssh evojax --zone") + [
        "europe-west4-b",
        "--project",
    ]
    assert "--worker=all" in remote
    script = remote[-1].removeprefix("--command=")
    assert script.startswith("cd evojax && nohup setsid .venv/bin/python -m experiments.launch")
    inner = shlex.split(script.partition("setsid ")[2].partition(" > evojax.log")[0])
    assert inner[inner.index("--run-dir") + 1] == "/runs/a b"
    assert inner[inner.index("--") + 1 :] == [
        ".venv/bin/python", "-m", "evojax.main", "+experiment=math", "reward.components={a: 1}",
        "hardware.distributed=true", "hardware=tpu_v5e_16",
    ]  # fmt: skip


def test_setup_installs_the_lock_file_at_one_commit(capsys):
    words = ["setup", *PLACE, "--repo", "https://host/a b.git", "--commit", "abc123"]
    (line,) = printed(capsys, tpu_vm.main, *words)
    script = shlex.split(line)[-1]
    assert "git clone --quiet 'https://host/a b.git' evojax" in script
    assert "git checkout --quiet abc123" in script
    assert "--require-hashes -r requirements.lock" in script and "'.[tpu]'" in script
    assert script.count(" && ") == 7


def test_the_log_is_that_of_the_first_host(capsys):
    (line,) = printed(capsys, tpu_vm.main, "log", *PLACE)
    assert "--worker=0" in line


@pytest.mark.parametrize("hardware", TPUS)
def test_every_tpu_preset_has_an_accelerator_and_a_node_pool(capsys, hardware: str):
    kind, version = tpu_vm.accelerator(hardware)
    assert kind.rpartition("-")[2] == hardware.rpartition("_")[2] and version.startswith("v2")
    words = ["--name", "one", "--hardware", hardware, "--image", "i", "--run-dir", "/runs/one"]
    lines = printed(capsys, jobset.main, "apply", *words, "--volume-claim", "c", "seed=1")
    found = yaml.safe_load("\n".join(lines[1:-1]))
    preset = yaml.safe_load((conf_dir() / "hardware" / f"{hardware}.yaml").read_text())
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    limit = pod["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert job["parallelism"] * limit == preset["chips"]
    layout = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert preset["topology"].endswith(f":{layout}")


def test_a_jobset_ends_on_a_wrong_configuration_and_restarts_otherwise(capsys):
    words = ["--name", "one", "--hardware", "tpu_v5e_16", "--image", "i", "--run-dir", "/runs/one"]
    lines = printed(capsys, jobset.main, "apply", *words, "--volume-claim", "c", "seed=1")
    assert lines[0] == "kubectl apply --namespace default -f - <<'END_OF_INPUT'"
    assert lines[-1] == "END_OF_INPUT"
    spec = yaml.safe_load("\n".join(lines[1:-1]))["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 10
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [1, 2] and job["parallelism"] == 4
    container = job["template"]["spec"]["containers"][0]
    assert container["command"][-3:] == ["seed=1", "hardware.distributed=true",
                                         "hardware=tpu_v5e_16"]  # fmt: skip


def test_xpk_gets_one_quoted_command(capsys):
    words = ["--name", "one", "--hardware", "tpu_v5p_8", "--image", "i", "--run-dir", "/runs/one"]
    (line,) = printed(capsys, jobset.main, "xpk", *words, "--cluster", "c", "+experiment=math")
    split = shlex.split(line)
    assert split[split.index("--tpu-type") + 1] == "v5p-8"
    assert shlex.split(split[-1])[-1] == "hardware=tpu_v5p_8"
    assert printed(capsys, jobset.main, "delete", "--name", "one") == [
        "kubectl delete jobset one --namespace default"
    ]


def test_a_slurm_job_is_queued_again_after_a_preemption(capsys):
    words = ["job", "--hardware", "h200_8", "--gpus", "8", "--nodes", "2", "--run-dir", "/s/one"]
    lines = printed(capsys, slurm.main, *words, "--partition", "gpu", "+experiment=math")
    assert lines[0] == "sbatch <<'END_OF_INPUT'"
    assert "#SBATCH --nodes=2" in lines and "#SBATCH --requeue" in lines
    assert "#SBATCH --partition=gpu" in lines and "#SBATCH --signal=B:TERM@300" in lines
    (step,) = [line for line in lines if line.startswith("srun")]
    assert step.endswith(
        "-- python -m evojax.main +experiment=math hardware.distributed=true hardware=h200_8 &"
    )
    assert any(line.strip().startswith("3|130|137|143) scontrol requeue") for line in lines)
    checked = subprocess.run(
        ["bash", "-n"], input="\n".join(lines[1:-1]), text=True, check=False, capture_output=True
    )
    assert checked.returncode == 0, checked.stderr


def test_a_slurm_sweep_is_a_multirun(capsys):
    words = ["sweep", "--hardware", "h200_1", "--gpus", "1", "--time", "02:30:00"]
    assert printed(capsys, slurm.main, *words, "+experiment=math", "seed=0,1") == [
        "python -m evojax.main -m +experiment=math seed=0,1 hardware=h200_1 "
        "hydra/launcher=submitit_slurm hydra.launcher.name=evojax hydra.launcher.gpus_per_node=1 "
        "hydra.launcher.cpus_per_task=16 hydra.launcher.timeout_min=150"
    ]


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (tpu_vm.main, ["create", *PLACE, "--hardware", "h200_8"]),
        (tpu_vm.main, ["delete", "--name", "a;b", "--zone", "z", "--project", "p"]),
        (slurm.main, ["job", "--hardware", "h200_8", "--gpus", "8", "seed=1"]),
        (slurm.main, ["sweep", "--hardware", "h", "--gpus", "1", "--time", "soon", "seed=1"]),
        (keep_going.main, ["--run-dir", "d", "--", "true"]),
    ],
)
def test_wrong_arguments_are_refused(main, words: list[str], capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2 and capsys.readouterr().err


def test_execute_runs_the_commands_and_stops_at_the_first_failure(capfd):
    ok, bad = shell.command("true"), shell.command("false")
    assert shell.carry_out([ok, bad, ok], execute=True) == 1
    assert capfd.readouterr().out.splitlines() == ["true", "false"]
    assert shell.carry_out([shell.command("no-such-program-here")], execute=True) == 3
    assert shell.carry_out([shell.command("cat", text="given")], execute=True) == 0
    assert "given" in capfd.readouterr().out


FAKE = """
import json, os, signal, sys, time
directory, args = {directory!r}, sys.argv[1:]
state = os.path.join(directory, "starts.json")
starts = json.load(open(state)) if os.path.exists(state) else []
starts.append(args)
os.makedirs(directory, exist_ok=True)
json.dump(starts, open(state, "w"))
open(os.path.join(directory, "run.json"), "w").write("{{}}")
codes = {codes!r}
if codes[len(starts) - 1] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    print("waiting", flush=True)
    time.sleep(60)
if codes[len(starts) - 1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(codes[len(starts) - 1])
"""


def fake(tmp_path: Path, codes: list[int | str]) -> tuple[Path, list[str]]:
    """A program that ends with the given codes, one a start, and what to run it by."""
    run_dir, package = tmp_path / "run", tmp_path / "code" / "evojax"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "main.py").write_text(FAKE.format(directory=str(run_dir), codes=codes))
    keeper = (ROOT / "experiments" / "launch" / "keep_going.py").as_posix()
    words = [sys.executable, keeper, "--run-dir", str(run_dir), "--wait", "0.01", "--"]
    return run_dir, [*words, sys.executable, "-m", "evojax.main", "+experiment=math"]


def kept(tmp_path: Path, codes: list[int | str], *more: str) -> tuple[int, list[list[str]]]:
    run_dir, words = fake(tmp_path, codes)
    words = [*words[:2], *more, *words[2:]]
    done = subprocess.run(words, cwd=tmp_path / "code", timeout=60, check=False)
    return done.returncode, json.loads((run_dir / "starts.json").read_text())


def test_interruption_outage_and_kill_are_resumed_until_the_run_is_done(tmp_path: Path):
    code, starts = kept(tmp_path, [130, 3, "killed", 0])
    run = tmp_path / "run"
    assert code == 0
    assert starts == [["+experiment=math", f"hydra.run.dir={run}"], *[[f"resume={run}"]] * 3]


@pytest.mark.parametrize("final", [1, 2])
def test_a_fault_of_the_configuration_is_final(tmp_path: Path, final: int):
    code, starts = kept(tmp_path, [final, 0])
    assert (code, len(starts)) == (final, 1)


def test_retries_are_bounded(tmp_path: Path):
    code, starts = kept(tmp_path, [3, 3, 3, 0], "--retries", "2")
    assert (code, len(starts)) == (3, 3)


def test_a_preempted_machine_repeats_the_line_and_the_run_is_resumed(tmp_path: Path):
    run_dir, words = fake(tmp_path, ["wait", 0])
    first = subprocess.Popen(words, cwd=tmp_path / "code", stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == "waiting\n"
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=30) == 130
    assert subprocess.run(words, cwd=tmp_path / "code", timeout=30, check=False).returncode == 0
    starts = json.loads((run_dir / "starts.json").read_text())
    assert starts[1] == [f"resume={run_dir}"]
