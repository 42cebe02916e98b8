"""The peer's side: trl.GRPOTrainer on the CPU, one JSON line a step. It never imports evojax.

    <peer python> experiments/throughput/peer.py job.json

The job (see ``job.py``) names the model directory, the items, the shape and the settings. What
makes it fast here, and is switched on: no gradient checkpointing, the language-model head on valid
positions only (TRL scores all of them on a CPU), and glibc keeping its freed memory (set by the
caller's environment).
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "trl", "datasets", "accelerate", "numpy")


def alternating(samples: int, total: int) -> list[float]:
    """Rewards by place in the group, 1 0 1 0 ...: every group is live, whatever was sampled.

    >>> alternating(4, 8)
    [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    """
    return [float(i % samples % 2 == 0) for i in range(total)]


def exact(texts: list[str], answers: list[str], stop: str = "\n") -> list[float]:
    """1 where the text up to the first ``stop``, without outer blanks, is the answer.

    >>> exact([" 7\\n3", "07"], ["7", "7"])
    [1.0, 0.0]
    """
    pairs = zip(texts, answers, strict=True)
    return [float(text.split(stop)[0].strip() == answer) for text, answer in pairs]


def live_share(rewards: list[float], samples: int) -> float:
    """Share of the groups whose rewards differ.

    >>> live_share([1.0, 0.0, 1.0, 1.0], 2)
    0.5
    """
    groups = [rewards[i : i + samples] for i in range(0, len(rewards), samples)]
    return sum(len(set(group)) > 1 for group in groups) / len(groups)


def settings(job: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``trl.GRPOConfig``: the recipe of the other side, on the same items in order."""
    sequences = job["prompts"] * job["samples"]
    if sequences % job["micro"]:
        raise ValueError(f"micro {job['micro']} does not divide {sequences} sequences")
    return {
        "use_cpu": True,
        "bf16": job["dtype"] == "bf16",
        "fp16": False,
        "seed": job["seed"],
        "max_steps": job["steps"],
        "per_device_train_batch_size": job["micro"],
        "gradient_accumulation_steps": sequences // job["micro"],
        "num_generations": job["samples"],
        "max_completion_length": job["new"],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "num_iterations": 1,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "learning_rate": job["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "generation_kwargs": {"min_new_tokens": job["new"]} if job["forced"] else None,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def say(row: dict[str, Any]) -> None:
    """One JSON line, at once."""
    print(json.dumps(row), flush=True)


def run(job: dict[str, Any], output: Path) -> None:
    """Train ``steps`` steps and print one line for each, then one for the process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import trl.trainer.utils as trainer_utils
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    trainer_utils._use_triton = lambda device: True  # the switch for "valid positions only"
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    model.generation_config.eos_token_id = list(job["stop_ids"])  # GRPOTrainer reads it here
    seen: dict[str, float] = {}

    def reward(completions: list[str], answer: list[str], **rest: Any) -> list[float]:
        began = time.perf_counter()
        natural = exact(completions, answer)
        live = alternating(job["samples"], len(natural))
        chosen = live if job["reward"] == "live" else natural
        seen["live_share"] = live_share(chosen, job["samples"])
        seen["natural_live_share"] = live_share(natural, job["samples"])
        seen["response_tokens"] = float(sum(len(ids) for ids in rest["completion_ids"]))
        seen["reward_s"] = time.perf_counter() - began
        return chosen

    class Timed(GRPOTrainer):
        """Adds the seconds of a step's generation, scoring included."""

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = super()._generate_and_score_completions(*args, **kwargs)
            seen["rollout_s"] = seen.get("rollout_s", 0.0) + time.perf_counter() - began
            return result

    class Lines(TrainerCallback):
        """Prints the step's line once it is over."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            seen.clear()
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
            seconds = time.perf_counter() - self.began
            update = seconds - seen["rollout_s"]
            say({"step": state.global_step - 1, "step_s": seconds, "update_s": update, **seen})

    config = GRPOConfig(output_dir=str(output), **settings(job))
    trainer = Timed(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(job["items"]),
        processing_class=tokenizer,
        callbacks=[Lines()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    say(
        {
            "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
            "threads": torch.get_num_threads(),
            "versions": {name: version(name) for name in PACKAGES},
        }
    )


if __name__ == "__main__":
    path = Path(sys.argv[1])
    run(json.loads(path.read_text()), path.parent / "trl")
