"""`stoop generate`: answer prompts and print the speed."""

import dataclasses
import json
import sys
import time
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from stoop.cli.acceptance import print_acceptance
from stoop.cli.gain import measure, print_gain
from stoop.cli.logs import logs_held
from stoop.cli.options import (
    Model,
    check_engine,
    sampling_flags,
    text_engine_flags,
)
from stoop.cli.prompts import read_prompts
from stoop.cli.start import start_llm
from stoop.cli.streams import json_line
from stoop.config.errors import RequestError
from stoop.config.schema import DEFAULT_MODEL
from stoop.core.outputs import RequestOutput
from stoop.core.sampling_params import SamplingParams

WARM_TOKENS = 8


@text_engine_flags
@sampling_flags(temperature=0.0, max_tokens=128)
def generate(
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[
        list[str],
        typer.Option(
            "--prompt",
            "-p",
            help="text to continue; may be repeated; - reads standard input, which is also the "
            "default unless it is a terminal",
        ),
    ] = [],  # noqa: B006
    chat: Annotated[
        bool, typer.Option("--chat", help="apply the model's chat template to the prompt")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object per prompt, then one with metrics")
    ] = False,
    beside_plain: Annotated[
        bool,
        typer.Option(
            "--beside-plain", help="also answer without drafts and print both decode speeds"
        ),
    ] = False,
    engine: dict[str, Any] = {},  # noqa: B006
    sampling: SamplingParams = SamplingParams(),
) -> None:
    """Generate text for one or more prompts and print the speed."""
    check_engine(model, engine)
    if sampling.logprobs is not None and not as_json:
        raise RequestError("--logprobs are printed only in JSON: add --json")
    if beside_plain and as_json:
        raise RequestError("--beside-plain does not print JSON: leave out --json")
    prompts = read_prompts(prompt)
    llm: Any = start_llm(model, engine)
    ready: list[Any] = list(prompts)
    if chat:
        ready = [_render(llm, text) for text in prompts]
    shown = len(ready) == 1 and sampling.n == 1 and not as_json
    if beside_plain:
        _warm_up(llm, ready[0], sampling)
    with logs_held() if shown else nullcontext():  # until the answer and its speed are shown
        outputs, seconds = _answer(llm, ready, sampling, shown)
        if as_json:
            _print_json(outputs, seconds, llm.metrics())
            return
        if not shown:
            _print_answers(prompts, outputs)
        print(_summary(outputs, seconds), file=sys.stderr)
        print_acceptance(outputs, llm.config.schedule.num_drafts)
    if beside_plain and llm.config.spec is None:
        print(
            "there were no drafts, so this is the plain speed (-sc sets a drafter)", file=sys.stderr
        )
    elif beside_plain:
        drafted = measure(lambda: _answer(llm, ready, sampling, shown, again=True)[0], outputs)
        llm = None  # frees its memory for the next engine
        plain = start_llm(model, {**engine, "speculative_config": None})
        undrafted = sampling.replace(num_speculative_tokens=None)
        _warm_up(plain, ready[0], undrafted)
        print_gain(*drafted, *measure(lambda: _answer(plain, ready, undrafted, shown, True)[0]))


def _answer(
    llm: Any, prompts: list[Any], sampling: SamplingParams, stream: bool, again: bool = False
) -> tuple[list[RequestOutput], float]:
    """Return the answers and the seconds they took. again: the streamed answer is already shown"""
    started = time.perf_counter()
    if stream:
        outputs = [_stream(llm, prompts[0], sampling, silent=again)]
    else:
        outputs = llm.generate(prompts, sampling)
    return outputs, time.perf_counter() - started


def _warm_up(llm: Any, prompt: Any, sampling: SamplingParams) -> None:
    """Load and compile what the first use needs, so that it is not part of the comparison.

    The prompt is reversed so that the timed runs find nothing in the prefix cache.
    """
    if isinstance(prompt, str):
        token_ids = llm.get_tokenizer().encode(prompt)
    else:
        token_ids = prompt["prompt_token_ids"]
    brief = sampling.replace(max_tokens=WARM_TOKENS, min_tokens=0, n=1, seed=0)
    llm.generate([token_ids[::-1]], brief, use_tqdm=False)


def _render(llm: Any, text: str) -> dict[str, Any]:
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.render_chat([{"role": "user", "content": text}])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return {"prompt": prompt, "prompt_token_ids": ids}


def _stream(llm: Any, prompt: Any, sampling: SamplingParams, silent: bool) -> RequestOutput:
    """Print an answer as it grows."""
    shown = 0
    output: RequestOutput | None = None
    for output in llm.stream(prompt, sampling):
        text = output.outputs[0].text
        if not silent:
            print(text[shown:], end="", flush=True)
        shown = len(text)
    if not silent:
        print(flush=True)
    assert output is not None
    return output


def _print_answers(prompts: list[str], outputs: list[RequestOutput]) -> None:
    for text, output in zip(prompts, outputs, strict=True):
        for answer in output.outputs:
            print(f"--- answer {answer.index + 1} to {text!r} (ended by {answer.finish_reason})")
            print(answer.text)


def _print_json(outputs: list[RequestOutput], seconds: float, metrics: dict[str, Any]) -> None:
    for output in outputs:
        record = dataclasses.asdict(output)
        times = record.pop("times")
        for answer, completion in zip(record["outputs"], output.outputs, strict=True):
            answer.pop("spec")
            answer |= completion.spec.as_metrics() if completion.spec else {}
        record["ttft_s"] = round(times["first_token"] - times["arrival"], 6)
        record["e2e_s"] = round(times["finished"] - times["arrival"], 6)
        print(json_line(record))
    num_tokens = _num_tokens(outputs)
    print(
        json.dumps(
            {
                "tokens": num_tokens,
                "seconds": round(seconds, 6),
                "tokens_per_s": round(num_tokens / seconds, 3),
                "metrics": metrics,
            }
        )
    )


def _summary(outputs: list[RequestOutput], seconds: float) -> str:
    num_tokens = _num_tokens(outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    first = min(output.times.first_token or 0 for output in outputs)
    wait = first - min(output.times.arrival for output in outputs)
    return (
        f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s "
        f"(prompt tokens: {num_prompt}, first token after {wait * 1000:.0f} ms)"
    )


def _num_tokens(outputs: list[RequestOutput]) -> int:
    return sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
