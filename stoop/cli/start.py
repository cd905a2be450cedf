"""Starting an engine from the command line, with progress."""

import logging
import sys
from typing import TYPE_CHECKING, Any

from stoop.cli.progress import StageProgress
from stoop.config.schema import dtype_label

if TYPE_CHECKING:
    from stoop.config.schema import Config, SpecConfig
    from stoop.llm import LLM

log = logging.getLogger(__name__)


def start_llm(model: str, engine: dict[str, Any]) -> "LLM":
    """Start an engine and print its size and drafter to standard error."""
    with StageProgress() as report:
        report("starting", 0, None)
        from stoop.llm import LLM
        from stoop.models.loader import count_parameters

        llm = LLM(model, report=report, **engine)
    millions = count_parameters(llm.config.model) / 1e6
    print_started(f"{model}: {millions:.0f}M parameters", llm.config, llm.metrics(), report.seconds)
    return llm


def settle_engine(model: str, engine: dict[str, Any]) -> "Config":
    """Refuse options that do not fit the model or each other; no weights are loaded."""
    with StageProgress() as report:
        from stoop.config.resolve import make_options
        from stoop.engine.build import CoreBuilder

        return CoreBuilder(make_options(model, engine), report).settle()


def print_started(what: str, config: "Config", numbers: dict[str, Any], seconds: float) -> None:
    """Print what runs: device, KV cache and drafter. numbers: the engine's metrics"""
    kv_dtype = dtype_label(config.device.kv_dtype)
    other = f", {kv_dtype}" if kv_dtype != config.device.dtype else ""
    print(
        f"{what}, {config.device.dtype} on "
        f"{config.device.device}, KV cache of {numbers['kv_cache_tokens']:,} tokens "
        f"({numbers['kv_cache_bytes'] / 2**20:,.0f} MiB{other}), ready in {seconds:.1f} s",
        file=sys.stderr,
    )
    if config.spec is not None:
        note = f"; {config.draft_note}" if config.draft_note else ""
        varies = "spec_decode_policy" in numbers
        if varies:
            note = f" ({numbers['spec_decode_policy']}){note}"
        print(f"speculative decoding: {_drafter(config.spec, varies)}{note}", file=sys.stderr)
        log.info("drafter: %s", _details(config.spec))
    elif config.draft_note:
        print(f"speculative decoding: off; {config.draft_note}", file=sys.stderr)


_METHODS = {
    "eagle": "EAGLE head",
    "eagle3": "EAGLE-3 head",
    "mtp": "MTP head",
    "ngram": "prompt lookup",
}


def _drafter(spec: "SpecConfig", varies: bool) -> str:
    """varies: whether steps may make fewer drafts"""
    tokens = "token" if spec.num_drafts == 1 else "tokens"
    most = "up to " if varies else ""
    text = f"{_METHODS.get(spec.method, spec.method)}, "
    text += f"{most}{spec.num_drafts} draft {tokens} per step"
    if spec.synthetic_rates is not None:
        text += ", accepted by chance: answers mean nothing"
    return text


def _details(spec: "SpecConfig") -> str:
    """Describe for the log how drafts are sampled and what a head reads from the target."""
    parts = [f"draft_sample_method {spec.draft_sample_method}"]
    if spec.head is not None:
        parts.append(f"a vocabulary of {spec.head.vocab_size:,} tokens")
    if spec.head is not None and spec.head.taps:
        parts.append(f"taps {', '.join(map(str, spec.head.taps))}")
    return ", ".join(parts)
