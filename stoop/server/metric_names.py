"""Every metric of the server: its meaning, our name and vLLM's.

Names are given without prefix (`stoop_`, or `vllm:`) and counters without `_total`. A metric that
vLLM lacks keeps our name under `--metrics-names vllm`, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

OURS, VLLM = "stoop_", "vllm:"


@dataclass(frozen=True)
class Metric:
    """`key` is that of `AsyncLLM.metrics()`, or of an attribute of the server's own counts."""

    key: str
    name: str
    help: str
    vllm: tuple[str, ...] = ()  # more than one: older boards read the others
    label: str | None = None  # besides those that every metric has
    vllm_label: str | None = None  # if vLLM calls it differently
    buckets: Sequence[float] = ()  # of a histogram

    def names(self, vllm: bool) -> list[str]:
        """With prefix, as they are in an exposition, except for a counter's `_total`."""
        if vllm and self.vllm:
            return [VLLM + name for name in self.vllm]
        return [OURS + self.name]

    def label_name(self, vllm: bool) -> str | None:
        return self.vllm_label if vllm and self.vllm and self.vllm_label else self.label


# ---- from the core, at the moment of a scrape ----

CORE_GAUGES = (
    Metric(
        "num_requests_running",
        "requests_running",
        "Requests that the scheduler computes now.",
        ("num_requests_running",),
    ),
    Metric(
        "num_requests_waiting",
        "requests_waiting",
        "Requests in the queue, not yet admitted or preempted.",
        ("num_requests_waiting",),
    ),
    Metric(
        "kv_cache_usage",
        "kv_cache_usage_ratio",
        "Share of KV cache blocks in use; 1 is full.",
        ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    ),
    Metric("kv_cache_blocks", "kv_cache_blocks", "KV cache blocks in all."),
    Metric("kv_cache_bytes", "kv_cache_bytes", "Memory of the KV cache, in bytes."),
    Metric("max_num_seqs", "requests_running_limit", "Requests that may run at once."),
    Metric(
        "heartbeat_age",
        "core_heartbeat_age_seconds",
        "Seconds since the core's process last reported.",
    ),
)

# Counts of a core's process, which begin at 0 again when it restarts.
CORE_COUNTERS = (
    Metric(
        "num_prompt_tokens",
        "prompt_tokens",
        "Prompt tokens of admitted requests, cached ones included.",
        ("prompt_tokens",),
    ),
    Metric(
        "num_generated_tokens", "generation_tokens", "Tokens generated.", ("generation_tokens",)
    ),
    Metric(
        "num_preemptions",
        "preemptions",
        "Requests that gave up their KV blocks and wait again.",
        ("num_preemptions",),
    ),
    Metric(
        "num_computed_again",
        "requests_computed_again",
        "Requests whose last tokens were computed again, so that drafts could resume.",
    ),
    Metric(
        "prefix_cache_queried_tokens",
        "prefix_cache_queried_tokens",
        "Prompt tokens looked up in the prefix cache.",
        ("prefix_cache_queries",),
    ),
    Metric(
        "prefix_cache_hit_tokens",
        "prefix_cache_hit_tokens",
        "Prompt tokens found in the prefix cache.",
        ("prefix_cache_hits",),
    ),
    Metric(
        "spec_decode_num_drafts",
        "spec_drafts",
        "Times that a request's drafts were verified.",
        ("spec_decode_num_drafts",),
    ),
    Metric(
        "spec_decode_num_draft_tokens",
        "spec_draft_tokens",
        "Draft tokens verified.",
        ("spec_decode_num_draft_tokens",),
    ),
    Metric(
        "spec_decode_num_accepted_tokens",
        "spec_accepted_tokens",
        "Draft tokens accepted.",
        ("spec_decode_num_accepted_tokens",),
    ),
    Metric(
        "num_drafts_not_made",
        "spec_drafts_not_made",
        "Draft tokens not made for decoding requests, in steps that made fewer than the most.",
    ),
    Metric("step_seconds_total", "step_seconds", "Seconds that the core spent in steps."),
    Metric("num_tokens_computed", "tokens_computed", "Tokens that the target computed."),
    Metric(
        "num_tokens_padded",
        "tokens_padded",
        "Tokens wasted: those of graphs beyond the live ones.",
    ),
)
# Lists (by draft position) and dictionaries (by mode) of such counts.
CORE_COUNTER_GROUPS = (
    Metric(
        "spec_decode_num_accepted_tokens_per_pos",
        "spec_accepted_tokens_by_position",
        "Draft tokens accepted, by position in the draft; ours count from 1, vLLM's from 0.",
        ("spec_decode_num_accepted_tokens_per_pos",),
        label="position",
    ),
    Metric(
        "spec_decode_num_draft_tokens_per_pos",
        "spec_draft_tokens_by_position",
        "Draft tokens verified, by position in the draft, counted as the accepted ones.",
        label="position",
    ),
    Metric(
        "num_steps_by_drafts",
        "steps_by_drafts",
        "Steps, by how many drafts were chosen for each request.",
        label="drafts",
    ),
    Metric(
        "num_steps_by_mode",
        "steps",
        "Steps, by how the target's batch ran: full or piecewise graph, or none.",
        label="mode",
    ),
)

