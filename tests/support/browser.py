"""Chromium without a window, driven by selenium; it asks the network for nothing by itself."""

import contextlib
import os
import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no Chromium with its driver; on Debian: apt-get install chromium chromium-driver",
)
FLAGS = """
--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --disable-dev-shm-usage
"""


@contextlib.contextmanager
def browser(profile):
    """Start a browser that logs what the console says and what is loaded."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(DRIVER, env={**os.environ, "LC_ALL": "C.UTF-8"})
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()
