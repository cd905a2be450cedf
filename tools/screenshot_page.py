"""Takes docs/images/page.png: starts `stoop serve` with the default model, asks, and looks.

    python tools/screenshot_page.py [--single] [--prompt TEXT] [--dark] [--phone] [--out FILE]

The page answers without drafts and with them, and the image shows both speeds: take it on an idle
machine. --single answers with drafts only, and the image compares nothing. --url URL uses a server
that runs. Needs playwright and a Chromium (`chromium` in the path).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "Write a Python function that reverses a list, and explain it in one sentence."
SIZES = {False: {"width": 1280, "height": 800}, True: {"width": 360, "height": 740}}


@contextmanager
def server() -> Iterator[str]:
    """Its address, once it is ready."""
    command = [sys.executable, "-m", "stoop", "serve", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            found = re.search(r"^serving .* at (http://\S+)/v1", line)
            if found:
                break
        else:
            raise SystemExit("the server did not start")
        yield found[1]
    finally:
        process.terminate()
        process.communicate()


def take(url: str, options: argparse.Namespace) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("chromium-browser"),
            args=["--no-sandbox"] if os.getuid() == 0 else [],
        )
        page = browser.new_page(
            viewport=SIZES[options.phone],
            color_scheme="dark" if options.dark else "light",
            reduced_motion="reduce",
        )
        page.goto(url)
        page.wait_for_selector("#state[data-state=good]")
        page.evaluate("document.querySelector('#max-tokens').value = 120")
        for question in ("Hello!", options.prompt):  # the first one warms up
            page.click("#new-chat")
            page.fill("#prompt", question)
            page.click("#send" if options.single else "#both")
            done = ".copy" if options.single else ".verdict"
            page.wait_for_selector(done, timeout=300_000)
        page.wait_for_timeout(1500)  # a last look at the numbers
        options.out.parent.mkdir(exist_ok=True, parents=True)
        page.screenshot(path=options.out)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--single", action="store_true")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--phone", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "page.png")
    parser.add_argument("--url")
    options = parser.parse_args()
    if not options.single and os.getloadavg()[0] > 0.5:
        print("warning: this machine is busy, so the speeds will be wrong", file=sys.stderr)
    if options.url:
        take(options.url, options)
    else:
        with server() as url:
            take(url, options)


if __name__ == "__main__":
    main()
