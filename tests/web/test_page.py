"""The page in a real browser: type a prompt, see coloured tokens, compare, watch the charts.

Needs Debian's chromium and chromium-driver, and selenium; skipped where they are not installed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from server.fake_engine import expected_text
from server.live_server import PATIENCE, LiveServer

pytest.importorskip("selenium.webdriver")
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

LENGTH = 60  # tokens of an answer where any will do


def wait(browser: Any, script: str, *arguments: Any) -> Any:
    """The script's value once it is truthy."""
    waiting = WebDriverWait(browser, PATIENCE, poll_frequency=0.1)
    try:
        return waiting.until(lambda b: b.execute_script(f"return {script}", *arguments))
    except TimeoutException:
        raise AssertionError(f"{script} is not so\n{state_of(browser)}") from None


def state_of(browser: Any) -> str:
    """What a page that does not go on shows, and what its server has logged."""
    shown = browser.execute_script(
        "return {state: document.readyState, health: document.querySelector('#health')?.title,"
        "  prompt: document.querySelector('#prompt')?.value,"
        "  mode: document.querySelector('input[name=mode]:checked')?.value,"
        "  send: document.querySelector('#send')?.textContent,"
        "  answers: [...document.querySelectorAll('.answer')].map(one => ({"
        "    classes: one.className, pieces: one.querySelectorAll('.piece').length,"
        "    speed: one.querySelector('.speed')?.textContent,"
        "    facts: one.querySelector('.facts')?.textContent})),"
        "  requests: performance.getEntriesByType('resource').slice(-8)"
        "    .map(one => [one.name, one.startTime, one.duration, one.responseStatus])}"
    )
    lines = [f"{name}: {value}" for name, value in shown.items()]
    lines += [f"console: {entry['message']}" for entry in browser.get_log("browser")]
    server = LiveServer.by_url.get(browser.execute_script("return location.origin"))
    if server is not None:
        lines += [f"stats: {server.stats()}", *server.log().splitlines()[-20:]]
    return "\n".join(lines)


def keep(browser: Any, name: str) -> None:
    """A screenshot, where HUNCH_SCREENSHOTS names a folder for them."""
    folder = os.environ.get("HUNCH_SCREENSHOTS")
    if folder:
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))


def visit(browser: Any, server: LiveServer) -> None:
    """The page as one finds it, but for the length of its answers."""
    browser.get(server.url + "/")
    browser.execute_script(f"document.getElementById('max-tokens').value = {LENGTH}")


def say(browser: Any, text: str) -> None:
    box = browser.find_element(By.ID, "prompt")
    box.send_keys(text)
    box.send_keys(Keys.ENTER)


def choose(browser: Any, mode: str) -> None:
    browser.execute_script(f"document.querySelector('input[value={mode}]').click()")


DONE = "document.querySelectorAll('.answer').length && !document.querySelector('.answer.live')"


def test_tokens_appear_coloured_by_who_guessed_them(browser: Any, page_server: LiveServer) -> None:
    browser.get(page_server.url + "/")
    say(browser, "Hello there")
    wait(browser, DONE)
    text = browser.execute_script("return document.querySelector('.answer .text').textContent")
    rendered = "user: Hello there\nassistant: "
    assert text == expected_text(rendered, 0, 200)
    colours = browser.execute_script(
        "return ['drafter', 'target'].map(name => {"
        "  const piece = document.querySelector(`.piece.${name}`);"
        "  return getComputedStyle(piece).backgroundColor; })"
    )
    assert colours[0] != colours[1]
    assert "tokens/s" in browser.find_element(By.CSS_SELECTOR, ".answer .speed").text
    facts = browser.find_element(By.CSS_SELECTOR, ".answer .facts").text
    assert re.search(r"guesses right: \d+ of \d+ by oracle", facts)
    title = browser.execute_script("return document.querySelector('.piece.drafter').title")
    assert title == "guessed by oracle"
    keep(browser, "chat")
    severe = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    assert severe == []


