"""The page in a real browser: what it shows, what it sends, keyboard, phone, contrast, origins."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fake_api import Script, make_app, serving

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the system's Chromium")
TEXT = "Falcons dive fast.\nThey stoop"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.getuid() == 0 else []
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield found
        found.close()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Script]]:
    script = Script()
    with serving(make_app(script)) as url:
        yield url, script


@pytest.fixture
def script(served: tuple[str, Script]) -> Script:
    """As new, for each test."""
    vars(served[1]).update(vars(Script()))
    return served[1]


@pytest.fixture
def page(browser: Browser, served: tuple[str, Script], script: Script) -> Iterator[Page]:
    with opened(browser, served[0]) as found:
        yield found


class opened:
    """A page in a context of its own, which must log no error and ask no other origin."""

    def __init__(self, browser: Browser, url: str, **options: object) -> None:
        self.context = browser.new_context(**options)  # type: ignore[arg-type]
        self.url, self.problems, self.allowed = url, list[str](), list[str]()

    def __enter__(self) -> Page:
        page = self.context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda line: line.type == "error" and self.problems.append(line.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url.startswith(self.url) or self.problems.append(f"asks {request.url}")
            ),
        )
        page.goto(self.url)
        page.wait_for_selector("#state:not([data-state=wait])")
        page.problems = self.problems  # type: ignore[attr-defined]
        return page

    def __exit__(self, kind: object, *_: object) -> None:
        self.context.close()
        # The browser reports every refusal as an error; the tests of refusals expect those.
        left = [line for line in self.problems if "Failed to load resource" not in line]
        assert kind is not None or left == []


def ask(page: Page, text: str = "Tell me about falcons.") -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Page, number: int = 1) -> None:
    expect(page.locator(".answer .copy")).to_have_count(number)


# ---- streams and tints ----


def test_an_answer_streams_with_tints(page: Page, script: Script) -> None:
    ask(page)
    answered(page)
    assert page.locator(".answer .body").inner_text().strip() == TEXT
    drafts = page.locator(".answer .tok")
    seen = drafts.evaluate_all("all => all.map(e => [e.textContent, e.className, e.dataset.draft])")
    assert seen == [
        ["dive", "tok d1", "1"],
        ["fast", "tok d2", "2"],
        [".", "tok d3", "3"],
        ["stoop", "tok d1", "1"],
    ]
    expect(page.locator(".facts")).to_contain_text("7 tokens")
    expect(page.locator(".facts")).to_contain_text("57 % from drafts")
    (asked,) = script.requests
    assert asked["messages"] == [{"role": "user", "content": "Tell me about falcons."}]
    assert asked["return_draft_positions"] is True and asked["stream"] is True
    assert asked["model"] == "SmolLM2-135M-Instruct"
    assert "num_speculative_tokens" not in asked


def test_text_appears_before_the_answer_is_complete(page: Page, script: Script) -> None:
    script.delay, script.endless = 0.05, True
    ask(page)
    expect(page.locator(".answer .body")).to_contain_text("They stoop")
    assert page.locator(".answer").get_attribute("aria-busy") == "true"
    page.click("#stop")
    answered(page)
    assert page.locator(".answer").get_attribute("aria-busy") == "false"


def test_underlines_tell_positions_apart_without_colour(page: Page) -> None:
    styles = page.evaluate(
        """() => Array.from({length: 8}, (_, at) => {
            const e = document.body.appendChild(document.createElement("span"));
            e.className = `tok d${at + 1}`;
            const style = getComputedStyle(e);
            return style.textDecorationStyle + " " + style.textDecorationThickness;
        })"""
    )
    assert len(set(styles)) == 8


def test_positions_past_the_last_tint_share_it(page: Page, script: Script) -> None:
    script.tokens = [("a", 0), (" b", 11)]
    ask(page)
    answered(page)
    assert page.locator(".answer .tok").get_attribute("class") == "tok d8"
    assert page.locator(".answer .tok").get_attribute("title") == "draft 11"


def test_model_text_is_never_markup(page: Page, script: Script) -> None:
    script.tokens = [("<img src=x onerror=alert(1)>", 0), ("<b>bold</b>", 1)]
    ask(page, "<i>hello</i>")
    answered(page)
    assert page.locator(".body img, .body b, .user i").count() == 0
    expect(page.locator(".body")).to_contain_text("<b>bold</b>")
    expect(page.locator(".user")).to_have_text("<i>hello</i>")


def test_code_blocks_over_token_borders(page: Page, script: Script) -> None:
    pieces = ["See:\n\n`", "``py", "thon\n", "def f():\n", "    x = `1`\n``", "`\n", "`Done`", " `"]
    script.tokens = [(text, at % 2) for at, text in enumerate(pieces)]
    ask(page)
    answered(page)
    assert page.locator(".body pre").count() == 1
    assert page.locator(".body pre code").inner_text() == "def f():\n    x = `1`"
    assert page.locator(".body pre").get_attribute("data-language") == "python"
    assert page.locator(".prose").all_inner_texts() == ["See:", "`Done` `"]


def test_the_conversation_is_sent_along(page: Page, script: Script) -> None:
    ask(page, "one")
    answered(page)
    ask(page, "two")
    answered(page, 2)
    roles = [(each["role"], each["content"]) for each in script.requests[1]["messages"]]
    assert roles == [("user", "one"), ("assistant", TEXT), ("user", "two")]
    page.click("#new-chat")
    assert page.locator(".turn").count() == 0 and page.locator("#welcome").is_visible()
    ask(page, "three")
    answered(page)
    assert [each["content"] for each in script.requests[2]["messages"]] == ["three"]


def test_settings_are_sent(page: Page, script: Script) -> None:
    page.click("#settings summary")
    page.fill("#max-tokens", "17")
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.7")
    assert page.inner_text("#temperature-value") == "0.7"
    ask(page)
    answered(page)
    (asked,) = script.requests
    assert asked["max_tokens"] == 17 and asked["temperature"] == 0.7
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}


def test_a_new_chat_forgets_an_answer_that_still_came(page: Page, script: Script) -> None:
    script.delay, script.endless = 0.02, True
    ask(page, "old")
    expect(page.locator(".answer .tok").first).to_be_visible()
    page.click("#new-chat")
    expect(page.locator("#send")).to_be_visible()
    assert page.locator(".turn").count() == 0 and page.locator("#welcome").is_visible()
    assert page.input_value("#prompt") == ""
    script.endless = False
    ask(page, "new")
    answered(page)
    assert [each["content"] for each in script.requests[1]["messages"]] == ["new"]


# ---- drafts on and off ----


def test_the_switch_changes_the_request(page: Page, script: Script) -> None:
    script.delay = 0.02
    page.uncheck("#drafts", force=True)
    ask(page)
    answered(page)
    assert script.requests[0]["num_speculative_tokens"] == 0
    assert page.locator(".answer .tok").count() == 0
    expect(page.locator(".facts")).to_contain_text("without drafts")
    assert float(page.inner_text("#speed-without")) > 0
    assert page.inner_text("#speed-with") == "–"
    page.check("#drafts", force=True)
    ask(page)
    answered(page, 2)
    assert "num_speculative_tokens" not in script.requests[1]
    assert float(page.inner_text("#speed-with")) > 0


def test_run_both_compares(page: Page, script: Script) -> None:
    script.delay = 0.03
    page.fill("#prompt", "Tell me about falcons.")
    page.click("#both")
    answered(page, 2)
    without, drafted = script.requests
    assert without["num_speculative_tokens"] == 0 and "num_speculative_tokens" not in drafted
    assert without["seed"] == drafted["seed"]
    assert page.locator(".pair h3").all_inner_texts() == ["Without drafts", "With drafts"]
    expect(page.locator(".verdict")).to_contain_text("Both texts are the same")
    expect(page.locator("#compare-note")).to_contain_text("times the speed")
    page.click("#both")  # the same question again, without its answer
    answered(page, 4)
    assert [each["content"] for each in script.requests[3]["messages"]] == [
        "Tell me about falcons."
    ]
    script.refusal = (500, {}, {})  # then the answer that it has stays
    page.click("#both")
    expect(page.locator("#notice")).to_be_visible()
    script.refusal = None
    ask(page, "next")
    answered(page, 5)
    assert len(script.requests[-1]["messages"]) == 3


def test_without_a_drafter_there_is_no_choice(page: Page, script: Script) -> None:
    script.num_drafts = 0
    expect(page.locator("#both")).to_be_disabled()
    expect(page.locator("#drafts")).to_be_disabled()
    expect(page.locator("#acceptance-note")).to_contain_text("without a drafter")
    ask(page)
    answered(page)
    assert "num_speculative_tokens" not in script.requests[0]


# ---- live numbers ----


def test_numbers_of_the_server(page: Page, script: Script) -> None:
    assert page.inner_text("#model") == "SmolLM2-135M-Instruct"
    assert page.inner_text("#state") == "ready"
    assert page.locator("#acceptance li").all_inner_texts()[0].split() == ["draft", "1", "80", "%"]
    assert page.locator("#acceptance .fill1").evaluate("e => e.style.width") == "80%"
    assert page.locator("#acceptance li").all_inner_texts()[2].split() == ["draft", "3", "35", "%"]
    expect(page.locator("#acceptance-note")).to_contain_text("2.60 tokens a step")
    assert (page.inner_text("#running"), page.inner_text("#waiting")) == ("5", "2")
    script.drafting = False  # at this load, or for these texts
    expect(page.locator("#acceptance-note")).to_contain_text("Drafts are off for the moment")
    script.num_generated += 500
    expect(page.locator("#rate")).not_to_have_text("0")
    assert page.locator("#rate-chart .line").get_attribute("d").startswith("M")  # type: ignore[union-attr]


def test_polling_pauses_while_hidden(page: Page, script: Script) -> None:
    hide = """hidden => {
        Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    page.wait_for_timeout(100)
    before = script.num_stats
    page.wait_for_timeout(1300)
    assert script.num_stats == before
    page.evaluate(hide, False)
    page.wait_for_timeout(300)
    assert script.num_stats > before


# ---- stop, errors, keys ----


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_aborts_the_request(page: Page, script: Script, way: str) -> None:
    script.delay, script.endless = 0.02, True
    ask(page)
    expect(page.locator(".answer .tok").first).to_be_visible()
    if way == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    answered(page)
    for _ in range(100):
        if script.num_aborted:
            break
        page.wait_for_timeout(20)
    assert script.num_aborted == 1
    expect(page.locator(".facts")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_visible()
    assert page.locator("#notice").is_hidden()


@pytest.mark.parametrize(
    ("status", "body", "headers", "words"),
    [
        (429, {}, {"Retry-After": "7"}, "The server is busy. Try again in 7 s."),
        (503, {"error": {"message": "core died"}}, {}, "The model is not ready."),
        (400, {"error": {"message": "max_tokens=9: use less"}}, {}, "max_tokens=9: use less"),
        (500, {}, {}, "The server answered with status 500."),
    ],
)
def test_refusals_are_shown_in_words(
    page: Page, script: Script, status: int, body: dict, headers: dict, words: str
) -> None:
    script.refusal = (status, body, headers)
    ask(page, "keep me")
    expect(page.locator("#notice")).to_contain_text(words)
    assert page.input_value("#prompt") == "keep me"  # to be sent again
    assert page.locator(".turn").count() == 0
    script.refusal = None
    page.press("#prompt", "Enter")
    answered(page)
    assert page.locator("#notice").is_hidden()


@pytest.mark.parametrize(
    ("broken", "words"),
    [("cut", "before the answer was complete"), ("error", "The grammar failed")],
)
def test_a_broken_stream_keeps_what_came(
    page: Page, script: Script, broken: str, words: str
) -> None:
    script.broken = broken
    ask(page)
    expect(page.locator("#notice")).to_contain_text(words)
    assert page.locator(".answer .body").inner_text().strip() == TEXT


def test_a_lost_server_is_said(page: Page) -> None:
    page.context.set_offline(True)
    ask(page)
    expect(page.locator("#notice")).to_contain_text("cannot be reached")
    expect(page.locator("#state")).to_have_text("not reachable")
    page.context.set_offline(False)
    expect(page.locator("#state")).to_have_text("ready")


def test_a_key_is_asked_for_and_kept(
    browser: Browser, served: tuple[str, Script], script: Script
) -> None:
    script.key = "secret"
    with opened(browser, served[0]) as page:
        expect(page.locator("#key-form")).to_be_visible()
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        ask(page)
        expect(page.locator("#notice")).to_contain_text("does not accept this API key")
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        expect(page.locator("#key-form")).to_be_hidden()
        page.press("#prompt", "Enter")
        answered(page)
        page.reload()
        expect(page.locator("#state")).to_have_text("ready")
        assert page.locator("#key-form").is_hidden()
        assert page.evaluate("localStorage.length") == 0


# ---- keyboard, phone, themes ----


def test_keyboard_alone(page: Page, script: Script) -> None:
    script.tokens = [("ok", 0)]
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    assert page.input_value("#prompt") == "line one\nline two"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "drafts"
    page.keyboard.press("Space")
    assert not page.is_checked("#drafts")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "both"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # on Send
    answered(page)
    assert script.requests[0]["messages"][0]["content"] == "line one\nline two"
    assert script.requests[0]["num_speculative_tokens"] == 0
    expect(page.locator("#said")).to_contain_text("Answer complete")
    order = []
    page.locator(".skip").focus()
    for _ in range(9):
        order.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        page.keyboard.press("Tab")
    assert order[:4] == ["skip", "new-chat", "theme", "log"]
    assert order[4:] == ["quiet copy", "prompt", "drafts", "both", "send"]


def test_focus_is_visible(page: Page) -> None:
    for selector in ("#new-chat", "#send", "#settings summary"):
        page.locator(selector).focus()
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Tab")
        style = page.locator(selector).evaluate("e => getComputedStyle(e).outlineStyle")
        assert style == "solid", selector


@pytest.mark.parametrize("width", [360, 768])
def test_a_narrow_screen(
    browser: Browser, served: tuple[str, Script], script: Script, width: int
) -> None:
    script.tokens = [("word" * 60, 0), ("\n```\n" + "x = 1; " * 40 + "\n```\n", 1), ("end", 0)]
    size = {"width": width, "height": 740}
    with opened(browser, served[0], viewport=size, has_touch=True) as page:
        overflow = "document.documentElement.scrollWidth - innerWidth"
        assert page.evaluate(overflow) <= 0
        page.fill("#prompt", "w" * 300)
        page.click("#both")
        answered(page, 2)
        assert page.evaluate(overflow) <= 0
        assert page.locator("#log").evaluate("e => e.scrollWidth - e.clientWidth") <= 0
        assert page.locator("#panel").is_hidden()
        page.click("#panel-toggle")
        assert page.locator("#panel").is_visible() and page.evaluate(overflow) <= 0
        page.keyboard.press("Escape")
        assert page.locator("#panel").is_hidden()
        visible = page.locator("button:visible, input:visible")
        boxes = [item.bounding_box() for item in visible.all()]
        for box in boxes:
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width


CONTRAST = Path(__file__).with_name("contrast.js").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(
    browser: Browser, served: tuple[str, Script], script: Script, scheme: str
) -> None:
    script.tokens = [("plain", 0), *((f" d{at}", at) for at in range(1, 9))]
    with opened(browser, served[0], color_scheme=scheme) as page:
        page.evaluate("document.getAnimations().forEach(each => each.finish())")
        at_start = page.evaluate(CONTRAST)
        page.click("#settings summary")
        ask(page)
        answered(page)
        page.evaluate("document.querySelector('#key-form').hidden = false")
        page.evaluate("document.querySelector('#notice').hidden = false")
        page.evaluate("document.querySelector('#notice').textContent = 'An error.'")
        found = at_start + page.evaluate(CONTRAST)
        words = {each["text"] for each in found}
        assert {
            "plain",
            "d1",
            "d8",
            "An error.",
            "Send",
            "Drafts",
            "Watch it guess ahead.",
        } <= words
        assert [each for each in found if each["ratio"] < 4.5] == []
        bars = page.evaluate(
            """() => Array.from({length: 8}, (_, at) => {
                const e = document.createElement("span");
                document.querySelector(".meter").append(e);
                e.className = `fill${at + 1}`;
                return contrast(getComputedStyle(e).backgroundColor,
                                getComputedStyle(document.querySelector(".card")).backgroundColor);
            })"""
        )
        assert min(bars) >= 3


def test_the_theme_button_wins_over_the_system(
    browser: Browser, served: tuple[str, Script], script: Script
) -> None:
    shade = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, served[0], color_scheme="light") as page:
        light = page.evaluate(shade)
        page.click("#theme")  # light
        assert page.evaluate(shade) == light
        page.click("#theme")  # dark
        dark = page.evaluate(shade)
        assert dark != light and page.get_attribute("#theme", "aria-label") == "Theme: dark"
        page.reload()
        assert page.evaluate(shade) == dark
        page.click("#theme")  # automatic
        assert page.evaluate(shade) == light


def test_reduced_motion(browser: Browser, served: tuple[str, Script], script: Script) -> None:
    script.delay, script.endless = 0.05, True
    with opened(browser, served[0], reduced_motion="reduce") as page:
        ask(page)
        expect(page.locator(".answer .tok").first).to_be_visible()
        assert page.evaluate("document.getAnimations().length") == 0
        page.click("#stop")


def test_copy(browser: Browser, served: tuple[str, Script], script: Script) -> None:
    with opened(browser, served[0]) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        ask(page)
        page.click(".copy")
        expect(page.locator(".copy")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == TEXT


# ---- what is served ----


def test_the_policy_allows_nothing_inline(page: Page, served: tuple[str, Script]) -> None:
    response = page.request.get(served[0])
    policy = response.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy
    html = response.text()
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|https?://", html)
    page.evaluate("document.head.append(Object.assign(document.createElement('script'), "
                  "{textContent: 'window.ran = true'}))")  # fmt: skip
    assert page.evaluate("window.ran") is None
    blocked = page.problems  # type: ignore[attr-defined]
    assert blocked and "Content Security Policy" in blocked.pop()


def test_files_and_entity_tags(page: Page, served: tuple[str, Script]) -> None:
    url = served[0]
    first = page.request.get(f"{url}/page/page.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = page.request.get(
        f"{url}/page/page.js", headers={"If-None-Match": first.headers["etag"]}
    )
    assert again.status == 304
    for name in ("__init__.py", "..%2f__init__.py", "nothing.js"):
        assert page.request.get(f"{url}/page/{name}").status == 404
