"""One-sentence messages for errors that a user can act on."""

import errno
import re
from typing import Any

from stoop.config.errors import StoopError
from stoop.config.vllm_names import ENGINE_ARGS

LOWER = (
    "use a smaller model or a smaller --dtype, or lower --max-num-seqs, --max-num-batched-tokens, "
    "--max-model-len or the KV cache (--kv-cache-memory, --gpu-memory-utilization)"
)

# vLLM's flags for graphs that a command, or every command, lacks. Of a short option that does not
# exist, only the first letter is known: `-c` is the start of `-cc.cudagraph_mode=FULL`.
GRAPH_FLAGS = {
    "enforce_eager": "use --graph-mode none",
    "cudagraph_mode": "use --graph-mode",
    "compilation_config": "use --graph-mode",
    "c": "use --graph-mode, or -cc with JSON where --help lists it",
    "O": "stoop compiles nothing but graphs, so leave it out or use --graph-mode",
    "cudagraph_capture_sizes": "use --capture-sizes with commas, such as 1,2,4",
    "cuda_graph_sizes": "use --capture-sizes with commas, such as 1,2,4",
    "max_cudagraph_capture_size": "use --max-capture-size",
}


def explain(error: Exception) -> str | None:
    """Return the message to print, or None for a bug in stoop, which needs its traceback."""
    if isinstance(error, StoopError):
        return f"error: {error}"
    if hasattr(error, "format_message"):  # a usage error of typer's
        return _usage(error)
    if is_out_of_memory(error):
        return f"error: out of memory{_size(str(error))}: {LOWER}"
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"error: {where}{error.strerror}"
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Recognize out-of-memory errors of Python, torch (CPU or GPU) and the operating system."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text or "out of memory" in text
    )


def _size(text: str) -> str:
    """Return the size of the failed allocation, if the message names it."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)", text)
    if found is None:
        return ""
    amount, unit = float(found[1]), found[2]
    if unit == "bytes":
        amount, unit = amount / 2**30, "GiB"
    return f" (tried to allocate {amount:.2f} {unit})"


def _vllm_advice(option: str) -> str:
    """Say what to do about a vLLM flag that stoop lacks."""
    name = option.lstrip("-").replace("-", "_")
    if name in GRAPH_FLAGS:
        return f": {GRAPH_FLAGS[name]}"
    found = ENGINE_ARGS.get(name)
    if found is None:
        return ""
    return f", which is vLLM's: {found.advice or 'it changes nothing in stoop, so leave it out'}"


def _usage(error: Any) -> str:
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())
    wrong = getattr(error, "option_name", None) or ""
    close = getattr(error, "possibilities", None)
    missing = wrong and type(error).__name__ == "NoSuchOption"
    advice = _vllm_advice(wrong) if missing else ""
    if wrong and (close is not None or advice):
        # Stoop's own names come before vLLM's.
        near = sorted(name for name in close or () if not _vllm_advice(name)) or sorted(close or ())
        meant = f": did you mean {' or '.join(near)}?" if near else ""
        text = f"there is no option {wrong}{advice or meant}"
    else:
        text = error.format_message().rstrip(".")
        text = text[0].lower() + text[1:]
        if "'serve'" in text:
            text = "stoop has no HTTP server yet"
    context = getattr(error, "ctx", None)
    return f"error: {text} (see {context.command_path} --help)" if context else f"error: {text}"
