"""The page in a real browser, over the real server."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.e2e.serving import Server, serving

QUIET = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --disable-quic"
).split()
PATIENCE_MS = 120_000  # a machine that does much else takes its time
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # A small pool: a handful of requests makes it preempt.
    with serving("--num-kv-blocks", "40", "--preemption", "recompute") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium, "the browser tests need Chromium: apt install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def page(server: Server, browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("ready")
    yield page
    page.close()
    assert problems == []


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_chat_streams_an_answer_and_shows_the_alternatives_of_a_token(page: Page) -> None:
    page.locator("details summary").click()
    page.fill("#temperature", "0")
    ask(page, "What is the capital of France?")
    answer = page.locator(".turn.assistant")
    expect(answer).to_contain_text("Paris")
    expect(answer.locator("footer")).to_have_text("ended: stop")
    page.locator(".token", has_text="Paris").hover()
    expect(page.locator("#tip")).to_contain_text("%")
    expect(page.locator("#tip")).to_contain_text("Paris")
    page.mouse.move(1, 1)
    expect(page.locator("#tip")).to_have_count(0)
    answer.locator(".words").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token").nth(1)).to_be_focused()
    expect(page.locator("#tip")).to_contain_text("%")


def test_stop_ends_the_answer(page: Page) -> None:
    # The answer must not end by itself before the button is pressed.
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True})),
    )
    page.locator("details summary").click()
    page.fill("#max_tokens", "4000")
    ask(page, "Count as far as you can: one, two, three,")
    expect(page.locator(".turn.assistant .token").first).to_be_visible()
    page.click("#stop")
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator(".turn.error")).to_have_count(0)


def test_answers_side_by_side_share_the_blocks_of_their_prompt(page: Page) -> None:
    page.locator("details summary").click()
    page.fill("#n", "3")
    page.fill("#max_tokens", "120")
    ask(page, "Write a long story about a lighthouse keeper, the sea, and the many ships that passed by at night.")
    expect(page.locator(".answers .turn")).to_have_count(3)
    expect(page.locator(".strip .cell.shared").first).to_be_visible()
    assert page.evaluate("document.querySelectorAll('.strip').length") == 3
    expect(page.locator("#memory-line")).not_to_contain_text(" 0 shared")


def test_a_preemption_is_seen(page: Page, server: Server) -> None:
    # Four answers of one request run together, and the pool holds three of them.
    body = {"model": "smollm2", "prompt": "A story:", "n": 4, "max_tokens": 200, "ignore_eos": True}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    expect(page.locator("#events")).to_contain_text("preempted")
    row = page.locator("#rows tr", has=page.locator("td:last-child", has_text=re.compile(r"^\d+$"))).first
    row.locator("button").click()
    expect(page.locator("#timeline")).to_contain_text("preempted")
    expect(page.locator("#timeline")).to_contain_text("recompute")
    for _ in range(2):
        with page.expect_response("**/debug/live"):
            pass
    expect(row.locator("button")).to_be_focused()  # a refreshed list takes nothing from who uses the keyboard


def test_the_map_is_usable_by_keyboard(page: Page) -> None:
    page.locator("#map").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#block")).to_contain_text("Block 0")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#block")).to_contain_text("Block 1")


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_sticks_out_of_the_window(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_ten_thousand_blocks_are_drawn_within_a_frame(page: Page) -> None:
    # The work of one frame, not the clock of the machine: painting must not grow beyond one pass over the cells.
    calls = page.evaluate(
        """async () => {
          const memory = await import('/static/memory.js');
          const pen = document.getElementById('map').getContext('2d');
          let fills = 0;
          const fill = pen.fillRect.bind(pen);
          pen.fillRect = (...a) => { fills++; fill(...a); };
          memory.show({states: 'f'.repeat(10000), sequences: [], total: 10000, free: 10000, cached: 0, shared: 0,
                       saved_bytes: 0, block_size: 16, host: {total: 0, used: 0}, disk: {total: 0, used: 0}});
          await new Promise(requestAnimationFrame);
          await new Promise(requestAnimationFrame);
          pen.fillRect = fill;
          return fills;
        }"""
    )
    assert 10_000 <= calls <= 30_000
