"""The frozen groups of the configuration. Each part of the engine gets the slice that it needs."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

DEFAULT_MODEL = "smollm2-135m"  # it ships with stoop
# The largest batch that graphs are captured for, in tokens, unless users say otherwise
CAPTURE_SIZE = 512
GPU_CAPTURE_SIZE = 1024  # for many requests with drafts, joined by new prompts
DTYPES = ("float64", "float32", "bfloat16", "float16")
FP8 = "float8_e4m3fn"  # for the KV cache only


def dtype_label(dtype: str) -> str:
    """The name that users give."""
    return "fp8" if dtype == FP8 else dtype


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What the engine and the scheduler need to know of a model; a family's own spec extends it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    dtype: str  # of the checkpoint
    num_mtp_layers: int = 0  # layers of its own MTP head, as config.json has it
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


DraftMethod = Literal["eagle", "eagle3", "mtp"]
# How a head picks its drafts: greedy takes the most likely tokens; coupled samples with the noise
# that will draw the target's tokens, so that similar distributions pick the same; probabilistic
# samples with its own noise, which needs rejection sampling.
DraftSampleMethod = Literal["greedy", "coupled", "probabilistic"]


@dataclass(frozen=True)
class DraftTokens:
    """The tokens that a head drafts, of those in the LM head that it borrows from the target."""

    token_ids: tuple[int, ...] = field(repr=False)  # ascending
    origin: str  # which ones they are, for the log


class HeadSpec(Protocol):
    """What the engine needs to know of a draft head; the head's own spec has more."""

    @property
    def method(self) -> DraftMethod: ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the head reads; empty for its last hidden state."""
        ...

    @property
    def vocab_size(self) -> int:
        """The number of tokens that it can draft."""
        ...

    @property
    def own_lm_head(self) -> bool:
        """Whether its checkpoint has an LM head; else it uses the target's."""
        ...

    @property
    def draft_tokens(self) -> DraftTokens | None:
        """The part of the target's LM head that it uses; None for all of it."""
        ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_position(self) -> int:
        """The number of positions that it can draft for."""
        ...


@dataclass(frozen=True)
class SpecConfig:
    """The settings of speculative decoding."""

    method: str
    num_drafts: int  # K, drafts per step, at most
    adaptive: bool = False  # fewer where that is faster
    folder: str | None = None  # of the head; for an MTP head, of the target
    head: HeadSpec | None = None
    draft_sample_method: DraftSampleMethod = "greedy"
    # Benchmarks only: the probability that draft j is accepted, if all before it were.
    synthetic_rates: tuple[float, ...] | None = None
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 5


@dataclass(frozen=True)
class LoadConfig:
    folder: str
    dummy: bool = False  # random weights; no weight files are read
    seed: int = 0  # of dummy weights
    tokenizer: str | None = None  # folder of the tokenizer; None if the engine has none


@dataclass(frozen=True)
class DeviceConfig:
    device: str
    dtype: str  # of computation: activations, norms, biases and rotary tables
    weight_dtype: str  # of matrices in memory
    kv_dtype: str  # of the KV cache
    packed: bool = False  # quantised matrices stay quantised, others of a draft head get 8 bits
    activation_bits: int = 16  # what inputs of packed matrices are rounded to
    num_threads: int | None = None  # on a CPU; None: as torch has set it

    @staticmethod
    def of(device: str, dtype: str) -> "DeviceConfig":
        """A device with one dtype for weights, computation and KV."""
        return DeviceConfig(device, dtype, dtype, dtype)


@dataclass(frozen=True)
class CacheConfig:
    block_size: int = 16
    num_blocks: int | None = None  # exact number, including the null block; for tests and experts
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None  # bytes
    state_cache_memory: int | None = None  # bytes; None: by device
    enable_prefix_caching: bool = True
    zero_new_blocks: bool = False  # zero each block when a request gets it, before it is used


