"""`stoop compare`: are answers with a drafter those without one?"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from stoop.cli.options import DEFAULT_MODEL, Model, text_engine_flags
from stoop.cli.progress import StageProgress
from stoop.config.errors import ConfigError

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain why the sky is blue.",
    "List five animals that can fly.",
    "def fibonacci(n):",
    "Translate to Spanish: good morning, my friend.",
    "Count from one to thirty in words.",
    "Repeat this line three times: the quick brown fox jumps over the lazy dog.",
)


@text_engine_flags
def compare(
    model: Model = DEFAULT_MODEL,
    prompts: Annotated[
        Path | None, typer.Option(help="a text file with a prompt a line; default: eight questions")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="of each answer")] = 64,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Greedy answers with the drafter (-sc) beside those of plain decoding, alone and in a batch.

    Prints the share of equal answers and, for each that parts, how far the best token led there,
    beside the noise of such a lead as measured where answers agree. The last line is JSON; the exit
    code is 1 if an answer parts at a lead beyond the noise.
    """
    from stoop.check.answers import check_answers
    from stoop.config.speculation import parse_speculation
    from stoop.engine.drafter import spelled_out
    from stoop.worker.device import find_device

    drafter = spelled_out(engine["speculative_config"], model, find_device(engine["device"]))
    if parse_speculation(drafter) is None:
        raise ConfigError("compare needs a drafter to compare with: give one with -sc")
    engine = {**engine, "speculative_config": drafter}
    asked = _read(prompts) if prompts else list(QUESTIONS)
    with StageProgress() as report:
        found = check_answers(model, engine, asked, max_tokens, report)
    print(f"{found.num_equal} of {found.num_answers} answers equal, {found.num_tokens} tokens")
    print(f"noise of the lead of the best token over the second: {found.noise:.2g}")
    for each in found.divergences:
        state = "within noise" if each.gap <= found.noise else "NOT EXPLAINED"
        print(f"prompt {each.prompt + 1}, token {each.position + 1}: lead {each.gap:.4f}, {state}")
    numbers = {
        "answers": found.num_answers,
        "equal": found.num_equal,
        "tokens": found.num_tokens,
        "noise": found.noise,
        "leads_at_divergences": [each.gap for each in found.divergences],
        "unexplained": len(found.unexplained),
    }
    print(json.dumps(numbers))
    if found.unexplained:
        raise typer.Exit(1)


def _read(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise ConfigError(
            f"--prompts {path} does not exist: name a file of yours, with a prompt a line"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from None
    found = [line for line in lines if line.strip()]
    if not found:
        raise ConfigError(f"--prompts {path} is empty: write a prompt a line")
    return found
