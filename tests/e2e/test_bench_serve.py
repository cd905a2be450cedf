"""`stoop bench serve` against servers whose every delay is known."""

import json
import socket
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from stoop.bench.serve import Load
from support.scripted_server import DONE, Script, Seen, event, final_usage, refusal, serving

FIRST, GAP, NUM_CHUNKS = 0.06, 0.03, 4
SLACK = 0.25  # seconds; the machine may be busy with other tests


@pytest.fixture
def stoop(stoop: Callable) -> Callable:
    """Runs the command; its exit code and what it wrote."""
    return partial(stoop, "bench", "serve")


def steady(_: int, __: Seen) -> Script:
    """Two tokens in every chunk, at known times."""
    events = [(FIRST, event("ab", 2))]
    events += [(GAP, event("cd", 2 * place)) for place in range(2, NUM_CHUNKS)]
    return Script([*events, (GAP, event("ef", 2 * NUM_CHUNKS, "length")), (0, DONE)])


def instant(_: int, __: Seen) -> Script:
    return Script([(0, event("a", 1)), (0.01, event("b", 2, "stop")), (0, DONE)])


def record_of(shown: str) -> dict:
    return json.loads(shown.splitlines()[-1])


def test_a_closed_loop_gives_the_times_that_the_server_kept(stoop: Callable) -> None:
    with serving(steady) as server:
        args = ["--concurrency", "3", "--num-requests", "7", "--warmup", "2", "--output-len", "8"]
        code, shown, progress = stoop("--url", server.url, *args, "--goodput", "ttft:5000")
    assert code == 0, progress
    record = record_of(shown)
    assert (record["bench"], record["model"], record["url"]) == ("serve", "scripted", server.url)
    (row,) = record["rows"]
    assert (row["num_requests"], row["num_complete"], row["errors"]) == (7, 7, {})
    assert (row["concurrency"], row["rate"], row["max_open"]) == (3, None, 3)
    assert (row["num_output_tokens"], row["num_input_tokens"]) == (7 * 8, 7 * 5)
    assert (row["token_counts"], row["tokens_per_chunk"]) == ("continuous", 2.0)
    last = FIRST + (NUM_CHUNKS - 1) * GAP
    for name, least in (
        ("ttft_ms", FIRST),
        ("chunk_gap_ms", GAP),
        ("itl_ms", GAP / 2),
        ("tpot_ms", GAP / 2),
        ("e2e_ms", last),
    ):
        for statistic in ("p50", "mean"):
            # Half a millisecond: a sleep may end that much early.
            assert least - 0.0005 <= row[name][statistic] / 1000 < least + SLACK, (name, row[name])
    assert row["seconds"] >= 3 * last - 0.001  # three rounds for seven requests
    assert row["tokens_per_s"] == pytest.approx(56 / row["seconds"], rel=1e-3)
    assert row["requests_per_s"] == pytest.approx(7 / row["seconds"], rel=1e-3)
    assert row["goodput_share"] == 1.0
    assert len(server.seen) == 7 + 2 + 1  # warm-up, and a first request that tries usage
    prompts = [json.dumps(seen.body["messages"]) for seen in server.seen]
    assert len(set(prompts[3:])) == 7 and not set(prompts[3:]) & set(prompts[:3])
    assert server.seen[0].path == "/v1/chat/completions"
    assert "time to first token" in shown and "goodput:" in shown
    assert server.num_connections <= 1 + 1 + 2 + 3  # models, first, warm-up, clients


def test_an_open_loop_sends_when_the_seed_says(stoop: Callable) -> None:
    arrivals = Load(rate=12.0, num_requests=12, burstiness=0.5, seed=9).arrivals()
    assert arrivals[-1] > 2 * SLACK
    with serving(steady) as server:
        args = ["--rate", "12", "--num-requests", "12", "--burstiness", "0.5", "--seed", "9"]
        code, shown, progress = stoop("--url", server.url, *args, "--warmup", "0")
    assert code == 0, progress
    (row,) = record_of(shown)["rows"]
    assert (row["rate"], row["burstiness"], row["num_complete"]) == (12.0, 0.5, 12)
    assert row["max_open"] > 1
    seen = [each.time - server.seen[1].time for each in server.seen[1:]]
    assert seen == pytest.approx(arrivals, abs=SLACK)