def test_wrong_guesses_are_shown_on_wish_and_are_no_part_of_the_text(
    browser: Any, page_server: LiveServer
) -> None:
    visit(browser, page_server)
    say(browser, "Hello there")
    wait(browser, DONE)
    ghost = (
        "getComputedStyle(document.querySelector('.piece[data-missed]'), '::before')"
        ".textDecorationLine"
    )
    assert browser.execute_script(f"return {ghost}") != "line-through"
    browser.find_element(By.ID, "misses").click()
    assert browser.execute_script(f"return {ghost}") == "line-through"
    title = browser.execute_script("return document.querySelector('[data-missed]').title")
    assert re.match("written by the model; the guess was “.+”", title, re.DOTALL)
    text = browser.execute_script("return document.querySelector('.answer .text').textContent")
    assert text == expected_text("user: Hello there\nassistant: ", 0, LENGTH)


def test_fewer_passes_make_a_shorter_ribbon(browser: Any, page_server: LiveServer) -> None:
    visit(browser, page_server)
    choose(browser, "both")
    say(browser, "Compare")
    wait(browser, "document.querySelector('.verdict')")
    reach = (  # the last column of each ribbon that is not empty
        "return [...document.querySelectorAll('.ribbon')].map(canvas => {"
        "  const { width, height } = canvas;"
        "  const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);"
        "  for (let x = width - 1; x >= 0; x--)"
        "    for (let y = 0; y < height; y++) if (data[4 * (y * width + x) + 3]) return x;"
        "  return -1; })"
    )
    on, off = browser.execute_script(reach)
    assert 0 < on < 0.8 * off


def test_a_new_chat_forgets_the_old_one(browser: Any, page_server: LiveServer) -> None:
    visit(browser, page_server)
    say(browser, "First")
    wait(browser, DONE)
    browser.find_element(By.ID, "clear").click()
    assert not browser.find_elements(By.CSS_SELECTOR, ".answer")
    assert browser.find_element(By.ID, "hello").is_displayed()
    say(browser, "Second")
    wait(browser, DONE)
    text = browser.execute_script("return document.querySelector('.answer .text').textContent")
    assert text == expected_text("user: Second\nassistant: ", 0, LENGTH)


def test_a_server_that_wants_a_key_asks_for_it(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = tmp_path_factory.mktemp("locked") / "log"
    server = LiveServer(log, {}, api_keys=["open-sesame"])
    try:
        browser.get(server.url + "/")
        say(browser, "Let me in")
        wait(browser, "document.querySelector('#key-dialog').open")
        browser.find_element(By.ID, "key-input").send_keys("open-sesame")
        browser.find_element(By.CSS_SELECTOR, "#key-dialog button").click()
        wait(browser, "document.querySelectorAll('.piece').length > 20")  # the question was kept
        wait(browser, "document.querySelector('#health').className === 'dot ok'")
    finally:
        server.stop()


def test_on_a_phone_the_charts_are_a_tap_away(browser: Any, page_server: LiveServer) -> None:
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page_server.url + "/")
    charts = browser.find_element(By.ID, "speed")
    assert not charts.is_displayed()
    assert browser.find_element(By.ID, "send").is_displayed()
    browser.find_element(By.ID, "pulse").click()
    assert charts.is_displayed()
    assert charts.size["width"] > 300
    browser.find_element(By.ID, "pulse").click()
    assert not charts.is_displayed()
    assert not browser.find_element(By.ID, "seed").is_displayed()
    browser.find_element(By.ID, "settings").click()
    assert browser.find_element(By.ID, "seed").is_displayed()


def test_on_and_off_side_by_side_write_the_same_text(browser: Any, page_server: LiveServer) -> None:
    visit(browser, page_server)
    choose(browser, "both")
    say(browser, "Compare")
    verdict = wait(browser, "document.querySelector('.verdict')?.textContent")
    assert verdict.startswith("same text: yes")
    speeds = [s.text for s in browser.find_elements(By.CSS_SELECTOR, ".answer .speed")]
    assert len(speeds) == 2
    assert all(float(speed.split()[0]) > 0 for speed in speeds)
    marked = browser.execute_script(
        "return [...document.querySelectorAll('.answer')]"
        "  .map(node => node.querySelectorAll('.piece.drafter').length)"
    )
    assert marked[0] > 0
    assert marked[1] == 0
    keep(browser, "compare")


