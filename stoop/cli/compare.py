"""`stoop compare`: compare answers with and without a drafter."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from stoop.cli.options import Model, check_engine, text_engine_flags
from stoop.cli.progress import StageProgress
from stoop.config.errors import ConfigError
from stoop.config.resolve import make_options
from stoop.config.schema import DEFAULT_MODEL
from stoop.config.speculation import asks_for_auto, parse_speculation

NO_DRAFTER = "compare needs a drafter: give one with -sc"
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
        Path | None,
        typer.Option(help="text file with one prompt per line; default: eight built-in questions"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="maximum length of an answer, in tokens")
    ] = 64,
    engine: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Check that greedy answers with a drafter (-sc) equal those of plain decoding.

    Each prompt is answered alone and in a batch. Where two answers differ, the command prints the
    lead of the best token over the second best in log probability, and compares it with the
    numerical noise of that lead, measured where the answers agree. The last line is JSON; the exit
    code is 1 if an answer differs where the lead exceeds the noise.
    """
    check_engine(model, engine)
    given = engine["speculative_config"]
    if not asks_for_auto(given) and parse_speculation(given) is None:
        raise ConfigError(NO_DRAFTER)
    asked = _read(prompts) if prompts else list(QUESTIONS)
    from stoop.check.answers import check_answers
    from stoop.engine.choose_drafter import expand_auto
    from stoop.worker.device import find_device

    with StageProgress() as report:
        drafter = expand_auto(make_options(model, engine), find_device(engine["device"]), report)
        if parse_speculation(drafter) is None:
            raise ConfigError(NO_DRAFTER)
        engine = {**engine, "speculative_config": drafter}
        found = check_answers(model, engine, asked, max_tokens, report)
    print(f"{found.num_equal} of {found.num_answers} answers equal, {found.num_tokens} tokens")
    print(f"noise in the lead of the best token over the second best: {found.noise:.2g}")
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
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(
            f"--prompts {path} does not exist: give a text file with one prompt per line"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from None
    found = [line for line in lines if line.strip()]
    if not found:
        raise ConfigError(f"--prompts {path} is empty: write one prompt per line")
    return found
