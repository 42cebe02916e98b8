"""The typed schema of the configuration: every key, its type and its default.

The dataclasses are registered in Hydra's ConfigStore and composed first, so an unknown key or a
wrong type is refused. ``evojax.preflight`` checks ranges and combinations, listing all problems.
Nothing here imports JAX: ``--cfg job`` and ``--help`` stay fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

MODES = ("evolve", "train", "evaluate", "diagnose", "backtest", "report", "lint", "plan")


@dataclass
class RopeScalingConf:
    """Rotary waves stretched for a longer context, as in Llama 3."""

    factor: float = 1.0  # 1 = off
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192  # tokens


@dataclass
class LinearConf:
    """Gated delta-net layers of a hybrid (``policy.arch.family=qwen3_5``)."""

    interval: int = 4  # every fourth layer attends fully
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 8
    value_dim: int = 8
    conv: int = 4  # places that the causal convolution looks at


@dataclass
class ArchConf:
    """Shape of a decoder: random weights, or what the hub's config.json must say."""

    family: str = "llama"  # llama | qwen2 | qwen3 | qwen3_5
    vocab_size: int = 256
    hidden_size: int = 32
    intermediate_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None  # null = hidden_size / num_heads
    rope_theta: float = 10000.0
    rope_scaling: RopeScalingConf = field(default_factory=RopeScalingConf)
    rotary_share: float = 1.0  # part of each head that is turned (qwen3_5)
    rms_eps: float = 1e-5
    max_position: int = 512
    tie_embeddings: bool = True
    linear: LinearConf = field(default_factory=LinearConf)


@dataclass
class LoraConf:
    """Low-rank adapters: the model's own weights stay as they are, bit for bit."""

    rank: int = 0  # 0 = off: every weight is trained
    alpha: float = 16.0  # the adapters' change is multiplied by alpha / rank
    targets: list[str] = field(  # matrices with an adapter; in all layers that have them
        default_factory=lambda: ["q", "k", "v", "o", "gate", "up", "down"]
    )


@dataclass
class PolicyConf:
    """The model that is trained. Frozen for the loop."""

    source: str = "smollm2_135m"  # smollm2_135m | path | hub | random
    path: str | None = None  # source=path: HF directory (safetensors), or a .gguf file
    compute_dtype: str = "float32"  # float32 | bfloat16; of products; weights stay float32
    arch: ArchConf = field(default_factory=ArchConf)
    remat: str = "none"  # none | dots | names | full; what the backward pass computes again
    repo: str | None = None  # source=hub: e.g. Qwen/Qwen3-0.6B
    revision: str | None = None  # source=hub: branch, tag or commit; null = main
    lora: LoraConf = field(default_factory=LoraConf)


@dataclass
class RolloutConf:
    """The engine that samples. Frozen for the loop."""

    engine: str = "embedded"
    max_batch: int = 64  # rows decoded together


@dataclass
class DomainConf:
    """Where problems come from and who grades them. Frozen for the loop."""

    name: str = "math"
    tasks: list[str] = field(default_factory=list)  # generator names; ignored when path is set
    path: str | None = None  # JSONL file instead of generators
    chat: bool = False  # JSONL only: render messages with the chat template
    train_items: int = 200  # per task, at most
    eval_items: int = 28  # per task
    audit_items: int = 24  # per task
    split_seed: int = 7
    grader_timeout_s: float = 5.0


@dataclass
class DataConf:
    """Which training items a step sees. Factor: data."""

    selection: str = "uniform"  # uniform | difficulty
    target_rate: float = 0.5  # difficulty: success rate that is preferred
    sharpness: float = 2.0  # difficulty: 0 = uniform


@dataclass
class SamplingConf:
    """How training rollouts are sampled. Factor: sampling."""

    temperature: float = 1.0
    group_size: int = 8
    max_new_tokens: int = 6


