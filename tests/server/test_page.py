"""The page at /, in a real browser: it is written to, streams, stops, shows thoughts and calls, keeps its conversation
over a reload, and lives through the server's death. Skipped where there is no Chromium."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.server.front_page import _page
from tests.scripted.engine import Scripted, scripted_servers
from tests.scripted.families import FAMILIES, Call
from tests.server.fake_engine import make_app, send
from tests.server.test_auth import KEYS
from tests.speed import wait_until

MOST_BYTES = 60_000
HOSTILE = '<img src=x onerror="window.hit=1"><script>window.hit=1</script> [x](javascript:window.hit=1) **bold** `<b>`'
browser_only = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="chromium and chromedriver are not installed",
)


class Relay:
    """Stands between browser and server, so that the server can die for the browser, and come back on its port."""

    def __init__(self, port: int) -> None:
        self.behind = port
        self.port = 0
        self.open: list[socket.socket] = []
        self.start()

    def start(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def stop(self) -> None:
        for one in (self.listener, *self.open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self.open = []

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self.behind))
                self.open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    with scripted_servers() as servers:
        yield servers(FAMILIES["qwen3"])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture
def relay(scripted: Scripted) -> Iterator[Relay]:
    found = Relay(int(scripted.url.rsplit(":", 1)[1]))
    yield found
    found.stop()


@pytest.fixture
def page(browser: Any, relay: Relay) -> Iterator[Page]:
    browser.get(f"http://127.0.0.1:{relay.port}/")
    browser.execute_script("sessionStorage.clear()")
    browser.refresh()
    shown = Page(browser)
    shown.until(lambda: shown.text("#state") == "serving")
    yield shown
    errors = [line["message"] for line in browser.get_log("browser") if "Content Security" in line["message"]]
    assert not errors


class Page:
    """The page as a person sees it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def text(self, selector: str) -> str:
        found = self.driver.execute_script(
            "return Array.from(document.querySelectorAll(arguments[0])).map(e => e.innerText).join('|')", selector
        )
        return str(found)

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def ask(self, text: str) -> None:
        self.driver.find_element("css selector", "#text").send_keys(text, "\n")

    def until(self, condition: Callable[[], object]) -> None:
        wait_until(condition, lambda: self.driver.find_element("css selector", "body").text)


def test_a_file_that_asks_nobody_else() -> None:
    text, headers = _page()
    assert len(text.encode()) <= MOST_BYTES
    assert not re.search(r"(src|href)=|@import|url\(", text), "everything is within the file"
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_where_it_is_served() -> None:
    answer = send(make_app(api_key=KEYS), "GET", "/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert send(make_app(disable_page=True), "GET", "/").status_code == 404


@browser_only
def test_a_conversation_that_outlives_a_reload(page: Page, scripted: Scripted) -> None:
    scripted.say("Well, **yes**.\n\n- one\n- two", reasoning="Hm, let me see.")
    page.ask("Is it?")
    page.until(lambda: "tokens, the first after" in page.text(".note"))
    assert page.text(".user .said") == "Is it?"
    assert page.text(".assistant .said strong, .assistant .said li") == "yes|one|two"
    assert (
        page.driver.execute_script("return document.querySelector('.thought').textContent").strip() == "Hm, let me see."
    )
    page.driver.refresh()
    page.until(lambda: page.text(".assistant .said strong") == "yes")
    page.until(lambda: page.text("#n-requests") not in ("", "-"))
    assert "max_num_seqs" in page.text("#plan")


@browser_only
def test_stop_and_retry(page: Page, scripted: Scripted) -> None:
    scripted.say("word " * 400, reasoning="")
    with scripted.pace(0.05):
        page.ask("Go on.")
        page.until(lambda: "word" in page.text(".assistant .said"))
        page.click("#stop")
        page.until(lambda: page.text(".assistant .note") == "Stopped.")
    scripted.say("Done.", reasoning="")
    page.click(".assistant button")
    page.until(lambda: page.text(".assistant .said") == "Done.")


@browser_only
def test_calls_are_shown(page: Page, scripted: Scripted) -> None:
    scripted.say("", Call("f", {"x": 1}), reasoning="")
    page.driver.execute_script(
        "document.getElementById('tools').value = arguments[0]",
        '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]',
    )
    page.ask("Call it.")
    page.until(lambda: page.text(".assistant details summary").endswith("Calls f"))
    assert '"x": 1' in page.text(".assistant details pre")


@browser_only
def test_nothing_that_a_model_writes_is_run(page: Page, scripted: Scripted) -> None:
    scripted.say(HOSTILE, reasoning="")
    page.ask("Be bad.")
    page.until(lambda: page.text(".assistant .said strong") == "bold")
    assert page.driver.execute_script("return window.hit") is None
    assert (
        page.driver.execute_script("return document.querySelectorAll('.said img, .said script, .said a').length") == 0
    )


@browser_only
def test_the_server_dies_and_comes_back(page: Page, scripted: Scripted, relay: Relay) -> None:
    scripted.say("word " * 400, reasoning="")
    with scripted.pace(0.05):
        page.ask("Go on.")
        page.until(lambda: "word" in page.text(".assistant .said"))
        relay.stop()
        page.until(lambda: page.text(".assistant .failed"))
    page.until(lambda: page.text("#state") == "no answer")
    relay.start()
    page.until(lambda: page.text("#state") == "serving")
    scripted.say("Back.", reasoning="")
    page.click(".assistant button")
    page.until(lambda: page.text(".assistant .said") == "Back.")
