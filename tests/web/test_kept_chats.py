"""The chat one keeps open: formatted answers, saved chats, asking again, and what was cut."""

from __future__ import annotations

from typing import Any

import pytest

from server.live_server import LiveServer
from web.test_page import DONE, keep, say, wait

By = pytest.importorskip("selenium.webdriver.common.by").By

ANSWER = (
    "# Title\n\n<think>no</think><img src=x onerror=alert(1)>**bold**\n\n```python\nx = 1\n```\n"
)


def test_a_chat_is_formatted_saved_edited_and_asked_again(
    browser: Any, page_server: LiveServer
) -> None:
    browser.get(page_server.url)
    browser.execute_script("document.getElementById('formats').click()")
    text = "<think>Hm.</think>" + ANSWER
    browser.execute_script(
        "document.getElementById('prompt').value = arguments[0]", f"SAY[{text}]YAS"
    )
    say(browser, "")
    wait(browser, "document.querySelector('.tools')")
    shown = browser.find_element(By.CSS_SELECTOR, ".formatted")
    assert shown.find_element(By.TAG_NAME, "h1").text == "Title"
    assert shown.find_element(By.TAG_NAME, "strong").text == "bold"
    assert shown.find_elements(By.TAG_NAME, "img") == []
    assert "x = 1" in shown.find_element(By.TAG_NAME, "code").text
    assert shown.find_element(By.CSS_SELECTOR, ".hljs-number").text == "1"
    summary = shown.find_element(By.TAG_NAME, "summary")
    summary.click()
    assert "Hm." in shown.find_element(By.TAG_NAME, "details").text
    assert not browser.find_element(By.CSS_SELECTOR, ".answer > .text").is_displayed()
    keep(browser, "formatted")
    browser.refresh()
    wait(browser, "document.getElementById('chats')").click()
    wait(browser, "document.querySelector('#chat-list .open')").click()
    assert browser.find_element(By.CSS_SELECTOR, ".formatted h1").text == "Title"
    keep(browser, "saved")
    edit = browser.find_elements(By.CSS_SELECTOR, ".tools button")[1]
    edit.click()
    assert browser.execute_script("return document.getElementById('prompt').value").startswith(
        "SAY["
    )
    assert browser.find_elements(By.CSS_SELECTOR, ".turn") == []
    browser.execute_script("document.getElementById('prompt').value = 'Hello'")
    browser.execute_script("document.getElementById('max-tokens').value = 5")
    say(browser, "")
    wait(browser, "document.querySelector('.tools')")
    assert browser.find_element(By.CSS_SELECTOR, ".cut").text == "cut at 5 tokens"
    first = browser.find_element(By.CSS_SELECTOR, ".answer > .text").get_attribute("textContent")
    browser.find_element(By.CSS_SELECTOR, ".tools button").click()
    wait(
        browser,
        "document.querySelectorAll('.tools').length === 1 && !document.querySelector('.live')",
    )
    again = browser.find_element(By.CSS_SELECTOR, ".answer > .text").get_attribute("textContent")
    assert again != first
    troubles = [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    # The handler above is refused by the page's own rules even before it is taken out.
    assert [message for message in troubles if "inline event handler" not in message] == []


def test_tools_are_called_and_told_what_they_gave(browser: Any, page_server: LiveServer) -> None:
    browser.get(page_server.url)
    tools = '{"name": "get_weather", "parameters": {"type": "object"}}'
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    browser.execute_script(
        "const field = document.getElementById('tools'); field.value = arguments[0];"
        "field.dispatchEvent(new Event('change'));"
        "document.getElementById('prompt').value = arguments[1]",
        tools, f"SAY[I look.{call}]YAS",
    )  # fmt: skip
    say(browser, "")
    wait(browser, "document.querySelector('.tools')")
    shown = browser.find_element(By.CSS_SELECTOR, ".call")
    assert shown.find_element(By.CSS_SELECTOR, ".call-name").text == "calls get_weather"
    assert '"city": "Rome"' in shown.find_element(By.TAG_NAME, "pre").text
    shown.find_element(By.CSS_SELECTOR, ".result").send_keys("SAY[Warm.]YAS\n")
    wait(browser, "document.querySelectorAll('.tools').length === 2")
    last = browser.find_elements(By.CSS_SELECTOR, ".answer > .text")[-1]
    assert last.get_attribute("textContent") == "Warm."
    keep(browser, "tools")
    browser.refresh()  # a saved chat has its calls, and what they gave
    wait(browser, "document.getElementById('chats')").click()
    wait(browser, "document.querySelector('#chat-list .open')").click()
    assert browser.find_element(By.CSS_SELECTOR, ".result").get_attribute("value") == (
        "SAY[Warm.]YAS"
    )
    assert len(browser.find_elements(By.CSS_SELECTOR, ".turn")) == 2
    browser.find_elements(By.CSS_SELECTOR, ".tools button")[-1].click()  # the last answer again
    wait(browser, "document.querySelectorAll('.turn').length === 2 && " + DONE)
    browser.execute_script(
        "document.getElementById('tools').value = '[';"
        "document.getElementById('prompt').value = 'Hello'"
    )
    say(browser, "")
    assert "tools: not JSON" in wait(browser, "document.querySelector('.error')").text
