"""The evidence contract: three Parquet tables that hold all that is known of a version.

Every file carries its table's name and the schema version in its metadata, so evidence written
by another trainer can be read here as long as it keeps to this contract. Run
``python -m evojax.evidence.schema`` to print it as markdown.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 2
VERSION_KEY = b"evojax.schema_version"
TABLE_KEY = b"evojax.table"
EVIDENCE_DIR = "evidence"  # directory of the Parquet files inside a version's directory


@dataclass(frozen=True)
class Column:
    """One documented column."""

    name: str
    type: pa.DataType
    doc: str
    nullable: bool = False


_IDENTITY = (
    Column("run", pa.string(), "name of the run"),
    Column("version", pa.string(), "version that wrote the row, e.g. v002"),
)
_PLACE = (
    Column("split", pa.string(), "train, eval or audit"),
    Column("step", pa.int32(), "update index counted from the base policy"),
    Column("item", pa.string(), "id of the problem"),
    Column("group", pa.int32(), 'index of the group within the step; quote it in SQL: "group"'),
    Column("sample", pa.int32(), "index of the sample within its group"),
)
_NUMBERS = pa.map_(pa.string(), pa.float64())

ROLLOUTS = (
    *_IDENTITY,
    *_PLACE,
    Column("task", pa.string(), "family of the problem, e.g. gcd"),
    Column("seed", pa.uint64(), "seed of the group's random stream"),
    Column(
        "refill_round",
        pa.int32(),
        "0 = first draw; n = n-th draw, for groups that lacked a gradient",
    ),
    Column("policy_version", pa.string(), "version tag of the weights that sampled the tokens"),
    Column("token_ids", pa.list_(pa.int32()), "prompt ids, then the sampled ids"),
    Column("loss_mask", pa.list_(pa.int8()), "1 on the ids the policy wrote, as long as token_ids"),
    Column(
        "rollout_logprobs",
        pa.list_(pa.float32()),
        "log probability (nats) of each sampled id under the sampling distribution; "
        "response_tokens long",
    ),
    Column(
        "entropies",
        pa.list_(pa.float32()),
        "entropy (nats) of the sampling distribution at each sampled id; response_tokens long",
    ),
    Column("prompt_tokens", pa.int32(), "length of the prompt, tokens"),
    Column("response_tokens", pa.int32(), "length of the completion, tokens"),
    Column("stop_reason", pa.string(), "stop, length or abort, as the engine reported it"),
    Column("truncated", pa.bool_(), "the token budget ended a completion that had a stop rule"),
    Column("grade_status", pa.string(), "correct, wrong or unscorable"),
    Column("extracted", pa.string(), "answer read from the text, empty when none was found"),
    Column("grader_detail", pa.string(), "why, in the grader's words"),
    Column("reward", pa.float64(), "composed reward; null when unscorable", True),
    Column("advantage", pa.float64(), "group-normalised advantage; 0 outside training", True),
    Column("kept", pa.bool_(), "false when a filter left the trajectory out of the update"),
    Column("components", _NUMBERS, "each reward component by name, unweighted"),
    Column("features", _NUMBERS, "behaviour features by name"),
    Column("prompt", pa.string(), "the problem as text (messages as JSON when it is a chat)"),
    Column("text", pa.string(), "the decoded completion"),
    Column("answer", pa.string(), "the reference answer; never shown to the policy"),
)

TURNS = (
    *_IDENTITY,
    *_PLACE,
    Column("turn", pa.int32(), "index of the turn within the trajectory"),
    Column("role", pa.string(), "policy, tool or environment"),
    Column("tool", pa.string(), "name of the tool called", True),
    Column("arguments", pa.string(), "arguments of the call, JSON", True),
    Column("ok", pa.bool_(), "the call succeeded", True),
    Column("observation_bytes", pa.int64(), "size of what came back, bytes"),
    Column("response_tokens", pa.int32(), "tokens the policy wrote in this turn"),
    Column("mean_logprob", pa.float64(), "mean of the turn's rollout_logprobs, nats", True),
    Column("is_edit", pa.bool_(), "the turn changed a file"),
    Column("is_test", pa.bool_(), "the turn ran tests"),
    Column("is_search", pa.bool_(), "the turn searched or read files"),
    Column("is_git", pa.bool_(), "the turn used version control"),
)

UPDATES = (
    *_IDENTITY,
    Column("step", pa.int32(), "update index counted from the base policy"),
    Column("lr", pa.float64(), "learning rate of the step's last optimizer step", True),
    Column(
        "loss", pa.float64(), "the loss of algorithm.aggregation, with KL and entropy terms", True
    ),
    Column("grad_norm", pa.float64(), "global gradient norm before clipping", True),
    Column(
        "clip_high",
        pa.float64(),
        "share of tokens clipped above: A > 0, ratio > 1 + eps_high",
        True,
    ),
    Column(
        "clip_low", pa.float64(), "share of tokens clipped below: A < 0, ratio < 1 - eps_low", True
    ),
    Column("clip_dual", pa.float64(), "share of tokens that the dual clip bounds: A < 0", True),
    Column("entropy", pa.float64(), "mean entropy of the sampling distribution, nats", True),
    Column(
        "entropy_trainer",
        pa.float64(),
        "mean entropy under the trainer of what it packed, nats",
        True,
    ),
    Column("ratio_mean", pa.float64(), "mean probability ratio of a token", True),
    Column("ratio_max", pa.float64(), "largest probability ratio of a token", True),
    Column("mismatch_k1", pa.float64(), "k1 estimate of KL(rollout, trainer), nats", True),
    Column("mismatch_k3", pa.float64(), "k3 estimate of KL(rollout, trainer), nats", True),
    Column("mismatch_max", pa.float64(), "largest log-probability difference, nats", True),
    Column(
        "ess", pa.float64(), "effective sample size of trainer / sampler weights over tokens", True
    ),
    Column("correction_kept", pa.float64(), "share of tokens that the correction kept", True),
    Column(
        "correction_truncated",
        pa.float64(),
        "share of tokens the correction capped or masked",
        True,
    ),
    Column(
        "kl_k1",
        pa.float64(),
        "k1 estimate of KL(policy, start weights), nats; null = not measured",
        True,
    ),
    Column(
        "kl_k3",
        pa.float64(),
        "k3 estimate of KL(policy, start weights), nats; null = not measured",
        True,
    ),
    Column("tokens", pa.int64(), "response tokens sampled for the step", True),
    Column("useful_tokens", pa.int64(), "those of sequences with an advantage that is not 0", True),
    Column(
        "tokens_sequences", pa.int64(), "prompt and response tokens of the packed sequences", True
    ),
    Column("tokens_packed", pa.int64(), "of these after shared prefixes are merged", True),
    Column(
        "tokens_padded", pa.int64(), "tokens_packed and padding: what the update computed", True
    ),
    Column("groups", pa.int32(), "groups that the loss counts", True),
    Column("live_groups", pa.int32(), "drawn groups with unequal rewards", True),
    Column("dead_groups", pa.int32(), "drawn groups whose rewards are all equal", True),
    Column("drawn_groups", pa.int32(), "groups sampled, refills included", True),
    Column("groups_filtered", pa.int32(), "live groups that the group filter took", True),
    Column("filter_emptied", pa.bool_(), "the group filter took every live group", True),
    Column(
        "filter_threshold",
        pa.float64(),
        "reward std the filter asked for; null = it has none",
        True,
    ),
    Column("trajectories_filtered", pa.int32(), "rollouts that a trajectory rule took", True),
    Column("shortfall", pa.int32(), "prompts asked for less groups that carry a gradient", True),
    Column("optimizer_steps", pa.int32(), "optimizer steps that changed the weights", True),
    Column("skipped", pa.bool_(), "an optimizer step's gradient was not finite; it was left out"),
    Column("skipped_steps", pa.int32(), "how many of the step's optimizer steps that was", True),
    Column(
        "nonfinite_consecutive",
        pa.int32(),
        "skipped steps in a row, the longest run of the step",
        True,
    ),
    Column("no_signal", pa.int8(), "1 when no group was live, so that nothing was updated", True),
    Column("rollout_s", pa.float64(), "seconds spent sampling", True),
    Column(
        "reward_s", pa.float64(), "seconds spent on grading, rewards, advantages, filters", True
    ),
    Column("update_s", pa.float64(), "seconds spent in the update, packing included", True),
    Column("sync_s", pa.float64(), "seconds spent handing the weights to the engine", True),
    Column(
        "checkpoint_s", pa.float64(), "seconds spent saving after this step; 0 = not saved", True
    ),
    Column(
        "peak_rss_mb", pa.float64(), "most memory the process has held so far, 10^6 bytes", True
    ),
    Column("reward_mean", pa.float64(), "mean reward of the scored rollouts", True),
    Column("policy_version", pa.string(), "version tag of the weights before the update", True),
    Column(
        "policy_age_mean", pa.float64(), "updates between sampling and this one, token mean", True
    ),
    Column("policy_age_max", pa.float64(), "updates between sampling and this one, most", True),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "rollouts": ROLLOUTS,
    "turns": TURNS,
    "updates": UPDATES,
}


def schema(table: str) -> pa.Schema:
    """Arrow schema of ``table``, its name and the schema version in the metadata.

    >>> schema("updates").field("loss").type
    DataType(double)
    """
    fields = [pa.field(c.name, c.type, nullable=c.nullable) for c in TABLES[table]]
    metadata = {VERSION_KEY: str(SCHEMA_VERSION).encode(), TABLE_KEY: table.encode()}
    return pa.schema(fields, metadata=metadata)


def describe() -> str:
    """The contract as markdown: one table per Parquet table."""
    parts = [f"# Evidence, schema version {SCHEMA_VERSION}\n"]
    for table, columns in TABLES.items():
        parts.append(f"## {table}\n\n| column | type | null | meaning |\n|---|---|---|---|")
        for c in columns:
            null = "yes" if c.nullable else "no"
            parts.append(f"| `{c.name}` | {c.type} | {null} | {c.doc} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    print(describe())
