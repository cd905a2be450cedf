"""The number of drafts for requests that come, change and go, by times given by hand."""

import random
from collections.abc import Callable, Sequence

import pytest

from stoop.engine.draft_estimates import expected_tokens
from stoop.engine.draft_policy import AdaptiveDrafts, HeldDrafts
from stoop.engine.eager_costs import EagerCosts
from stoop.engine.step_costs import GraphCosts, StepTimes
from support.served_policies import PolicyServer

EAGER, CAPTURED = (0, 1, 2, 3), (0, 1, 3)
GPU = {"token_seconds": 1e-5, "draft_seconds": 0.0002, "host_seconds": 0.001}


def memory_bound(num_reqs: int, num_drafts: int) -> float:
    """4 ms for up to two tokens, and 1 ms for each of the others; a draft takes 0.4 ms."""
    return 0.004 + 0.001 * max(0, num_reqs * (num_drafts + 1) - 2) + 0.0004 * num_drafts


def on_gpu(num_reqs: int, num_drafts: int) -> float:
    """4 ms, however many tokens; a draft takes 0.2 ms."""
    return 0.004 + 0.0002 * num_drafts


def eager() -> AdaptiveDrafts:
    return AdaptiveDrafts(EagerCosts(EAGER), EAGER, starts_over=True)


def captured(most: int = 16) -> AdaptiveDrafts:
    """most: requests that a graph holds, at least 16"""
    sizes = (1, 2, 4, 8, 16, most)
    times = StepTimes({(size, count): on_gpu(size, count) for size in sizes for count in CAPTURED})
    return AdaptiveDrafts(GraphCosts(times, CAPTURED), CAPTURED)