@dataclass
class RewardConf:
    """Reward components by registered name, with weights. Factor: reward."""

    components: dict[str, float] = field(default_factory=lambda: {"correct": 1.0})
    clip: float | None = None  # composed reward is cut to [-clip, clip]; null = not at all
    overlong_buffer: int = 0  # component overlong: tokens before the budget's end it rises over


@dataclass
class FilterConf:
    """What is left out of the update, and whether it is replaced. Factor: filter."""

    trajectory: list[str] = field(default_factory=list)  # rules that drop single rollouts, by name
    group: str = "none"  # none | absolute | ema_quantile | top_p_mass | uncertainty
    keep: float = 0.9  # ema_quantile: quantile; top_p_mass: mass; uncertainty: share of groups
    min_std: float = 0.01  # absolute: reward std below which a group goes
    ema_decay: float = 0.1  # ema_quantile: weight of new data in the running statistics
    ema_warmup: int = 20  # ema_quantile: groups seen before the quantile acts
    min_keep: float = 0.5  # ema_quantile: share of the live groups that always stays
    refill_rounds: int = 0  # dynamic sampling: extra draws to replace lost groups; 0 = off


@dataclass
class AlgorithmConf:
    """Objective and optimizer. Factor: algorithm."""

    advantage: str = "grpo"  # grpo | dr_grpo | rloo | batch_std | maxrl | gdpo
    dead_tolerance: float = 1e-6
    advantage_clip: float | None = None  # advantages are cut to [-clip, clip]; null = not at all
    objective: str = "clip"  # clip | gspo | cispo
    eps_low: float = 0.2  # not used by cispo, whose weights have no lower bound
    eps_high: float = 0.28
    dual_clip: float | None = None  # clip: bound c > 1 on the loss of negative advantages
    aggregation: str = "token_mean"  # or seq_mean_token_{mean, sum, sum_norm}
    old_logprobs: str = "rollout"  # rollout: the sampler's own; trainer: computed anew
    correction: str = "none"  # none | token_tis | sequence_tis | token_mask | geometric_mask
    correction_low: float = 0.5  # masks: lower bound of the ratio trainer / sampler
    correction_high: float = 2.0  # cap of the weight (tis), upper bound of the ratio (masks)
    kl_coef: float = 0.0  # weight of the KL loss to the weights the version started from
    kl_loss: str = "k2"  # k2 | k3_is
    kl_every: int = 8  # steps between KL measurements; with kl_coef > 0 every step has one
    entropy_coef: float = 0.0
    epochs: int = 1  # passes over one batch of rollouts
    minibatches: int = 1  # optimizer steps per pass; one step in all cannot clip
    optimizer: str = "adamw"  # adamw | adafactor | lion
    lr: float = 1e-5
    schedule: str = "constant"  # constant | linear | cosine; after the warm-up
    warmup_steps: int = 0  # optimizer steps of linear warm-up
    decay_steps: int = 100  # optimizer steps from lr down to lr * lr_floor
    lr_floor: float = 0.0  # share of lr that the decay ends at
    beta1: float = 0.9  # adamw, lion
    beta2: float = 0.95  # adamw, lion
    weight_decay: float = 0.0
    grad_clip: float = 1.0


@dataclass
class TrainConf:
    """Budget of one version. Frozen for the loop: arms must be comparable."""

    steps: int = 26  # updates of v001
    candidate_steps: int = 16  # updates of every arm of a later round
    prompts_per_step: int = 8
    micro_batch_groups: int = 2  # prompt groups per micro-batch
    checkpoint_every: int = 8
    shuffle_rewards: bool = False  # sanity control: rewards permuted within the batch
    max_nonfinite: int = 3  # consecutive skipped updates that stop the run


@dataclass
class EvalConf:
    """How versions are scored. Frozen for the loop."""

    samples: int = 8  # Avg@k
    temperature: float = 1.0
    max_new_tokens: int = 6
    seed: int = 42