def test_speculation_can_be_switched_off(browser: Any, page_server: LiveServer) -> None:
    visit(browser, page_server)
    choose(browser, "off")
    say(browser, "Plain")
    wait(browser, DONE)
    assert not browser.find_elements(By.CSS_SELECTOR, ".piece.drafter")
    assert browser.find_elements(By.CSS_SELECTOR, ".piece.target")


def test_the_charts_move(browser: Any, page_server: LiveServer) -> None:
    browser.get(page_server.url + "/")
    wait(browser, "document.querySelector('#health').className === 'dot ok'")
    picture = (
        "['speed', 'accept', 'queue', 'kv'].map(id => document.getElementById(id).toDataURL())"
    )
    first = browser.execute_script(f"return {picture}")
    say(browser, "Move")
    wait(browser, DONE)
    for number in range(4):
        wait(browser, f"{picture}[{number}] !== arguments[0]", first[number])
    assert float(browser.find_element(By.ID, "accept-now").text.split()[0]) > 0


def test_a_server_that_is_slow_to_answer_is_not_asked_again_meanwhile(
    browser: Any, page_server: LiveServer
) -> None:
    """A browser has six connections: reports that nobody answers would take all of them."""
    visit(browser, page_server)
    wait(browser, "document.querySelector('#health').className === 'dot ok'")
    browser.execute_script(
        "window.asked = 0; window.ticks = 0; setInterval(() => { window.ticks += 1 }, 1000);"
        "const ask = window.fetch; window.fetch = (path, how) => {"
        "  if (path !== 'stats') return ask(path, how);"
        "  window.asked += 1; return new Promise(() => {}); }"
    )
    wait(browser, "window.ticks > 3")
    assert browser.execute_script("return window.asked") == 1
    say(browser, "Hello there")
    wait(browser, DONE)


def test_a_stopped_answer_stops_in_the_engine_too(browser: Any, page_server: LiveServer) -> None:
    browser.get(page_server.url + "/")
    browser.execute_script(
        "const field = document.getElementById('max-tokens'); field.max = field.value = 50000"
    )
    choose(browser, "off")
    say(browser, "Long")
    wait(browser, "document.querySelectorAll('.piece').length > 5")
    browser.find_element(By.ID, "send").click()
    facts = wait(browser, "document.querySelector('.answer .facts').textContent")
    assert facts == "stopped"
    page_server.wait_idle()  # so many tokens would take longer


@pytest.mark.parametrize(
    ("name", "width", "height"),
    # What fits a narrow page fits a wide one.
    [pytest.param("wide", 1280, 860, marks=pytest.mark.slow), ("phone", 390, 844)],
)
def test_it_fits_dark_and_light_wide_and_narrow(
    browser: Any, page_server: LiveServer, name: str, width: int, height: int
) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    visit(browser, page_server)
    grounds = []
    for _ in range(2):
        theme = browser.execute_script("return document.documentElement.dataset.theme")
        keep(browser, f"{name}-{theme}-hello")
        grounds.append(
            browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        )
        browser.find_element(By.ID, "theme").click()
    assert grounds[0] != grounds[1]
    choose(browser, "both")
    say(browser, "Fit")
    wait(browser, "document.querySelector('.verdict')")
    for _ in range(2):
        theme = browser.execute_script("return document.documentElement.dataset.theme")
        keep(browser, f"{name}-{theme}")
        browser.find_element(By.ID, "theme").click()
    overflow = browser.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert overflow <= 0


def test_nothing_is_loaded_from_elsewhere(browser: Any, page_server: LiveServer) -> None:
    browser.get(page_server.url + "/")
    wait(browser, "document.querySelector('#health').className === 'dot ok'")
    names = browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    assert names
    assert all(name.startswith(page_server.url) for name in names)