def upto(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda source: source.randint(low, high)


# ---- a request whose text becomes another kind ----


@pytest.mark.parametrize("num_reqs", [1, 16])
@pytest.mark.parametrize("num_good", [200, 2000])
def test_a_long_answer_whose_drafts_become_bad(num_reqs: int, num_good: int) -> None:
    """What was accepted long ago says little."""
    server = PolicyServer(captured(), num_reqs, on_gpu, **GPU)
    assert server.serve(0.9, num_good).chosen[3] > 0.9 * num_good
    bad = server.serve(0.0, 800)
    assert bad.speed > 0.95 * num_reqs / on_gpu(num_reqs, 0)
    assert bad.chosen[0] > 200


@pytest.mark.parametrize("num_good", [200, 2000])
def test_a_long_answer_whose_drafts_become_bad_without_graphs(num_good: int) -> None:
    server = PolicyServer(eager(), 1, memory_bound)
    server.serve(0.9, num_good)
    assert server.serve(0.0, 800).speed > 0.93 / memory_bound(1, 0)


def test_a_long_answer_whose_drafts_become_good_again() -> None:
    """While there are none, its tokens are computed again now and then to find that out."""
    server = PolicyServer(captured(256), 1, on_gpu, **GPU)
    server.serve(0.9, 200)
    assert server.serve(0.0, 600).chosen[0] > 100
    good = server.serve(0.9, 3000)
    assert good.speed > 0.8 * expected_tokens([0.9] * 3, 3) / on_gpu(1, 3)
    assert server.serve(0.9, 1000).chosen[3] > 990


def test_probes_of_a_long_answer_cost_little() -> None:
    server = PolicyServer(captured(256), 1, on_gpu, **GPU)
    server.serve(0.0, 1000)
    bad = server.serve(0.0, 6000)
    assert server.scheduler.stats.num_computed_again > 0, "there were some"
    assert bad.speed > 0.985 / on_gpu(1, 0)


# ---- short answers ----


@pytest.mark.parametrize(
    ("num_reqs", "prompt_len", "answer_len", "rate"),
    [
        (16, 2, upto(8, 8), 0.7),
        (16, 2, upto(4, 28), 0.4),
        (16, 20, upto(4, 28), 0.7),
        (4, 20, upto(4, 28), 0.7),
        (1, 20, upto(4, 28), 0.7),
    ],
)
def test_costs_become_known_though_hardly_any_step_has_no_prompt(
    num_reqs: int, prompt_len: int, answer_len: Callable[[random.Random], int], rate: float
) -> None:
    def speed(policy: AdaptiveDrafts | HeldDrafts) -> float:
        server = PolicyServer(policy, num_reqs, memory_bound, prompt_len, answer_len)
        return server.serve(rate, 1500).speed

    best = max(speed(HeldDrafts(count)) for count in EAGER)
    assert speed(eager()) > 0.95 * best


@pytest.mark.parametrize("seed", range(4))
def test_prompts_beside_decodes_are_no_part_of_their_load(seed: int) -> None:
    """With three short requests at once, many steps hold one or two decodes."""

    def seconds(num_reqs: int, num_drafts: int) -> float:
        return 0.003 + 0.00125 * num_reqs * (num_drafts + 1) + 0.0006 * num_drafts

    def speed(policy: AdaptiveDrafts | HeldDrafts) -> float:
        length = upto(3, 6)
        server = PolicyServer(policy, 3, seconds, 3, length, draft_seconds=0.0006, seed=seed)
        return server.serve(0.5, 1200).speed

    assert speed(eager()) > 0.94 * max(speed(HeldDrafts(count)) for count in EAGER)


@pytest.mark.parametrize("policy", [eager, captured])
def test_a_request_at_its_last_token_stops_no_drafts(policy: Callable[[], AdaptiveDrafts]) -> None:
    """It gets none, but the next one in its place does, from its first token on."""
    seconds = memory_bound if policy is eager else on_gpu
    costs = {} if policy is eager else GPU
    server = PolicyServer(policy(), 1, seconds, prompt_len=5, answer_len=upto(10, 40), **costs)
    server.serve(0.9, 200)
    assert server.serve(0.9, 1000).chosen[0] == 0


@pytest.mark.parametrize(
    ("policy", "num_reqs", "limits", "answer_len"),
    [
        (captured, 1, (0, 3), upto(35, 45)),
        (captured, 4, (0, 0, 0, 3), upto(35, 45)),
        (captured, 1, (3,), lambda source: source.choice([2, 40])),
        (eager, 1, (0, 3), upto(35, 45)),
    ],
)
def test_requests_that_want_no_drafts_keep_none_from_others(
    policy: Callable[[], AdaptiveDrafts],
    num_reqs: int,
    limits: Sequence[int],
    answer_len: Callable[[random.Random], int],
) -> None:
    """Before them or beside them: what was decided holds for the next one that wants some."""
    seconds = memory_bound if policy is eager else on_gpu
    costs = {} if policy is eager else GPU

    def speed(policy: AdaptiveDrafts | HeldDrafts) -> float:
        server = PolicyServer(policy, num_reqs, seconds, 100, answer_len, limits=limits, **costs)
        return server.serve(0.8, 1500).speed

    assert speed(policy()) > max(speed(HeldDrafts(count)) for count in CAPTURED)


@pytest.mark.parametrize(
    ("num_reqs", "prompt_len", "answer_len", "rate", "best"),
    [
        (64, 100, upto(50, 150), 0.7, 1),
        (64, 500, upto(200, 300), 0.7, 1),
        (256, 512, upto(100, 200), 0.5, 0),
        (32, 1000, upto(50, 100), 0.7, 3),
    ],
)
def test_prompts_beside_decodes_are_no_cost_of_either(
    num_reqs: int,
    prompt_len: int,
    answer_len: Callable[[random.Random], int],
    rate: float,
    best: int,
) -> None:
    """More tokens a step end more requests in it, whose successors' prompts take longer. That
    must not look as if each step took longer anyway, which would speak for more drafts."""

    def seconds(num_reqs: int, num_drafts: int) -> float:
        """As of an 8B model on an H200: bound by memory up to 160 tokens."""
        return 0.0038 * max(1.0, num_reqs * (num_drafts + 1) / 160) + 0.0003 * num_drafts

    def server(policy: AdaptiveDrafts | HeldDrafts) -> PolicyServer:
        costs = {"token_seconds": 2e-5, "draft_seconds": 0.0003, "host_seconds": 0.0007}
        return PolicyServer(policy, num_reqs, seconds, prompt_len, answer_len, **costs)

    sizes = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
    times = StepTimes({(size, count): seconds(size, count) for size in sizes for count in CAPTURED})
    held = {count: server(HeldDrafts(count)).serve(rate, 800).speed for count in CAPTURED}
    served = server(AdaptiveDrafts(GraphCosts(times, CAPTURED), CAPTURED)).serve(rate, 800)
    assert max(held, key=lambda count: held[count]) == best
    assert served.speed > 0.97 * held[best]


def test_requests_that_are_too_short_for_drafts_get_none() -> None:
    server = PolicyServer(captured(), 4, on_gpu, answer_len=upto(2, 2), **GPU)
    assert server.serve(0.9, 100).chosen[0] > 95
