"""A browser and a server that the tests of the page share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.live_server import PATIENCE, LiveServer

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--force-device-scale-factor=1",
]


@pytest.fixture(scope="session")
def page_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("page") / "log"
    server = LiveServer(log, {"FAKE_STEP_SECONDS": "0.01"}, max_model_len=60_000)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium is not installed")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile: Path = tmp_path_factory.mktemp("profile")
    for flag in [*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,860"]:
        options.add_argument(flag)
    service = webdriver.ChromeService(executable_path=DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_page_load_timeout(PATIENCE)
    driver.set_script_timeout(PATIENCE)
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """The browser as one that was never used: of its size, with nothing kept of any page."""
    chromium.get_log("browser")  # what was logged before
    yield chromium
    origin = chromium.execute_script("return location.origin")
    chromium.get("about:blank")
    everything = {"origin": origin, "storageTypes": "all"}
    chromium.execute_cdp_cmd("Storage.clearDataForOrigin", everything)
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
