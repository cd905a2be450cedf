"""The parts of `stoop bench serve`, on times and bytes that are known exactly."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from stoop.bench.serve import Load, Outcome
from stoop.bench.serve_http import BrokenExchange, Connection, Pool, Server
from stoop.bench.serve_prompts import USAGE, Prompts
from stoop.bench.serve_stream import Answer, AnswerStream
from stoop.bench.serve_summary import Summary, is_good, max_open, parse_goodput
from stoop.config.errors import ConfigError
from support.scripted_server import DONE, event, final_usage

EVENTS = [
    (0.10, event("", 0)),  # the role: no token yet
    (0.20, event("a", 1)),
    (0.25, event("bcd", 4)),
    (0.35, event("ef", 6)),
    (0.36, event("", 7, "stop")),  # the end-of-text token has no text
]


def stream(events: list[tuple[float, bytes]], ending: bytes = DONE) -> Answer:
    """The answer that arrives as these events, by a clock that starts at 0."""
    answer = Answer(0)
    taking = AnswerStream(answer)
    taking.start(200, "text/event-stream; charset=utf-8")
    for now, data in events:
        taking.feed(data, now)
    taking.feed(ending, events[-1][0] if events else 0.0)
    taking.finish()
    answer.end = (events[-1][0] if events else 0.0) + 0.01
    return answer


# ---- one answer ----


def test_a_chunk_shares_its_gap_among_its_tokens() -> None:
    answer = stream(EVENTS)
    assert answer.ok and answer.counted and answer.counts == [1, 3, 2, 1]
    assert answer.ttft == pytest.approx(0.20)
    assert answer.gaps == pytest.approx([0.05, 0.10, 0.01])
    assert answer.token_gaps == pytest.approx([0.05 / 3] * 3 + [0.05] * 2 + [0.01])
    assert sum(answer.token_gaps) == pytest.approx(sum(answer.gaps))
    assert answer.tpot == pytest.approx((0.36 - 0.20) / 6)
    assert answer.e2e == pytest.approx(0.37)
    assert (answer.num_tokens, answer.num_prompt) == (7, 5)


def test_without_running_counts_chunks_have_equally_many_tokens() -> None:
    events = [(0.1, event("a")), (0.2, event("bc")), (0.4, event("d", finish="length"))]
    answer = stream([*events, (0.4, final_usage(6))])
    assert answer.ok and not answer.counted and answer.num_tokens == 6
    assert answer.token_gaps == pytest.approx([0.05, 0.10])  # two tokens in each
    assert answer.tpot == pytest.approx(0.3 / 5)
    bare = stream(events)
    assert bare.num_output is None and bare.num_tokens == 3
    assert bare.token_gaps == pytest.approx([0.1, 0.2])


def test_tokens_whose_text_comes_in_several_chunks_count_once() -> None:
    """A server may count tokens in the chunk with the role, or write one token as two pieces."""
    events = [
        (0.1, event("", 1)),
        (0.11, event("a", 1)),
        (0.2, event("b", 3)),
        (0.21, event("c", 3)),
    ]
    answer = stream([*events, (0.3, event("d", 4, "stop")), (0.3, final_usage(4))])
    assert answer.counts == [1, 2, 1] and answer.counted
    assert answer.token_gaps == pytest.approx([0.05, 0.05, 0.1])


def test_an_answer_of_one_chunk_has_no_gaps() -> None:
    answer = stream([(0.1, event("a", 1, "length"))])
    assert answer.ok and answer.tpot is None and answer.token_gaps == []


def test_drafts_and_cached_tokens_are_taken_over() -> None:
    drafts = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 4}
    usage = final_usage(
        2, completion_tokens_details=drafts, prompt_tokens_details={"cached_tokens": 2}
    )
    answer = stream([(0.1, event("a")), (0.2, event("b", finish="stop")), (0.2, usage)])
    assert (answer.num_accepted, answer.num_rejected, answer.num_cached) == (3, 4, 2)


@pytest.mark.parametrize(
    ("chunk", "counts"),
    [
        ({"choices": [{"text": "a", "finish_reason": None}]}, True),  # completions
        ({"choices": [{"delta": {"reasoning_content": "a"}}]}, True),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, True),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, False),
        ({"choices": []}, False),
    ],
)
def test_what_counts_as_a_chunk_with_tokens(chunk: dict[str, Any], counts: bool) -> None:
    answer = stream([(0.1, f"data: {json.dumps(chunk)}\n\n".encode())])
    assert bool(answer.arrivals) == counts


@pytest.mark.parametrize(
    ("events", "ending", "error", "detail"),
    [
        ([(0.1, event("a", 1))], b"", "broken stream", ""),
        ([], DONE, "no tokens", ""),
        ([(0.1, b"data: {nonsense\n\n")], DONE, "broken stream", "JSON"),
        ([(0.1, b"data: [1]\n\n")], DONE, "broken stream", "JSON object"),
        ([(0.1, b'data: {"choices": [5]}\n\n')], DONE, "broken stream", "shape"),
        ([(0.1, b'data: {"error": {"message": "no room"}}\n\n')], DONE, "error in stream", "no r"),
    ],
)
def test_streams_that_are_not_answers(
    events: list[tuple[float, bytes]], ending: bytes, error: str, detail: str
) -> None:
    answer = stream(events, ending)
    assert answer.error == error and detail in answer.detail


@pytest.mark.parametrize(
    ("status", "kind", "body", "error", "detail"),
    [
        (429, "application/json", b'{"error": {"message": "too\\nmany"}}', "429", "too many"),
        (422, "application/json", b'{"detail": "wrong"}', "422", "wrong"),
        (502, "text/html", b"<p>bad gateway</p>", "502", "bad gateway"),
        (200, "application/json", b"{}", "no event stream", ""),
    ],
)
def test_refusals_keep_their_message(
    status: int, kind: str, body: bytes, error: str, detail: str
) -> None:
    taking = AnswerStream(Answer(0))
    taking.start(status, kind)
    taking.feed(body, 0.1)
    taking.finish()
    assert taking.answer.error == error and detail in taking.answer.detail


# ---- HTTP ----


class Wire:
    """Stands in for a transport; the test plays the server."""

    def __init__(self) -> None:
        self.sent, self.closed = b"", False

    def write(self, data: bytes) -> None:
        self.sent += data

    def abort(self) -> None:
        self.closed = True


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def receive(pieces: list[bytes], ends: bool = False) -> tuple[Answer, Connection]:
    """An exchange in which the server sends these pieces. ends: then it closes the connection"""

    async def exchange() -> tuple[Answer, Connection]:
        connection = Connection()
        connection.connection_made(Wire())  # type: ignore[arg-type]
        answer = Answer(0)
        taking = AnswerStream(answer)
        waiting = asyncio.ensure_future(connection.exchange(b"GET", taking))
        await asyncio.sleep(0)
        for piece in pieces:
            connection.data_received(piece)
        if ends:
            connection.connection_lost(None)
        async with asyncio.timeout(5):
            await waiting
        taking.finish()
        return answer, connection

    return asyncio.run(exchange())


BODY = b"".join(data for _, data in EVENTS) + DONE


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_however_the_bytes_are_cut_the_answer_is_the_same(size: int, newline: bytes) -> None:
    body = BODY.replace(b"\n", newline)
    cuts = [body[at : at + 50] for at in range(0, len(body), 50)]
    for whole, ends in (
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(*cuts), False),
        (HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body, False),
        (HEAD + b"\r\n" + body, True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"\r\n" + body, True),
    ):
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        answer, connection = receive(pieces, ends)
        assert answer.ok and answer.counts == [1, 3, 2, 1]
        assert connection.reusable == (not ends)


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "other than HTTP"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "other than HTTP"),
        (HEAD + b"Content-Length: x\r\n\r\n", "other than HTTP"),
        (b"x" * 70_000, "headers without an end"),
    ],
)
def test_what_is_not_http_is_said(sent: bytes, problem: str) -> None:
    with pytest.raises(BrokenExchange, match=problem):
        receive([sent])


def test_a_connection_that_breaks_off_is_said() -> None:
    with pytest.raises(BrokenExchange, match="broke off"):
        receive([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nabc"], ends=True)


def test_a_connection_that_the_server_will_close_is_not_used_again() -> None:
    _, connection = receive([HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\n"])
    assert not connection.reusable


@pytest.mark.parametrize(("num_bytes", "again"), [(0, True), (5, False)])
def test_a_connection_that_was_closed_while_idle_is_replaced(num_bytes: int, again: bool) -> None:
    """Once the server has begun to answer, a request must not be sent twice."""

    class Stale(Connection):
        async def exchange(self, request: bytes, sink: Any) -> None:
            self.num_bytes, self.reusable = num_bytes, False
            raise BrokenExchange("the connection broke off")

    class Fresh(Connection):
        async def exchange(self, request: bytes, sink: Any) -> None:
            sink.append(request)

    class Between(Pool):
        async def _connect(self) -> Connection:
            return Fresh()

    pool = Between(Server.parse("http://x", None))
    pool._idle.append(Stale())
    sent: Any = []
    if again:
        asyncio.run(pool.exchange(b"request", sent))
        assert sent == [b"request"]
    else:
        with pytest.raises(BrokenExchange):
            asyncio.run(pool.exchange(b"request", sent))


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, False, "")),
        ("http://localhost:81/v1/", ("localhost", 81, False, "")),
        ("https://example.org/openai/v1", ("example.org", 443, True, "/openai")),
        ("http://[::1]:8000", ("::1", 8000, False, "")),
    ],
)
def test_urls(url: str, found: tuple[str, int, bool, str]) -> None:
    server = Server.parse(url, "key")
    assert (server.host, server.port, server.tls, server.prefix) == found
    request = server.request("/v1/models", b"{}").decode()
    assert request.startswith(f"POST {found[3]}/v1/models HTTP/1.1\r\n")
    assert "\r\nAuthorization: Bearer key\r\n" in request and request.endswith("\r\n\r\n{}")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "x"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="use http://host:port"):
        Server.parse(url, None)


def test_a_key_cannot_add_headers() -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        Server.parse("http://x", "a\r\nX: y")


# ---- loads ----


def test_arrivals_are_poisson_and_follow_the_seed() -> None:
    load = Load(rate=20.0, num_requests=4000, seed=3)
    arrivals = load.arrivals()
    assert arrivals == load.arrivals() != replace(load, seed=4).arrivals()
    assert arrivals[0] == 0.0 and len(arrivals) == 4000
    assert stats.kstest(np.diff(arrivals), "expon", args=(0, 1 / 20)).pvalue > 0.01


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_changes_the_spread_of_gaps_and_not_their_mean(burstiness: float) -> None:
    load = Load(rate=50.0, num_requests=20_000, burstiness=burstiness, seed=1)
    gaps = np.diff(load.arrivals())
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_duration_ends_arrivals() -> None:
    arrivals = Load(rate=100.0, duration=2.0).arrivals()
    assert 150 < len(arrivals) < 260 and max(arrivals) < 2.0
    few = Load(rate=100.0, duration=2.0, num_requests=10).arrivals()
    assert few == arrivals[:10]


def test_bodies_follow_seed_and_number() -> None:
    prompts = Prompts("m", chat=True, output_len=9, input_len=12, seed=1, usage=USAGE[0])
    body = json.loads(prompts.body(3))
    (message,) = body["messages"]
    assert len(message["content"].split()) == 12
    assert (body["model"], body["max_tokens"], body["stream"]) == ("m", 9, True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert prompts.body(3) == prompts.body(3) != prompts.body(4)
    assert replace(prompts, seed=2).body(3) != prompts.body(3)
    ids = replace(prompts, chat=False, token_ids=range(10, 20), extra={"max_tokens": 1})
    body = json.loads(ids.body(0))
    assert len(body["prompt"]) == 12 and set(body["prompt"]) <= set(range(10, 20))
    assert body["max_tokens"] == 1 and prompts.path != ids.path == "/v1/completions"
    asked = [[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]]
    assert json.loads(replace(prompts, questions=asked).body(7))["messages"] == asked[0]
    assert json.loads(replace(ids, questions=asked).body(7))["prompt"] == "s\n\nu"


# ---- figures ----


def answer_of(ttft: float, gap: float, num_tokens: int = 11, start: float = 0.0) -> Answer:
    arrivals = [start + ttft + place * gap for place in range(num_tokens)]
    answer = Answer(0, start=start, end=arrivals[-1], arrivals=arrivals)
    answer.counts, answer.num_output, answer.num_prompt = [1] * num_tokens, num_tokens, 5
    return answer


def summary_of(answers: list[Answer], goodput: str | None = None) -> Summary:
    limits = parse_goodput(goodput) if goodput else {}
    return Summary(Load(concurrency=1), Outcome(answers, [0.001] * 100, 0.5, 2.0), 1, limits)


def test_percentiles() -> None:
    record = summary_of([answer_of(n / 1000, 0.002) for n in range(1, 101)]).record
    ttft = record["ttft_ms"]
    assert ttft["mean"] == pytest.approx(50.5) and ttft["p50"] == pytest.approx(50.5)
    assert ttft["p90"] == pytest.approx(90.1) and ttft["p95"] == pytest.approx(95.05)
    assert ttft["p99"] == pytest.approx(99.01) and ttft["max"] == pytest.approx(100)
    for name in ("itl_ms", "chunk_gap_ms", "tpot_ms"):
        assert record[name]["p50"] == record[name]["p99"] == pytest.approx(2)
    assert record["e2e_ms"]["max"] == pytest.approx(120)
    assert record["token_counts"] == "continuous" and record["tokens_per_chunk"] == 1
    assert record["client"] == {
        "processes": 1,
        "lag_p99_ms": pytest.approx(1),
        "lag_max_ms": pytest.approx(1),
        "cpu_share": 0.25,
    }


def test_throughput_counts_complete_answers_over_the_whole_time() -> None:
    failed = Answer(2, start=0.5, end=4.0, error="503", arrivals=[0.6])
    summary = summary_of([answer_of(0.5, 0.05), answer_of(0.5, 0.05, start=1.0), failed])
    record = summary.record
    assert record["seconds"] == pytest.approx(4.0)
    assert (record["num_requests"], record["num_complete"]) == (3, 2)
    assert record["errors"] == {"503": 1} and record["max_open"] == 2
    assert record["requests_per_s"] == pytest.approx(0.5)
    assert record["tokens_per_s"] == pytest.approx(22 / 4)
    assert record["total_tokens_per_s"] == pytest.approx(32 / 4)
    assert "goodput_per_s" not in record


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        ("ttft:200", 3 / 4),  # the fast, the slow-spoken and the one that stalls
        ("ttft:200,itl:30", 1 / 4),
        ("itl:30", 2 / 4),
        ("tpot:30", 3 / 4),
        ("e2e:601", 3 / 4),
        ("ttft:1", 0.0),
    ],
)
def test_goodput(limits: str, share: float) -> None:
    stalls = answer_of(0.1, 0.01)
    stalls.arrivals = [*stalls.arrivals[:-1], stalls.arrivals[-1] + 0.15]
    stalls.end = stalls.arrivals[-1]
    answers = [answer_of(0.1, 0.02), answer_of(0.1, 0.05), answer_of(0.5, 0.02), stalls]
    record = summary_of(answers, limits).record
    assert record["goodput_share"] == pytest.approx(share)
    assert record["goodput_per_s"] == pytest.approx(4 * share / record["seconds"])


def test_failed_answers_are_never_good() -> None:
    failed = Answer(0, start=0.0, end=0.1, error="timeout")
    record = summary_of([answer_of(0.1, 0.01), failed], "ttft:200").record
    assert record["goodput_share"] == 0.5
    assert is_good(answer_of(0.1, 0.01, num_tokens=1), {"itl": 1.0, "tpot": 1.0})


def test_nothing_complete_has_no_times() -> None:
    record = summary_of([Answer(0, start=0.0, end=0.1, error="429")], "ttft:1").record
    assert record["ttft_ms"] is record["itl_ms"] is None and record["tokens_per_s"] == 0
    assert summary_of([]).record["num_requests"] == 0


def test_the_most_open_at_once() -> None:
    times = [(0, 2), (1, 3), (1.5, 1.6), (3, 4)]  # the last begins as the second ends
    assert max_open([Answer(0, start=a, end=b) for a, b in times]) == 3
    assert max_open([]) == 0


def test_a_late_client_and_missing_counts_are_said() -> None:
    assert summary_of([answer_of(0.1, 0.01)]).warnings == []
    late = Summary(Load(rate=5), Outcome([answer_of(0.1, 0.01)], [0.02] * 9, 1, 2), 1, {})
    (line,) = late.warnings
    assert "late by 20.0 ms" in line and "another machine" in line
    busy = replace(late, outcome=Outcome(late.outcome.answers, [0.02] * 9, 1.9, 2))
    assert "used 95% of a core" in busy.warnings[0] and "--processes" in busy.warnings[0]
    uncounted = answer_of(0.1, 0.01)
    uncounted.num_output, uncounted.counts = None, [0] * 11
    assert summary_of([uncounted]).token_counts == "none"
    uncounted.num_output = 12
    assert summary_of([uncounted]).token_counts == "chunks"
    uncounted.num_output = 30
    assert "equally many" in summary_of([uncounted]).warnings[0]


@pytest.mark.parametrize("text", ["", "ttft", "ttft:x", "ttft:-1", "speed:3", "ttft:1,ttft:2"])
def test_goodput_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="such as ttft:200,itl:30"):
        parse_goodput(text)
