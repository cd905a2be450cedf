"""The page and the metrics of a real `stoop serve` process."""

import json
import os
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from support.server import ServerProcess, write_served_model

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRAFTER = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
KEY = "a-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = write_served_model(tmp_path_factory.mktemp("served") / "tiny-model")
    forget_context(model / "model.safetensors")
    with ServerProcess(model, "-sc", json.dumps(DRAFTER), "--api-key", KEY) as found:
        yield found


def forget_context(file: Path) -> None:
    """Make a model whose next token follows from the last one alone: soon it repeats itself, and
    looking back predicts it."""
    weights = load_file(file)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            weights[name][-1] = 0.0  # the end of text, which would come too early
    save_file(weights, file, {"format": "pt"})


@pytest.fixture(scope="module")
def page(server: ServerProcess) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("needs the system's Chromium")
    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"] if os.getuid() == 0 else []
        )
        page = browser.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(server.url)
        yield page
        browser.close()
    assert problems == []


def ask(server: ServerProcess, path: str, body: dict[str, Any] | None = None) -> bytes:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(server.url + path, data, headers)
    with urllib.request.urlopen(asked, timeout=60) as response:
        return response.read()


def samples(server: ServerProcess) -> dict[str, float]:
    """By name, summed over labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(ask(server, "/metrics").decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_the_page_asks_for_a_key_and_chats(server: ServerProcess, page: Page) -> None:
    expect(page.locator("#key-form")).to_be_visible()
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("tiny-model")
    page.click("#settings summary")
    page.fill("#max-tokens", "60")
    page.fill("#prompt", "falcon")
    page.click("#both")
    expect(page.locator(".answer .copy")).to_have_count(2)
    expect(page.locator(".verdict")).to_contain_text("Both texts are the same")
    assert page.locator("[data-mode=with] .tok").count() > 0
    assert page.locator("[data-mode=without] .tok").count() == 0
    for mode in ("without", "with"):
        asked = {
            "model": "tiny-model",
            "messages": [{"role": "user", "content": "falcon"}],
            "temperature": 0,
            "max_tokens": 60,
        } | ({"num_speculative_tokens": 0} if mode == "without" else {})
        whole = json.loads(ask(server, "/v1/chat/completions", asked))
        shown = page.locator(f"[data-mode={mode}]")
        assert shown.get_attribute("data-text") == whole["choices"][0]["message"]["content"]
        usage = whole["usage"]
        expect(shown).to_contain_text(f"{usage['completion_tokens']} tokens")
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    share = round(100 * accepted / usage["completion_tokens"])
    assert accepted > 0
    expect(shown).to_contain_text(f"{share} % from drafts")
    expect(page.locator("#acceptance-note")).to_contain_text("tokens a step")


def test_metrics_count_what_was_served(server: ServerProcess) -> None:
    asked = {"messages": [{"role": "user", "content": "falcon"}], "max_tokens": 20, "stream": True}
    before = samples(server)
    ask(server, "/v1/chat/completions", asked)
    with pytest.raises(urllib.error.HTTPError):
        ask(server, "/v1/chat/completions", {"messages": []})
    after, limit = samples(server), time.monotonic() + 30
    while "stoop_steps_total" not in after and time.monotonic() < limit:
        after = samples(server)  # the core's counts come with its next heartbeat
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["stoop_requests_total"] == 1
    assert grown["stoop_requests_finished_total"] == 1
    assert grown["stoop_requests_refused_total"] == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert grown[f"stoop_{name}_seconds_count"] == 1, name
    assert grown["stoop_request_prefill_time_seconds_count"] == 1
    assert grown["stoop_request_generation_tokens_sum"] == 20
    # Tokens that came with the first one have no time of their own.
    assert 0 < grown["stoop_inter_token_latency_seconds_count"] <= 19
    assert grown["stoop_request_params_max_tokens_sum"] == 20
    assert after["stoop_core_healthy"] == 1 and after["stoop_http_requests_open"] == 1
    assert after["stoop_steps_total"] > 0 and after["stoop_tokens_computed_total"] > 0
    parts = [after[f"stoop_request_{part}_time_seconds_sum"] for part in ("queue", "inference")]
    assert sum(parts) <= after["stoop_e2e_request_latency_seconds_sum"] + 0.01


def test_a_killed_core(server: ServerProcess, page: Page) -> None:
    """Scrapes go on, counters do not fall, and the page says what happens."""
    seen = [samples(server)]
    os.kill(json.loads(ask(server, "/stats"))["core_pid"], signal.SIGKILL)
    expect(page.locator("#state")).to_have_text("restarting")
    deadline = time.monotonic() + 60
    while seen[-1]["stoop_core_restarts_total"] < 1 or seen[-1]["stoop_core_healthy"] < 1:
        seen.append(samples(server))
        assert time.monotonic() < deadline, seen[-1]
        time.sleep(0.05)
    expect(page.locator("#state")).to_have_text("ready")
    asked = {"messages": [{"role": "user", "content": "falcon"}], "max_tokens": 5}
    ask(server, "/v1/chat/completions", asked)
    while seen[-1]["stoop_generation_tokens_total"] < seen[0]["stoop_generation_tokens_total"] + 5:
        seen.append(samples(server))
        assert time.monotonic() < deadline, seen[-1]
        time.sleep(0.05)
    assert min(each["stoop_core_healthy"] for each in seen) == 0
    for earlier, later in pairwise(seen):
        names = [name for name in later if name.endswith("_total") and "process_" not in name]
        assert [name for name in names if later[name] < earlier.get(name, 0)] == []


def test_files_of_the_page_need_no_key(server: ServerProcess) -> None:
    for path in ("/", "/page/page.js", "/page/page.css", "/page/icon.svg"):
        with urllib.request.urlopen(server.url + path, timeout=30) as response:
            assert response.status == 200
            assert "default-src 'self'" in response.headers["content-security-policy"]


def test_the_served_files_are_those_of_the_package() -> None:
    import stoop.server.page as package

    names = {each.name for each in Path(package.__file__).parent.iterdir()}
    assert names - {"__init__.py", "__pycache__"} == set(package.TYPES)
