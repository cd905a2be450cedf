"""The frozen groups of the configuration. Each part of the engine gets the slice that it needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

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


@dataclass(frozen=True)
class EngineOptions:
    """What a user may say when an engine is made. `resolve` turns it into a `Config`."""

    model: str = field(
        default="smollm2-135m",
        metadata={"help": "an embedded name, a folder, a GGUF file or a hub id"},
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "folder of another tokenizer; default: the model's own"}
    )
    revision: str | None = field(default=None, metadata={"help": "hub revision of the model"})
    skip_tokenizer_init: bool = field(
        default=False, metadata={"help": "token ids in, token ids out; no text"}
    )
    load_format: str = field(
        default="auto", metadata={"help": "auto, or dummy: random weights from the config alone"}
    )
    seed: int = field(default=0, metadata={"help": "of dummy weights and of unseeded requests"})
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda or cuda:N"})
    dtype: str = field(
        default="auto", metadata={"help": "auto, float64, float32, bfloat16 or float16"}
    )
    max_model_len: int | None = field(
        default=None, metadata={"help": "longest prompt plus answer; default: the model's"}
    )
    max_num_seqs: int | None = field(
        default=None, metadata={"help": "requests in one step; default: 16 on a CPU, 256 on a GPU"}
    )
    max_num_batched_tokens: int | None = field(
        default=None, metadata={"help": "tokens in one step; default: 2048"}
    )
    enable_chunked_prefill: bool = field(
        default=True, metadata={"help": "cut long prompts into chunks that share steps"}
    )
    enable_prefix_caching: bool = field(
        default=True, metadata={"help": "reuse the KV blocks of a prefix seen before"}
    )
    block_size: int = field(default=16, metadata={"help": "tokens of one KV block"})
    num_kv_blocks: int | None = field(
        default=None, metadata={"help": "exact number of KV blocks, the null block included"}
    )
    gpu_memory_utilization: float = field(
        default=0.9, metadata={"help": "share of memory that weights, KV and work space may take"}
    )
    kv_cache_memory: int | str | None = field(
        default=None, metadata={"help": "bytes of the KV cache, such as 2GiB; overrides the share"}
    )
    attention_backend: str = field(
        default="reference",
        metadata={"help": "reference, or hostplan: planned on the host, for testing graphs"},
    )
    graph_mode: str = field(
        default="none",
        metadata={"help": "none, piecewise, full, full_decode_only, full_and_piecewise or step"},
    )
    capture_sizes: str | Sequence[int] | None = field(
        default=None,
        metadata={"help": "sizes of batches to capture graphs for, such as 1,2,4,8"},
    )
    sanitize: bool = field(
        default=False,
        metadata={"help": "check every graph replay for stale reads and against eager; slow"},
    )