@dataclass(frozen=True)
class ScheduleConfig:
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    num_drafts: int = 0  # K, at most
    adaptive: bool = False  # steps make fewer drafts where that is faster
    drafter_has_kv: bool = False  # in the same blocks as the target's
    drafter_max_len: int = sys.maxsize  # requests with as many tokens get no drafts
    run_ahead: int = 0  # steps in flight besides the one whose result is read next

    @property
    def query_len(self) -> int:
        """Query tokens of a decoding request: its newest token and K drafts, at most."""
        return self.num_drafts + 1

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """The numbers of drafts that a step may make, in rising order: 0, 1, 3 and 7, say."""
        counts = [self.num_drafts]
        while self.adaptive and counts[-1]:
            counts.append(counts[-1] // 2)
        return tuple(reversed(counts))

    @property
    def num_lookahead(self) -> int:
        """Tokens after a step's own for which the drafter writes KV."""
        return self.num_drafts - 1 if self.drafter_has_kv else 0


@dataclass(frozen=True)
class GraphConfig:
    mode: str = "none"
    capture_sizes: tuple[int, ...] | None = None  # None: the defaults
    sanitize: bool = False
    max_capture_size: int = CAPTURE_SIZE  # of the sizes that are not given
    more_for_prompts: bool = False  # larger ones for mixed batches, where the model is small
    capture_structured: bool = False  # whole steps of requests with a grammar, too


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
    draft_note: str = ""  # why "auto" chose drafts or not

    @property
    def head(self) -> HeadSpec | None:
        return self.spec.head if self.spec else None


@dataclass(frozen=True)
class EngineOptions:
    """The options that a user may set on an engine; `resolve` turns them into a `Config`."""

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
        default="auto",
        metadata={
            "help": "dtype of computation: auto (the checkpoint's), float64, float32, bfloat16 or "
            "float16"
        },
    )
    num_threads: int | None = field(
        default=None,
        metadata={
            "help": "CPU threads of this process; default: torch's choice (OMP_NUM_THREADS, else "
            "one for each core), fewer for quantised weights while others need the cores"
        },
    )
    weight_dtype: str = field(
        default="auto",
        metadata={
            "help": "dtype of weight matrices in memory: auto (as dtype), or a dtype; "
            "bfloat16 under float32 halves their memory, and each product casts them"
        },
    )
    weights: str = field(
        default="auto",
        metadata={
            "help": "weights of a GGUF file: packed (they stay quantised; CPU only), dense "
            "(dequantised), or auto (packed on a CPU in float32)"
        },
    )
    activation_bits: int = field(
        default=16,
        metadata={
            "help": "bits that inputs of products with packed weights are rounded to: 16, or 8, "
            "which is faster for prompts and several requests, and as coarse as in llama.cpp"
        },
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata={
            "help": "dtype of the KV cache: auto (as dtype), a dtype, or fp8 (e4m3), which "
            "halves the memory of bfloat16 and rounds keys and values to 4 significant bits"
        },
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
    state_cache_memory: int | str | None = field(
        default=None,
        metadata={
            "help": "memory for the prefix cache of models with recurrent layers, such as 2GiB: it "
            "keeps snapshots of their state; 0 turns it off; default: 5 % of the memory left on a "
            "GPU, 0 on a CPU"
        },
    )
    attention_backend: str = field(
        default="auto",
        metadata={
            "help": "auto (triton on CUDA, native for packed weights, else reference), triton, "
            "reference, native, flashinfer (needs pip install 'stoop[flashinfer]') or hostplan "
            "(for testing graphs)"
        },
    )
    graph_mode: str = field(
        default="auto",
        metadata={
            "help": "auto (step on CUDA, none elsewhere), none, piecewise, full, "
            "full_decode_only, full_and_piecewise or step, in upper or lower case; vLLM's names "
            "are taken too"
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
            "there is one and it is faster here), none, or JSON with method (eagle, eagle3, mtp or "
            "ngram), model (default: the head that comes with the model), num_speculative_tokens "
            "(drafts per step, at most, or auto) and adaptive (fewer drafts where that is faster; "
            "heads on a GPU, and auto on a CPU, do so unless it is false)"
        },
    )
    capture_sizes: str | Sequence[int] | None = field(
        default=None,
        metadata={
            "help": "batch sizes to capture graphs for, such as 1,2,4,8 (in requests for decode "
            "batches, in tokens for others)"
        },
    )
    max_capture_size: int | None = field(
        default=None,
        metadata={
            "help": "largest of the default batch sizes to capture graphs for; default: "
            f"{CAPTURE_SIZE} on a CPU; on a GPU {GPU_CAPTURE_SIZE}, and more tokens of prompts "
            "where the model is so small that launching its kernels takes longer than running them"
        },
    )
    sanitize: bool = field(
        default=False,
        metadata={"help": "check every graph replay for stale reads and against eager steps; slow"},
    )
    capture_structured: bool = field(
        default=False,
        metadata={
            "help": "also capture whole steps of batches with structured outputs, in graph_mode "
            "step; without it graphs of mixed batches serve them, if one is large enough"
        },
    )
