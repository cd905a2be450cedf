"""Arguments and methods of vLLM that stoop does not have.

Code written for vLLM passes many arguments that mean nothing here. Each is listed with its harmless
values: those are ignored, and one line of the log says so. Any other value would change the
results, so it is refused with a sentence that says what to do instead.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoop.config.values import plain, shown

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Foreign:
    """An argument that vLLM has and stoop lacks."""

    advice: str = ""  # what to do instead, for values that are not harmless
    harmless: tuple[Any, ...] = (None,)
    always: bool = False  # every value is harmless

    def is_harmless(self, value: Any) -> bool:
        if self.always:
            return True
        value = plain(value)
        if isinstance(value, Mapping | str) and not value:
            return True
        if isinstance(value, list | tuple) and all(each is None for each in value):
            return True
        return any(type(value) is type(known) and value == known for known in self.harmless)


def _any() -> Foreign:
    return Foreign(always=True)


def _only(*harmless: Any, advice: str) -> Foreign:
    return Foreign(advice, (None, *harmless))


_ONE_DEVICE = "stoop runs a model on one device: leave it out"
SAMPLING_ADVICE = "it is a sampling option: pass SamplingParams to generate"
_NO_LORA = "stoop has no LoRA adapters: merge the adapter into the weights"
_NO_POOLING = "stoop only generates text and has no pooling models: leave it out"
_STRUCTURE = 'write structured_outputs={"json": ...}, or regex, choice, grammar or json_object'
_NO_PROCESSORS = "stoop runs no logits processors: use logit_bias or bad_words"
_NO_IMAGES = "stoop reads text only: leave it out"
_NO_EXPERTS = "stoop runs dense models only: leave it out"
_NO_SLEEP = "stoop cannot free memory and come back: delete the LLM and make a new one"
_CONFIG_FILE = "stoop reads the model's config.json as it is: change it there"

ENGINE_ARGS: dict[str, Foreign] = {
    # What runs, and where.
    **dict.fromkeys(
        (
            "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
            "decode_context_parallel_size", "prefill_context_parallel_size",
        ),
        _only(1, advice=_ONE_DEVICE),
    ),
    **dict.fromkeys(
        (
            "data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local",
            "data_parallel_address", "data_parallel_rpc_port", "nnodes", "node_rank",
            "master_addr", "master_port",
        ),
        _any(),
    ),
    "distributed_executor_backend": _only("uni", "mp", advice=_ONE_DEVICE),
    "worker_cls": _only("auto", advice="stoop has no worker classes: leave it out"),
    "worker_extension_cls": _only(advice="stoop has no worker classes: leave it out"),
    "scheduler_cls": _only(advice="stoop has one scheduler: leave it out"),
    "runner": _only("auto", "generate", advice=_NO_POOLING),
    "task": _only("auto", "generate", advice=_NO_POOLING),
    "convert": _only("auto", "none", advice=_NO_POOLING),
    "pooler_config": _only(advice=_NO_POOLING),
    "override_pooler_config": _only(advice=_NO_POOLING),
    **dict.fromkeys(
        ("enable_expert_parallel", "enable_eplb", "enable_dbo", "enable_return_routed_experts"),
        _only(False, advice=_NO_EXPERTS),
    ),
    "model_impl": _only("auto", "vllm", advice="stoop has its own models only: leave it out"),
    "trust_remote_code": _any(),  # code of a repository is never run
    "code_revision": _any(),
    # Where files come from.
    "download_dir": _only(advice="set STOOP_CACHE, or HF_HOME for models from the hub"),
    "hf_token": _only(True, False, advice="set HF_TOKEN in the environment"),
    "hf_config_path": _only(advice="name the folder of the model instead"),
    "config_format": _only("auto", "hf", advice="stoop reads config.json only: leave it out"),
    "tokenizer_mode": _only(
        "auto", "hf", "fast", advice="stoop reads tokenizer.json only: leave it out"
    ),
    "tokenizer_revision": _only(advice="fetch that revision, and pass its folder as tokenizer"),
    "hf_overrides": _only(advice=_CONFIG_FILE),
    "rope_scaling": _only(advice=_CONFIG_FILE),
    "rope_theta": _only(advice=_CONFIG_FILE),
    "disable_sliding_window": _only(False, advice=_CONFIG_FILE),
    "model_loader_extra_config": _only(advice="stoop has one loader: leave it out"),
    "generation_config": _only(
        "auto", advice="pass SamplingParams() to generate for defaults that no model changes"
    ),
    "override_generation_config": _only(advice="pass SamplingParams to generate"),
    # Numbers and memory.
    "quantization": _only(
        advice="stoop runs no quantised weights: name an unquantised model, or a GGUF file, which "
        "is converted"
    ),
    "calculate_kv_scales": _only(False, advice="KV scales come from the checkpoint: leave it out"),
    "cpu_offload_gb": _only(
        0, 0.0, advice="stoop keeps all weights on the device: use a smaller model or device='cpu'"
    ),
    "max_logprobs": _only(
        *range(21), advice="stoop gives at most 20 log-probabilities: leave it out"
    ),
    "logprobs_mode": _only(
        "raw_logprobs", advice="stoop gives log-probabilities before any filter: leave it out"
    ),
    "enable_sleep_mode": _only(False, advice=_NO_SLEEP),
    "kv_transfer_config": _only(advice="stoop cannot move its KV cache: leave it out"),
    "kv_events_config": _only(advice="stoop publishes no events of its KV cache: leave it out"),
    # Graphs and compilation.
    "attention_config": _only(advice="use attention_backend"),
    # Speculation, under the names from before speculative_config.
    **dict.fromkeys(
        ("speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_max"),
        _only(advice="use speculative_config"),
    ),
    # Features that stoop lacks.
    "enable_lora": _only(False, advice=_NO_LORA),
    "enable_prompt_adapter": _only(False, advice="stoop has no prompt adapters: leave it out"),
    "enable_prompt_embeds": _only(False, advice="a prompt is text or token ids: leave it out"),
    "logits_processors": _only(advice=_NO_PROCESSORS),
    "io_processor_plugin": _only(advice="stoop has no plugins: leave it out"),
    "additional_config": _only(advice="stoop has no plugins: leave it out"),
    "otlp_traces_endpoint": _only(advice="stoop sends no traces: leave it out"),
    "collect_detailed_traces": _only(advice="stoop sends no traces: leave it out"),
    **dict.fromkeys(
        (
            "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop",
            "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs",
        ),
        _only(advice=SAMPLING_ADVICE),
    ),
    # How vLLM does its work, and options of features whose use is refused by itself.
    **dict.fromkeys(
        (
            "aggregate_engine_logging", "all2all_backend", "allowed_local_media_path",
            "allowed_media_domains", "async_scheduling", "data_parallel_backend",
            "data_parallel_external_lb", "data_parallel_hybrid_lb", "default_mm_loras",
            "disable_async_output_proc", "disable_cascade_attn", "disable_chunked_mm_input",
            "disable_custom_all_reduce", "disable_hybrid_kv_cache_manager",
            "disable_log_requests", "disable_log_stats", "disable_mm_preprocessor_cache",
            "enable_log_requests", "enable_mm_embeds", "eplb_config", "fully_sharded_loras",
            "guided_decoding_backend", "ignore_patterns", "kv_sharing_fast_prefill",
            "limit_mm_per_prompt", "logits_processor_pattern", "long_prefill_token_threshold",
            "lora_dtype", "lora_extra_vocab_size", "max_cpu_loras", "max_long_partial_prefills",
            "max_lora_rank", "max_loras", "max_num_partial_prefills",
            "max_parallel_loading_workers", "max_seq_len_to_capture", "media_io_kwargs",
            "mm_encoder_attn_backend", "mm_encoder_tp_mode", "mm_processor_cache_gb",
            "mm_processor_cache_type", "mm_processor_kwargs", "num_lookahead_slots",
            "optimization_level", "performance_mode", "preemption_mode",
            "prefix_caching_hash_algo", "profiler_config", "pt_load_map_location",
            "ray_workers_use_nsight", "reasoning_parser", "safetensors_load_strategy",
            "scheduling_policy", "served_model_name", "show_hidden_metrics_for_version",
            "skip_mm_profiling", "stream_interval", "structured_outputs_config", "swap_space",
            "use_tqdm_on_load", "use_v2_block_manager", "video_pruning_rate",
        ),
        _any(),
    ),
}  # fmt: skip

# A compilation_config that is no set of options: the levels of older versions.
COMPILATION_LEVEL = _only(
    0, 1, 2, 3, advice="stoop compiles nothing but graphs: use graph_mode and capture_sizes"
)
# Keys of a compilation_config that are not about graphs (see graph_names.py for those that are).
COMPILATION_ARGS: dict[str, Foreign] = {
    "inductor_passes": _only(
        advice="stoop compiles nothing, so no pass would run: change the model instead"
    ),
    **dict.fromkeys(
        (
            "backend", "bs_to_padded_graph_size", "cache_dir", "compilation_time",
            "compile_cache_save_format", "compile_mm_encoder", "compile_ranges_endpoints",
            "compile_ranges_split_points", "compile_sizes", "cudagraph_copy_inputs",
            "cudagraph_mm_encoder", "cudagraph_num_of_warmups", "cudagraph_specialize_lora",
            "custom_ops", "debug_dump_path", "disabled_custom_ops", "dynamic_shapes_config",
            "enabled_custom_ops", "fast_moe_cold_start", "inductor_compile_config", "level",
            "local_cache_dir", "max_capture_size", "mode", "pass_config", "splitting_ops",
            "static_all_moe_layers", "static_forward_context", "traced_files", "use_inductor",
            "use_inductor_graph_partition",
        ),
        _any(),
    ),
}  # fmt: skip

SAMPLING_ARGS: dict[str, Foreign] = {
    "best_of": _only(1, advice="ask for n answers and take the best by cumulative_logprob"),
    "use_beam_search": _only(False, advice="stoop has no beam search: sample n answers"),
    "length_penalty": _only(1, 1.0, advice="it belongs to beam search, which stoop lacks"),
    "early_stopping": _only(False, advice="it belongs to beam search, which stoop lacks"),
    **dict.fromkeys(
        (
            "guided_decoding", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
            "guided_json_object", "guided_decoding_backend", "guided_whitespace_pattern",
        ),
        _only(advice=_STRUCTURE),
    ),
    "logits_processors": _only(advice=_NO_PROCESSORS),
    "allowed_token_ids": _only(
        advice="stoop cannot limit answers to some tokens; a logit_bias of 100 comes close"
    ),
    "truncate_prompt_tokens": _only(-1, advice="pass token ids and cut them: ids[-N:]"),
    "output_kind": _only(
        advice="generate returns finished outputs, and stream all the text so far: leave it out"
    ),
    "stream_interval": _only(1, advice="stream returns an output for every step: leave it out"),
    "flat_logprobs": _only(False, advice="log-probabilities are dictionaries: leave it out"),
    "logprob_token_ids": _only(advice="use logprobs, which gives the best 20 tokens"),
    "prompt_logprob_token_ids": _only(advice="use prompt_logprobs=-1, which gives all tokens"),
    "prompt_logprob_start": _only(0, advice="prompt_logprobs scores the whole prompt"),
    "thinking_token_budget": _only(-1, advice="use max_tokens"),
    "repetition_detection": _only(advice="use repetition_penalty or max_tokens"),
    "skip_reading_prefix_cache": _only(
        False, advice="start the engine with enable_prefix_caching=False"
    ),
    "trace_decode_token_ids": _only(advice="stoop cannot force tokens: leave it out"),
    "routed_experts_prompt_start": _only(0, advice=_NO_EXPERTS),
    "extra_args": _only(advice="stoop has no plugins: leave it out"),
    "spaces_between_special_tokens": _any(),  # fast tokenizers put none there
    "skip_clone": _any(),  # the engine always takes a copy
}  # fmt: skip

CALL_ARGS: dict[str, Foreign] = {
    "lora_request": _only(advice=_NO_LORA),
    "prompt_adapter_request": _only(advice="stoop has no prompt adapters: leave it out"),
    "guided_options_request": _only(advice=f"in SamplingParams {_STRUCTURE}"),
    "tokenization_kwargs": _only(advice="encode the prompt yourself, and pass its token ids"),
    "mm_processor_kwargs": _only(advice=_NO_IMAGES),
    "chat_template_content_format": _only(
        "auto", "string", advice="text parts are joined to one string: use auto"
    ),
    "prompt_token_ids": _only(advice='pass prompts=[{"prompt_token_ids": [...]}]'),
}

PROMPT_KEYS: dict[str, Foreign] = {
    "multi_modal_data": _only(advice=_NO_IMAGES),
    "multi_modal_uuids": _only(advice=_NO_IMAGES),
    "mm_processor_kwargs": _only(advice=_NO_IMAGES),
    "cache_salt": _only(
        advice="cached prefixes are shared by all requests: use enable_prefix_caching=False"
    ),
    "token_type_ids": _only(advice=_NO_POOLING),
    "prompt_embeds": _only(advice="a prompt is text or token ids"),
    "encoder_prompt": _only(advice="stoop runs decoders only: pass a prompt"),
    "decoder_prompt": _only(advice="stoop runs decoders only: pass a prompt"),
}

METHODS: dict[str, str] = {
    **dict.fromkeys(
        ("embed", "encode", "classify", "score", "reward"),
        "stoop only generates text and has no pooling models",
    ),
    "beam_search": "stoop has no beam search: sample n answers with generate",
    **dict.fromkeys(("sleep", "wake_up"), _NO_SLEEP),
    **dict.fromkeys(("start_profile", "stop_profile"), "use `stoop bench profile`"),
    "reset_mm_cache": "stoop reads text only",
    "get_metrics": "use metrics(), which returns a dictionary",
    "set_tokenizer": "pass tokenizer=... to LLM",
    **dict.fromkeys(("llm_engine", "model_config"), "use config and metrics()"),
    **dict.fromkeys(
        ("collective_rpc", "apply_model", "update_weights", "init_weight_transfer_engine"),
        "stoop has no worker processes: the model is at engine.runner.model",
    ),
}


def check_foreign(table: Mapping[str, Foreign], given: Mapping[str, Any]) -> str | None:
    """Why one of these vLLM arguments must be refused, or None. Logs those that are ignored."""
    for name, value in given.items():
        if not table[name].is_harmless(value):
            return f"{name}={shown(value)} is not supported: {table[name].advice}"
    ignored = [f"{name}={shown(value)}" for name, value in given.items() if value is not None]
    if ignored:
        log.info("ignored, since it changes nothing in stoop: %s", ", ".join(ignored))
    return None