def test_several_loads_run_in_turn(stoop: Callable, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    drawn = ["--plot", str(plot)] if find_spec("matplotlib") else []
    with serving(instant) as server:
        args = ["--url", server.url, "--concurrency", "1,4", "--num-requests", "8"]
        args += ["--endpoint", "completions", "--random", "tokens", "--vocab-size", "100"]
        args += ["--temperature", "0", "--ignore-eos", "--body", '{"top_k": 3}', "--out", str(out)]
        code, shown, progress = stoop(*args, "--input-len", "6", "--api-key", "secret", *drawn)
    assert code == 0, progress
    record = record_of(shown)
    assert json.loads(out.read_text()) == record and "secret" not in shown + progress
    assert plot.exists() == bool(drawn)
    assert [row["concurrency"] for row in record["rows"]] == [1, 4]
    assert [row["max_open"] for row in record["rows"]] == [1, 4]
    assert "all loads" in shown and "4 clients ..." in progress
    assert record["extra"] == {"temperature": 0.0, "ignore_eos": True, "top_k": 3}
    last = server.seen[-1]
    assert last.path == "/v1/completions" and last.headers["authorization"] == "Bearer secret"
    assert {**last.body, **record["extra"]} == last.body
    ids = last.body["prompt"]
    assert len(ids) == 6 and all(25 <= each <= 75 for each in ids)
    prompts = [tuple(seen.body["prompt"]) for seen in server.seen[5:]]
    assert len(set(prompts)) == 16  # none again in the second load


def test_a_duration_ends_a_closed_loop(stoop: Callable) -> None:
    with serving(instant) as server:
        args = ["--concurrency", "2", "--duration", "0.4", "--warmup", "0"]
        code, shown, _ = stoop("--url", server.url, *args)
    (row,) = record_of(shown)["rows"]
    assert code == 0 and row["num_complete"] == row["num_requests"] > 2
    assert 0.3 < row["seconds"] < 0.4 + SLACK  # ends with the last answer


def test_questions_are_asked_in_turn(stoop: Callable, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"turns": ["first", "and then?"]}\n{"prompt": "second"}\n')
    with serving(instant) as server:
        args = ["--questions", str(path), "--num-requests", "4", "--concurrency", "1"]
        code, _, progress = stoop("--url", server.url, *args, "--warmup", "0")
    assert code == 0, progress
    asked = [seen.body["messages"][0]["content"] for seen in server.seen[1:]]
    assert asked == ["first", "second", "first", "second"]


def test_errors_are_counted_by_kind(stoop: Callable) -> None:
    stream_error = b'data: {"error": {"message": "the request failed"}}\n\n'
    scripts = [
        Script([(0, event("a", 1)), (0, event("b", 2, "stop")), (0, DONE)]),
        refusal(429, "the queue is full"),
        refusal(503, "the engine restarts"),
        Script([(0, event("a", 1))], breaks_off=True),
        Script([(0, event("a", 1)), (0, stream_error)]),
        Script(breaks_off=True),
        Script([(0, event("a", 1)), (30, DONE)]),
        refusal(429, "the queue is full"),
    ]

    def answering(number: int, _: Seen) -> Script:
        return scripts[0] if number == 0 else scripts[(number - 1) % len(scripts)]

    with serving(answering) as server:
        args = ["--num-requests", "8", "--concurrency", "1", "--warmup", "0", "--timeout", "1"]
        code, shown, progress = stoop("--url", server.url, *args, "--goodput", "ttft:900")
    assert code == 0, progress
    (row,) = record_of(shown)["rows"]
    kinds = {"429": 2, "503": 1, "broken stream": 1, "error in stream": 1, "connection": 1}
    assert row["errors"] == kinds | {"timeout": 1}
    assert (row["num_requests"], row["num_complete"], row["goodput_share"]) == (8, 1, 0.125)
    assert "error 429: 2 requests (the queue is full)" in shown


def test_nothing_answered_is_a_failure(stoop: Callable) -> None:
    def answering(number: int, _: Seen) -> Script:
        return instant(0, _) if number == 0 else refusal(500, "broken")

    with serving(answering) as server:
        args = ["--num-requests", "2", "--warmup", "0"]
        code, shown, progress = stoop("--url", server.url, *args)
    assert code == 1 and "no request was answered" in progress
    assert record_of(shown)["rows"][0]["ttft_ms"] is None


@pytest.mark.parametrize("accepted", [1, 0])
def test_a_server_that_refuses_running_counts_is_asked_for_less(
    accepted: int, stoop: Callable
) -> None:
    """accepted: fields of stream_options"""

    def answering(_: int, seen: Seen) -> Script:
        if len(seen.body.get("stream_options", {})) > accepted:
            return refusal(400, "stream_options: unknown field")
        last = [(0.0, final_usage(4))] if accepted else []
        return Script([(0, event("ab")), (0.01, event("cd", finish="stop")), *last, (0, DONE)])

    with serving(answering) as server:
        code, shown, progress = stoop("--url", server.url, "--num-requests", "3", "--warmup", "0")
    assert code == 0, progress
    (row,) = record_of(shown)["rows"]
    assert row["num_complete"] == 3
    assert row["token_counts"] == ("estimated" if accepted else "none")
    assert row["num_output_tokens"] == (12 if accepted else 6)
    assert ("equally many" if accepted else "no token counts") in progress


def test_a_load_in_two_processes_sends_every_request_once(stoop: Callable) -> None:
    with serving(instant) as server:
        args = ["--concurrency", "4", "--num-requests", "9", "--processes", "2", "--warmup", "0"]
        code, shown, progress = stoop("--url", server.url, *args)
    assert code == 0, progress
    (row,) = record_of(shown)["rows"]
    assert (row["num_complete"], row["client"]["processes"]) == (9, 2)
    prompts = {json.dumps(seen.body["messages"]) for seen in server.seen[1:]}
    assert len(prompts) == 9 and len(server.seen) == 10


def test_no_server_is_one_sentence(stoop: Callable) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        for extra in ([], ["--model", "m"]):
            code, shown, err = stoop("--url", url, *extra)
            assert code == 2 and shown == ""
            (line,) = [text for text in err.splitlines() if text.startswith("error: ")]
            assert f"no server can be reached at {url} (" in line and "correct --url" in line


@pytest.mark.parametrize(
    ("script", "extra", "pattern"),
    [
        (refusal(401, "wrong key"), [], "refuses a request without an API key (401: wrong key)"),
        (refusal(401, "wrong key"), ["--api-key", "x"], "refuses the --api-key given"),
        (refusal(404, "no such model"), [], "not found (404: no such model): correct --url"),
        (refusal(400, "too long"), [], "cannot be measured (400: too long)"),
        (refusal(503, "starting"), [], "cannot be measured (503: starting)"),
        (Script(body=b"{}", content_type="application/json"), [], "(no event stream: {})"),
    ],
)
def test_a_server_that_refuses_the_first_request_is_one_sentence(
    script: Script, extra: list[str], pattern: str, stoop: Callable
) -> None:
    with serving(lambda *_: script) as server:
        code, _, err = stoop("--url", server.url, *extra)
    assert code == 2
    (line,) = [text for text in err.splitlines() if text.startswith("error: ")]
    assert pattern in line


def test_a_server_without_models_needs_a_name(stoop: Callable) -> None:
    with serving(instant, models=()) as server:
        code, _, err = stoop("--url", server.url)
        assert code == 2 and "names no model: give one with --model" in err
        code, _, err = stoop("--url", server.url, "--model", "mine", "--num-requests", "1")
        assert code == 0 and server.seen[-1].body["model"] == "mine"


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        (["--url", "nowhere"], "use http://host:port"),
        (["--rate", "1", "--concurrency", "2"], "give one of them"),
        (["--rate", "0"], "such as 1,2,4"),
        (["--rate", "fast"], "such as 1,2,4"),
        (["--concurrency", "0"], "such as 1,8"),
        (["--burstiness", "2"], "--burstiness needs --rate"),
        (["--burstiness", "-1", "--rate", "2"], "--burstiness -1.0: use a number above 0"),
        (["--num-requests", "0"], "--num-requests 0: use a number above 0"),
        (["--duration", "nan"], "--duration nan: use a number above 0"),
        (["--warmup", "-1"], "--warmup -1: use 0 or more"),
        (["--endpoint", "embeddings"], "use chat or completions"),
        (["--random", "bytes"], "use words or tokens"),
        (["--random", "tokens"], "needs --endpoint completions"),
        (["--body", "{"], "--body is not JSON"),
        (["--body", "[]"], "--body []: use an object"),
        (["--body", '{"stream": false}'], "latencies need streams"),
        (["--goodput", "fast"], "such as ttft:200,itl:30"),
        (["--questions", "/no.jsonl"], "--questions /no.jsonl does not exist"),
        (["--out", "/no/such/folder/x.json"], "does not exist"),
        (["--api-key", "a\nb"], "printable ASCII"),
    ],
)
def test_what_cannot_be_measured_is_refused(args: list[str], pattern: str, stoop: Callable) -> None:
    code, _, err = stoop(*args)
    assert code == 2
    (line,) = [text for text in err.splitlines() if text.startswith("error: ")]
    assert pattern in line
