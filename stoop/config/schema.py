"""The frozen groups of the configuration. Each part of the engine gets the slice that it needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

DEFAULT_MODEL = "smollm2-135m"  # it ships with stoop
DTYPES = ("float64", "float32", "bfloat16", "float16")

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]


@dataclass(frozen=True)
class RopeSpec:
    """How positions turn into rotations; `kind` says which of the other fields count."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # yarn: scales cos and sin
    truncate: bool = True
    factors: tuple[float, ...] = ()  # explicit divisors of the inverse frequencies


@dataclass(frozen=True)
class ModelSpec:
    """A dense decoder of the Llama family, with every convention spelled out."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeSpec
    dtype: str  # of the checkpoint
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # [num_layers] sliding window, None for full attention
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_params(self) -> int:
        """Parameters of the matrices; norms and biases are too few to count."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings


DraftMethod = Literal["eagle", "eagle3"]
# How a head picks its drafts: the likeliest tokens; with the noise that will draw the target's, so
# that like distributions pick the same; or with noise of its own, which takes a ratio test.
DraftSampleMethod = Literal["greedy", "coupled", "probabilistic"]


@dataclass(frozen=True)
class HeadSpec:
    """An EAGLE draft head, with every convention spelled out.

    Slot i of a head takes the target's feature of position i and the embedding of token i + 1, and
    predicts token i + 2.
    """

    method: DraftMethod
    decoder: ModelSpec  # of its layers; vocab_size is that of its drafts
    target_hidden_size: int
    target_vocab_size: int
    # The target's residual stream as it enters these layers (the number of layers: as it leaves
    # the last one), in this order. None for EAGLE-1, whose feature is the normalised last state.
    taps: tuple[int, ...] = ()
    fc_bias: bool = False
    norm_before_fc: bool = False  # one norm over all taps together
    fc_norms: bool = False  # a norm for each tap
    norm_before_residual: bool = False  # the residual stream starts from the normalised feature
    norm_output: bool = False  # the next draft gets the normalised output as its feature
    own_embedding: bool = False  # else the target's
    own_lm_head: bool = True  # else the target's
    maps_vocabulary: bool = False  # drafts are numbered apart: `d2t` has the offsets


@dataclass(frozen=True)
class SpecConfig:
    """Speculative decoding, settled."""

    method: Literal["eagle", "eagle3", "ngram"]
    num_tokens: int  # K, drafts of a step
    folder: str | None = None  # of the head
    head: HeadSpec | None = None
    draft_sample_method: DraftSampleMethod = "greedy"
    # Benchmarks only: draft j is accepted with this chance, whatever it is, if those before were.
    synthetic_rates: tuple[float, ...] | None = None
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 5


@dataclass(frozen=True)
class LoadConfig:
    folder: str
    dummy: bool = False  # random weights, none read
    seed: int = 0  # of dummy weights


@dataclass(frozen=True)
class DeviceConfig:
    device: str
    dtype: str


@dataclass(frozen=True)
class CacheConfig:
    block_size: int = 16
    num_blocks: int | None = None  # exact, null block included; for tests and experts
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None  # bytes
    enable_prefix_caching: bool = True


@dataclass(frozen=True)
class ScheduleConfig:
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    num_drafts: int = 0  # K
    drafter_has_kv: bool = False  # in the same blocks as the target's
    run_ahead: int = 0  # steps under way beside the one whose result is awaited

    @property
    def query_len(self) -> int:
        """Query tokens of a decoding request: its newest token and K places for drafts."""
        return self.num_drafts + 1

    @property
    def num_lookahead(self) -> int:
        """Tokens behind a step's own for which the drafter writes KV."""
        return self.num_drafts - 1 if self.drafter_has_kv else 0


@dataclass(frozen=True)
class GraphConfig:
    mode: str = "none"
    capture_sizes: tuple[int, ...] | None = None  # None: the defaults
    sanitize: bool = False