# ---- from the server ----

REQUESTS = Metric("requests", "requests", "Requests for a completion that arrived.")
CACHED = Metric(
    "cached",
    "prompt_tokens_cached",
    "Prompt tokens of ended requests that came from the prefix cache.",
    ("prompt_tokens_cached",),
)
FINISHED = Metric(
    "finished",
    "requests_finished",
    "Requests that ended, by reason.",
    ("request_success",),
    label="finish_reason",
    vllm_label="finished_reason",
)
REFUSED = Metric(
    "refused",
    "requests_refused",
    "Requests answered with an error, by HTTP status; errors that end a stream included.",
    label="code",
)
RESTARTS = Metric("restarts", "core_restarts", "Times that the core's process was restarted.")
HEALTHY = Metric("healthy", "core_healthy", "1 while the core's process lives and its loop turns.")
OPEN = Metric("open", "requests_open", "Requests that have not ended.")
HTTP_OPEN = Metric("http_open", "http_requests_open", "HTTP requests being answered now.")
INFO = Metric("info", "info", "Always 1; its labels say what is served and how.")
POLICY_INFO = Metric(
    "spec_decode_policy",
    "spec_policy_info",
    "Always 1; its label says how many drafts pay at how many requests, where the number varies.",
    label="policy",
)
CACHE_INFO = Metric(
    "cache_info",
    "cache_config_info",
    "Always 1; its labels are the settings of the KV cache.",
    ("cache_config_info",),
)
FINISH_REASONS = ("stop", "length", "abort", "error")

# Seconds. Each set contains the bounds of vLLM's histogram, and finer ones below them.
# fmt: off
_FIRST = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
_BETWEEN = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_WHOLE = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

HISTOGRAMS = (
    Metric(
        "first_token",
        "time_to_first_token_seconds",
        "Seconds from a request's arrival to its first token.",
        ("time_to_first_token_seconds",),
        buckets=_FIRST,
    ),
    Metric(
        "inter_token",
        "inter_token_latency_seconds",
        "Seconds per token after a request's first. Tokens of one step share its time evenly.",
        ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        buckets=_BETWEEN,
    ),
    Metric(
        "per_output_token",
        "request_time_per_output_token_seconds",
        "By request, seconds per token after the first.",
        ("request_time_per_output_token_seconds",),
        buckets=_BETWEEN,
    ),
    Metric(
        "e2e",
        "e2e_request_latency_seconds",
        "Seconds from a request's arrival to its end.",
        ("e2e_request_latency_seconds",),
        buckets=_WHOLE,
    ),
    Metric(
        "queue",
        "request_queue_time_seconds",
        "Seconds that a request waited to be admitted.",
        ("request_queue_time_seconds",),
        buckets=_WHOLE,
    ),
    Metric(
        "prefill",
        "request_prefill_time_seconds",
        "Seconds from a request's admission to its first token.",
        ("request_prefill_time_seconds",),
        buckets=_WHOLE,
    ),
    Metric(
        "decode",
        "request_decode_time_seconds",
        "Seconds from a request's first token to its last.",
        ("request_decode_time_seconds",),
        buckets=_WHOLE,
    ),
    Metric(
        "inference",
        "request_inference_time_seconds",
        "Seconds from a request's admission to its last token.",
        ("request_inference_time_seconds",),
        buckets=_WHOLE,
    ),
    Metric(
        "num_prompt",
        "request_prompt_tokens",
        "Prompt tokens of a request.",
        ("request_prompt_tokens",),
        buckets=_TOKENS,
    ),
    Metric(
        "num_output",
        "request_generation_tokens",
        "Tokens generated for a request.",
        ("request_generation_tokens",),
        buckets=_TOKENS,
    ),
    Metric(
        "params_n",
        "request_params_n",
        "The field n of a request.",
        ("request_params_n",),
        buckets=(1.0, 2.0, 5.0, 10.0, 20.0),
    ),
    Metric(
        "params_max_tokens",
        "request_params_max_tokens",
        "The field max_tokens of a request, if it has one.",
        ("request_params_max_tokens",),
        buckets=_TOKENS,
    ),
)
