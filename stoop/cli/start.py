"""Starting an engine from the command line, with its progress shown."""

import sys
from typing import TYPE_CHECKING, Any

from stoop.cli.progress import StageProgress

if TYPE_CHECKING:
    from stoop.config.schema import SpecConfig
    from stoop.llm import LLM


def start_llm(model: str, engine: dict[str, Any]) -> "LLM":
    with StageProgress() as report:
        report("starting", 0, None)
        from stoop.llm import LLM

        llm = LLM(model, report=report, **engine)
    config, numbers = llm.config, llm.metrics()
    print(
        f"{model}: {config.model.num_params / 1e6:.0f}M parameters, {config.device.dtype} on "
        f"{config.device.device}, KV cache of {numbers['kv_cache_tokens']:,} tokens "
        f"({numbers['kv_cache_bytes'] / 2**20:,.0f} MiB), ready in {report.seconds:.1f} s",
        file=sys.stderr,
    )
    if config.spec is not None:
        note = f"; {config.draft_note}" if config.draft_note else ""
        print(f"drafts: {_drafter(config.spec)}{note}", file=sys.stderr)
    elif config.draft_note:
        print(f"drafts: none; {config.draft_note}", file=sys.stderr)
    return llm


_PICKED = {
    "greedy": "the likeliest",
    "coupled": "coupled to the target's draws",
    "probabilistic": "drawn with their own noise",
}


def _drafter(spec: "SpecConfig") -> str:
    """What was chosen, of a head also what it reads of the target."""
    parts = [spec.method, f"{spec.num_tokens} a step"]
    if spec.head is not None:
        parts.append(_PICKED[spec.draft_sample_method])
        parts.append(f"{spec.head.decoder.vocab_size:,} tokens of vocabulary")
    if spec.head is not None and spec.head.taps:
        parts.append(f"taps {', '.join(map(str, spec.head.taps))}")
    if spec.synthetic_rates is not None:
        parts.append("accepted by chance: answers mean nothing")
    return ", ".join(parts)