@dataclass(frozen=True)
class Config:
    model: ModelSpec
    load: LoadConfig
    device: DeviceConfig
    cache: CacheConfig
    schedule: ScheduleConfig
    attention_backend: str = "reference"
    graph: GraphConfig = GraphConfig()
    spec: SpecConfig | None = None
    draft_note: str = ""  # why drafts were chosen, or not, where nobody said so

    @property
    def head(self) -> HeadSpec | None:
        return self.spec.head if self.spec else None


@dataclass(frozen=True)
class EngineOptions:
    """What a user may say when an engine is made. `resolve` turns it into a `Config`."""

    model: str = field(
        default=DEFAULT_MODEL,
        metadata={"help": "an embedded name, a folder, a GGUF file or a hub id"},
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "folder of a different tokenizer; default: the model's own"}
    )
    revision: str | None = field(
        default=None, metadata={"help": "branch, tag or commit of a model on the Hugging Face hub"}
    )
    skip_tokenizer_init: bool = field(
        default=False, metadata={"help": "take and return token ids only, no text"}
    )
    load_format: str = field(
        default="auto",
        metadata={"help": "auto, or dummy for random weights (needs only a config.json)"},
    )
    seed: int = field(
        default=0, metadata={"help": "random seed of dummy weights and of requests without a seed"}
    )
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda or cuda:N"})
    dtype: str = field(
        default="auto", metadata={"help": "auto, float64, float32, bfloat16 or float16"}
    )
    max_model_len: int | None = field(
        default=None,
        metadata={"help": "maximum length of prompt plus answer; default: the model's"},
    )
    max_num_seqs: int | None = field(
        default=None,
        metadata={"help": "maximum requests per step; default: 16 on a CPU, 256 on a GPU"},
    )
    max_num_batched_tokens: int | None = field(
        default=None,
        metadata={"help": "maximum tokens per step; default: 2048 on a CPU, 8192 on a GPU"},
    )
    enable_chunked_prefill: bool = field(
        default=True,
        metadata={"help": "split long prompts into chunks that share steps with other requests"},
    )
    enable_prefix_caching: bool = field(
        default=True, metadata={"help": "reuse the KV blocks of a prefix seen before"}
    )
    block_size: int = field(default=16, metadata={"help": "tokens per KV block"})
    num_kv_blocks: int | None = field(
        default=None, metadata={"help": "exact number of KV blocks, including the null block"}
    )
    gpu_memory_utilization: float = field(
        default=0.9, metadata={"help": "fraction of memory for weights, KV cache and work space"}
    )
    kv_cache_memory: int | str | None = field(
        default=None,
        metadata={"help": "size of the KV cache, such as 2GiB; overrides the fraction"},
    )
    attention_backend: str = field(
        default="auto",
        metadata={
            "help": "auto (triton on CUDA, reference elsewhere), triton, reference, flashinfer "
            "(needs pip install 'stoop[flashinfer]') or hostplan (for testing graphs)"
        },
    )
    graph_mode: str = field(
        default="auto",
        metadata={
            "help": "auto (step on CUDA, none elsewhere), none, piecewise, full, "
            "full_decode_only, full_and_piecewise or step"
        },
    )
    run_ahead: int | None = field(
        default=None,
        metadata={
            "help": "steps to launch ahead of the one whose result is read; default: 1 on CUDA, "
            "0 elsewhere"
        },
    )
    speculative_config: str | Mapping[str, Any] | None = field(
        default="auto",
        metadata={
            "help": "speculative decoding: auto (the draft head that comes with the model, if "
            "there is one and it is faster here), none, or JSON with method (eagle, eagle3 or "
            "ngram), model and num_speculative_tokens"
        },
    )
    capture_sizes: str | Sequence[int] | None = field(
        default=None,
        metadata={
            "help": "batch sizes to capture graphs for, such as 1,2,4,8 (in requests for decode "
            "batches, in tokens for others)"
        },
    )
    sanitize: bool = field(
        default=False,
        metadata={"help": "check every graph replay for stale reads and against eager steps; slow"},
    )
