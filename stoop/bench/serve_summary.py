"""From the answers of a load to its figures.

- TTFT: from the start of a request, before a connection is opened, to its first chunk with tokens.
- ITL: a chunk's gap to the one before it, divided evenly among its tokens; one value per token.
  With drafts, a chunk holds all tokens of a step.
- chunk gap: that gap undivided, which is how long a reader waits. vLLM's benchmark calls it ITL.
- TPOT: of a request, the time from its first chunk to its last, per token after the first chunk.
- end to end: from the start of a request to the end of its stream.

Only complete answers count. Percentiles interpolate linearly between values.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from stoop.bench.serve import Load, Outcome
from stoop.bench.serve_stream import Answer
from stoop.config.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
GOODPUT_KEYS = ("ttft", "itl", "tpot", "e2e")
LATE = 0.005  # seconds; a client later than this (99th percentile) spoils its figures
BUSY = 0.9  # of a core; a client busier than this may be what limits the load

Times = dict[str, float] | None  # milliseconds by statistic; None: nothing was measured


@dataclass(frozen=True)
class Summary:
    """The figures of one load."""

    load: Load
    outcome: Outcome
    num_processes: int
    goodput: Mapping[str, float]  # the most milliseconds of each

    @cached_property
    def complete(self) -> list[Answer]:
        return [answer for answer in self.outcome.answers if answer.ok]

    @property
    def seconds(self) -> float:
        """From the first request to the end of the last."""
        answers = self.outcome.answers
        return max(a.end for a in answers) - min(a.start for a in answers) if answers else 0.0

    @property
    def errors(self) -> dict[str, int]:
        return dict(Counter(a.error for a in self.outcome.answers if a.error).most_common())

    @property
    def times(self) -> dict[str, Times]:
        complete = self.complete
        return {
            "ttft_ms": _statistics([a.ttft for a in complete]),
            "itl_ms": _statistics([gap for a in complete for gap in a.token_gaps]),
            "chunk_gap_ms": _statistics([gap for a in complete for gap in a.gaps]),
            "tpot_ms": _statistics([a.tpot for a in complete if a.tpot is not None]),
            "e2e_ms": _statistics([a.e2e for a in complete]),
        }

    @property
    def token_counts(self) -> str:
        """How the tokens of a chunk are known, in one word for the record."""
        complete = self.complete
        if any(a.num_output is None for a in complete):
            return "none"
        if all(a.counted for a in complete):
            return "continuous"
        single = all(abs(a.num_tokens - len(a.arrivals)) <= 1 for a in complete)
        return "chunks" if single else "estimated"

    @property
    def num_good(self) -> int:
        """Complete answers within all limits of the goodput."""
        return sum(is_good(answer, self.goodput) for answer in self.complete)

    @cached_property
    def record(self) -> dict[str, Any]:
        """All figures, by name."""
        load, complete, seconds = self.load, self.complete, self.seconds
        num_output = sum(a.num_tokens for a in complete)
        num_input = sum(a.num_prompt for a in complete)
        num_chunks = sum(len(a.arrivals) for a in complete)
        record: dict[str, Any] = {
            "rate": load.rate,
            "concurrency": load.concurrency,
            "burstiness": load.burstiness if load.rate is not None else None,
            "num_requests": len(self.outcome.answers),
            "num_complete": len(complete),
            "errors": self.errors,
            "seconds": seconds,
            "num_input_tokens": num_input,
            "num_cached_tokens": sum(a.num_cached for a in complete),
            "num_output_tokens": num_output,
            "requests_per_s": len(complete) / seconds if seconds else 0.0,
            "tokens_per_s": num_output / seconds if seconds else 0.0,
            "total_tokens_per_s": (num_input + num_output) / seconds if seconds else 0.0,
            "tokens_per_chunk": num_output / num_chunks if num_chunks else None,
            "token_counts": self.token_counts,
            "num_accepted_drafts": sum(a.num_accepted for a in complete),
            "num_rejected_drafts": sum(a.num_rejected for a in complete),
            "max_open": max_open(self.outcome.answers),
            **self.times,
            "client": self.client,
        }
        if self.goodput:
            good = self.num_good
            record["goodput_per_s"] = good / seconds if seconds else 0.0
            record["goodput_share"] = good / max(1, len(self.outcome.answers))
        return record

    @property
    def client(self) -> dict[str, Any]:
        """How well the client kept up."""
        lags = self.outcome.lags or [0.0]
        return {
            "processes": self.num_processes,
            "lag_p99_ms": float(np.percentile(lags, 99)) * 1000,
            "lag_max_ms": max(lags) * 1000,
            "cpu_share": self.outcome.cpu_seconds / self.outcome.seconds,
        }

    @property
    def warnings(self) -> list[str]:
        """What a reader of the figures must know."""
        found, client = [], self.client
        late, busy = client["lag_p99_ms"] > LATE * 1000, client["cpu_share"] > BUSY
        if late or busy:
            advice = (
                "use more --processes"
                if busy
                else "other programs take its cores, so run it on another machine"
            )
            found.append(
                f"at {self.load.name} the client was late by {client['lag_p99_ms']:.1f} ms (p99) "
                f"and used {client['cpu_share']:.0%} of a core, so latencies are overstated: "
                f"{advice}"
            )
        if self.complete and self.token_counts == "none":
            found.append("the server gives no token counts: every chunk is taken for one token")
        elif self.token_counts == "estimated":
            found.append(
                "the server does not say how many tokens a chunk has: itl assumes that all chunks "
                "of an answer have equally many"
            )
        return found


def is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Whether a complete answer is within the limits, in ms. itl is its own 99th percentile."""
    if "ttft" in limits and answer.ttft * 1000 > limits["ttft"]:
        return False
    if "e2e" in limits and answer.e2e * 1000 > limits["e2e"]:
        return False
    if "tpot" in limits and (answer.tpot or 0.0) * 1000 > limits["tpot"]:
        return False
    gaps = answer.token_gaps if "itl" in limits else []
    return not gaps or float(np.percentile(gaps, 99)) * 1000 <= limits["itl"]


def parse_goodput(text: str) -> dict[str, float]:
    """Read `ttft:200,itl:30`: the most milliseconds that each may take."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition(":")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if name not in GOODPUT_KEYS or not 0 < number < float("inf") or name in limits:
            raise ConfigError(
                f"--goodput {text!r}: use {', '.join(GOODPUT_KEYS)}, each with milliseconds, such "
                "as ttft:200,itl:30"
            )
        limits[name] = number
    return limits


def max_open(answers: Sequence[Answer]) -> int:
    """The most requests that were open at the same time."""
    changes = sorted([(a.start, 1) for a in answers] + [(a.end, -1) for a in answers])
    return int(max(np.cumsum([change for _, change in changes]), default=0))


def _statistics(seconds: Sequence[float]) -> Times:
    if not seconds:
        return None
    values = np.array(seconds) * 1000
    found = {"mean": float(values.mean())}
    found |= {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return found | {"max": float(values.max())}
