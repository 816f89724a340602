"""report.html in a browser, where one is found: nothing wider than a phone's screen, no error in the console."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from samples import comparison

from hf_posenc.report.html import page_html

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
BROWSERS = [(CHROMIUM, DRIVER)] if CHROMIUM and DRIVER else []
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
MEASURE = """
const wide = document.documentElement.clientWidth;
const free = [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll, pre, svg"));
const type = e => parseFloat(getComputedStyle(e).fontSize) * Math.hypot(e.getScreenCTM().a, e.getScreenCTM().b);
return [
  document.documentElement.scrollWidth,
  wide,
  free.filter(e => e.getBoundingClientRect().right > wide + 0.5).map(e => e.tagName + "." + e.className),
  Math.min(...[...document.querySelectorAll("svg text")].map(type)),
];
"""


def ask(address: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    """One command of the WebDriver protocol, which is plain HTTP and JSON."""
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(address, data, method=method), timeout=60) as answer:
        return json.load(answer)["value"]


@contextmanager
def session(chromium: str, driver: str, width: int, profile: Path) -> Iterator[str]:
    """The address of a browser session whose screen is `width` CSS pixels wide."""
    screen = {"width": width, "height": 800, "pixelRatio": 1}
    options = {
        "binary": chromium,
        "args": [*SWITCHES, f"--user-data-dir={profile}"],
        "mobileEmulation": {"deviceMetrics": screen},
    }
    wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            port = next(
                found[1] for line in process.stdout if (found := re.search(r"successfully on port (\d+)", line))
            )
            made = ask(f"http://127.0.0.1:{port}/session", {"capabilities": {"alwaysMatch": wanted}})
            address = f"http://127.0.0.1:{port}/session/{made['sessionId']}"
            yield address
            ask(address, method="DELETE")
        finally:
            process.kill()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(page_html(comparison()), encoding="utf-8")
    return file.as_uri()


@pytest.mark.parametrize(("chromium", "driver"), BROWSERS)
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_the_screen_and_the_console_is_silent(
    width: int, chromium: str, driver: str, page: str, tmp_path: Path
) -> None:
    with session(chromium, driver, width, tmp_path / "profile") as browser:
        ask(f"{browser}/url", {"url": page})
        scrolled, seen, too_wide, smallest = ask(f"{browser}/execute/sync", {"script": MEASURE, "args": []})
        assert seen == width and scrolled <= width, too_wide
        assert too_wide == []
        assert smallest >= 8  # CSS pixels of type in a figure
        assert ask(f"{browser}/se/log", {"type": "browser"}) == []
