"""A stand-in for `AsyncLLM` with scripted numbers, for tests of metrics and of the page."""

from dataclasses import dataclass, field
from typing import Any

from stoop.config.schema import (
    CacheConfig,
    Config,
    DeviceConfig,
    GraphConfig,
    LoadConfig,
    ModelSpec,
    ScheduleConfig,
    SpecConfig,
)


def config() -> Config:
    return Config(
        model=ModelSpec(
            architecture="LlamaForCausalLM",
            vocab_size=8,
            hidden_size=8,
            num_layers=1,
            max_position=64,
            dtype="float32",
        ),
        load=LoadConfig("nowhere"),
        device=DeviceConfig.of("cpu", "float32"),
        cache=CacheConfig(),
        schedule=ScheduleConfig(64, 8, 64),
        graph=GraphConfig(mode="full"),
        spec=SpecConfig("eagle3", 3),
    )


def snapshot(scale: int = 1, pid: int = 100) -> dict[str, Any]:
    """Numbers like those of a core, all counters being multiples of `scale`."""
    return {
        "num_requests_waiting": 2,
        "num_requests_running": 5,
        "num_requests_finished": 4 * scale,
        "num_steps": 30 * scale,
        "num_prompt_tokens": 200 * scale,
        "num_generated_tokens": 90 * scale,
        "num_preemptions": scale,
        "num_computed_again": 6 * scale,
        "prefix_cache_queried_tokens": 200 * scale,
        "prefix_cache_hit_tokens": 64 * scale,
        "spec_decode_num_drafts": 25 * scale,
        "spec_decode_num_draft_tokens": 70 * scale,
        "spec_decode_num_accepted_tokens": 40 * scale,
        "spec_decode_num_accepted_tokens_per_pos": [20 * scale, 13 * scale, 7 * scale],
        "spec_decode_num_draft_tokens_per_pos": [25 * scale, 25 * scale, 20 * scale],
        "spec_decode_mean_acceptance_length": 2.6,
        "kv_cache_usage": 0.25,
        "kv_cache_blocks": 512,
        "kv_cache_tokens": 8192,
        "kv_cache_bytes": 1 << 20,
        "core_pid": pid,
        "num_restarts": 0,
        "heartbeat_age": 0.01,
        "step_seconds_total": 1.5 * scale,
        "num_steps_by_mode": {"full": 20 * scale, "none": 10 * scale},
        "num_steps_by_drafts": {0: 12 * scale, 3: 18 * scale},
        "num_drafts_not_made": 36 * scale,
        "spec_decode_policy": "3 drafts at 1 to 64 requests, none above 64",
        "num_tokens_computed": 400 * scale,
        "num_tokens_padded": 50 * scale,
        "max_num_seqs": 8,
    }


@dataclass
class FakeCore:
    """Set `found` to what `metrics` shall answer; an exception is raised."""

    found: dict[str, Any] | Exception = field(default_factory=snapshot)
    num_open: int = 7
    healthy: bool = True
    state: str = "ready"
    config: Config = field(default_factory=config)

    def metrics(self) -> dict[str, Any]:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found