@dataclass
class DiagnosticsConf:
    """Which metrics are computed, and the limits they run under. Factor: diagnostics."""

    metrics: list[str] = field(default_factory=list)  # names; empty = every metric of the domain
    timeout_s: float = 20.0
    memory_mb: int = 512


@dataclass
class BoundaryConf:
    """Config groups that the loop may change; everything else is frozen."""

    mutable: list[str] = field(
        default_factory=lambda: ["reward", "filter", "sampling", "data", "algorithm", "diagnostics"]
    )


@dataclass
class GateConf:
    """When a version is promoted."""

    alpha: float = 0.05
    resamples: int = 10_000
    min_delta: float = 0.0
    seed: int = 1234


@dataclass
class EvolutionConf:
    """The loop itself. Frozen for the loop."""

    rounds: int = 1
    candidates: int = 2
    proposer: str = "playbook"
    repo: str = "private"  # private = inside the run directory; or the path of a git checkout
    boundary: BoundaryConf = field(default_factory=BoundaryConf)
    gate: GateConf = field(default_factory=GateConf)
    min_backtest_gain: float = 0.0


@dataclass
class MeshConf:
    """Devices by axis; their product is the number that is used."""

    data: int = 1  # copies of the weights, each with its part of the batch
    fsdp: int = 1  # parts of the weights, gathered layer by layer; each has its part of the batch
    tp: int = 1  # parts of heads, inner width and vocabulary


@dataclass
class HardwareConf:
    """What the run is computed on. Not part of a version: a run may go on elsewhere."""

    name: str = "local"
    mesh: MeshConf = field(default_factory=MeshConf)
    distributed: bool = False  # several processes, found by jax.distributed
    platform: str = "cpu"  # cpu | tpu | cuda; this and the rest describe chips for mode=plan
    topology: str | None = None  # how TPU chips are joined, e.g. v5e:4x4
    chips: int = 1
    host_chips: int = 1  # chips of one process
    hbm_gb: float = 8.0  # memory of a chip
    peak_tflops: float = 0.2  # bfloat16, of a chip
    hbm_gb_s: float = 20.0  # memory traffic of a chip
    ici_gb_s: float = 10.0  # all links of a chip together, one direction


@dataclass
class PlanConf:
    """What mode=plan cannot read from the rest, and how far it goes."""

    prompt_tokens: int = 512  # length of every prompt
    programs: list[str] = field(default_factory=lambda: ["update", "rollout"])  # to compile
    timeout_s: float = 540.0  # for the compiler


@dataclass
class EvojaxConf:
    """Root of the configuration."""

    experiment: str = MISSING  # set by conf/experiment/*.yaml
    mode: str = "evolve"
    seed: int = 0
    resume: str | None = None  # run directory to go on with, or (other modes) to read
    output_root: str = "outputs"
    live: bool = True  # rich live view; plain lines when not a terminal
    version: str | None = None  # mode=train|evaluate|diagnose|backtest: which version
    policy: PolicyConf = field(default_factory=PolicyConf)
    rollout: RolloutConf = field(default_factory=RolloutConf)
    domain: DomainConf = field(default_factory=DomainConf)
    data: DataConf = field(default_factory=DataConf)
    sampling: SamplingConf = field(default_factory=SamplingConf)
    reward: RewardConf = field(default_factory=RewardConf)
    filter: FilterConf = field(default_factory=FilterConf)
    algorithm: AlgorithmConf = field(default_factory=AlgorithmConf)
    train: TrainConf = field(default_factory=TrainConf)
    eval: EvalConf = field(default_factory=EvalConf)
    diagnostics: DiagnosticsConf = field(default_factory=DiagnosticsConf)
    evolution: EvolutionConf = field(default_factory=EvolutionConf)
    hardware: HardwareConf = field(default_factory=HardwareConf)
    plan: PlanConf = field(default_factory=PlanConf)
