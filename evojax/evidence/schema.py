"""The evidence contract: three Parquet tables that hold all that is known of a version.

Every file carries its table's name and the schema version in its metadata, so evidence written
by another trainer can be read here as long as it keeps to this contract. Run
``python -m evojax.evidence.schema`` to print it as markdown.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 1
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
    Column("refill_round", pa.int32(), "0 = first draw; n = n-th draw that replaced dead groups"),
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
    Column("reward", pa.float64(), "composed reward; null when unscorable or filtered", True),
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
    Column("lr", pa.float64(), "learning rate", True),
    Column("loss", pa.float64(), "objective, mean over the batch's response tokens", True),
    Column("grad_norm", pa.float64(), "global gradient norm before clipping", True),
    Column("clip_high", pa.float64(), "share of tokens clipped at 1 + eps_high", True),
    Column("clip_low", pa.float64(), "share of tokens clipped at 1 - eps_low", True),
    Column("entropy", pa.float64(), "mean entropy of the sampling distribution, nats", True),
    Column("ratio_mean", pa.float64(), "mean probability ratio of a token", True),
    Column("ratio_max", pa.float64(), "largest probability ratio of a token", True),
    Column("mismatch_k1", pa.float64(), "k1 estimate of KL(rollout, trainer), nats", True),
    Column("mismatch_k3", pa.float64(), "k3 estimate of KL(rollout, trainer), nats", True),
    Column("mismatch_max", pa.float64(), "largest log-probability difference, nats", True),
    Column("tokens", pa.int64(), "response tokens sampled for the step", True),
    Column("groups", pa.int32(), "groups that the loss counts", True),
    Column("live_groups", pa.int32(), "drawn groups with unequal rewards", True),
    Column("dead_groups", pa.int32(), "drawn groups whose rewards are all equal", True),
    Column("drawn_groups", pa.int32(), "groups sampled, refills included", True),
    Column("skipped", pa.bool_(), "the gradient was not finite and the weights were left alone"),
    Column(
        "nonfinite_consecutive", pa.int32(), "skipped updates in a row, this one included", True
    ),
    Column("no_signal", pa.int8(), "1 when no group was live, so that nothing was updated", True),
    Column("rollout_s", pa.float64(), "seconds spent sampling and grading", True),
    Column("update_s", pa.float64(), "seconds spent in the update", True),
    Column("reward_mean", pa.float64(), "mean reward of the scored rollouts", True),
    Column("policy_version", pa.string(), "version tag of the weights before the update", True),
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
