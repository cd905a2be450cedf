"""One-sentence messages for errors that a user can act on."""

import errno
import re
from typing import Any

from stoop.config.errors import StoopError
from stoop.config.vllm_names import ENGINE_ARGS, SAMPLING_ADVICE

LOWER = (
    "use a smaller model or a smaller --dtype, or lower --max-num-seqs, --max-num-batched-tokens, "
    "--max-model-len or the KV cache (--kv-cache-memory, --gpu-memory-utilization)"
)

# Flags for graphs, most of them vLLM's, that a command, or every command, lacks. Each has pairs of
# a flag and the advice for commands with that flag; the first pair that fits is used. Of a short
# option that does not exist, only the first letter is known: `-c` is the start of
# `-cc.cudagraph_mode=FULL`.
_MODE = (("--graph-mode", "use --graph-mode"), ("--modes", "use --modes"))
_SIZES = (("--capture-sizes", "use --capture-sizes with commas, such as 1,2,4"),)
_COMPILES_NOTHING = "stoop compiles nothing but graphs, so leave it out"
GRAPH_FLAGS: dict[str, tuple[tuple[str, str], ...]] = {
    "graph_mode": _MODE,
    "enforce_eager": (
        ("--graph-mode", "use --graph-mode none"),
        ("--only", "this command compares graphs with an eager engine, so leave it out"),
        ("--modes", "use --modes none"),
    ),
    "cudagraph_mode": _MODE,
    "compilation_config": _MODE,
    "c": (("-cc", "use --graph-mode, or -cc with JSON"), *_MODE),
    "O": (
        ("--graph-mode", f"{_COMPILES_NOTHING} or use --graph-mode"),
        ("--modes", f"{_COMPILES_NOTHING} or use --modes"),
    ),
    "cudagraph_capture_sizes": _SIZES,
    "cuda_graph_sizes": _SIZES,
    "max_cudagraph_capture_size": (("--max-capture-size", "use --max-capture-size"),),
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


def _advice(option: str, known: set[str]) -> str:
    """Say what to do about a flag that a command lacks. known: the flags that it has"""
    name = option.lstrip("-").replace("-", "_")
    if name in GRAPH_FLAGS:
        fitting = [text for flag, text in GRAPH_FLAGS[name] if flag in known]
        return f": {fitting[0] if fitting else 'this command has no use for it, so leave it out'}"
    found = ENGINE_ARGS.get(name)
    if found is None:
        return ""
    if found.advice == SAMPLING_ADVICE:
        if name == "max_tokens" and "--output-len" in known:
            return ": use --output-len"
        return ": it is a sampling option, and every request has its own"
    return f", which is vLLM's: {found.advice or 'it changes nothing in stoop, so leave it out'}"


def _is_theirs(option: str) -> bool:
    name = option.lstrip("-").replace("-", "_")
    return name in GRAPH_FLAGS.keys() - {"graph_mode"} or name in ENGINE_ARGS


def _usage(error: Any) -> str:
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())
    wrong = getattr(error, "option_name", None) or ""
    close = getattr(error, "possibilities", None)
    missing = wrong and type(error).__name__ == "NoSuchOption"
    context = getattr(error, "ctx", None)
    known = {flag for each in context.command.params for flag in each.opts} if context else set()
    advice = _advice(wrong, known) if missing else ""
    if wrong and (close is not None or advice):
        # Stoop's own names come before vLLM's.
        near = sorted(name for name in close or () if not _is_theirs(name)) or sorted(close or ())
        meant = f": did you mean {' or '.join(near)}?" if near else ""
        text = f"there is no option {wrong}{advice or meant}"
    else:
        text = error.format_message().rstrip(".")
        text = text[0].lower() + text[1:]
    return f"error: {text} (see {context.command_path} --help)" if context else f"error: {text}"
