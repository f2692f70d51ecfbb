"""The web page, in real headless Chromium: search, filters, chains, keyboard, side by side, themes, phone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import preview_features
import pytest
from click.testing import CliRunner

import patchguard
from patchguard.cli import main
from patchguard.html import page
from patchguard.journal import Journal
from patchguard.plan import fingerprint

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium, of the test extra")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="needs Chromium and its chromedriver (Debian: chromium, chromium-driver)"
)

FORWARD = "pk_plan.model.Attention.forward"
TARGETS = 2000


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


Open = Callable[..., Any]


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open a page of one or two snapshots; afterwards nothing was complained of and nothing was fetched."""
    file = tmp_path / "report.html"

    def opened(*snapshots: Any, width: int = 1280, height: int = 1000, scheme: str = "light", path: Any = None) -> Any:
        if path is None:
            path = file
            path.write_text(
                page(snapshots[0], "first.json", *snapshots[1:], *["second.json"][: len(snapshots) - 1]),
                encoding="utf-8",
            )
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get_log("browser"), browser.get_log("performance")
        browser.get(path.as_uri())
        return browser

    yield opened
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    fetched = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert {url for url in fetched if not url.startswith(("file:", "data:"))} == set()
    assert "[object" not in browser.find_element("tag name", "body").text


def take(**config: Any) -> dict[str, Any]:
    guard = patchguard.Guard(journal=Journal(level="off"))
    preview_features.register(guard)
    guard.repatch(config)
    found: dict[str, Any] = json.loads(json.dumps(guard.snapshot()))
    guard.uninstall()
    return found


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """Two targets, a conflict, a wrapper, findings, and text that would be markup if it were not escaped."""
    found = take(first=True, second=True, timing=True, use_class=True)
    found["findings"] = [
        {"kind": "validate", "where": "F", "message": "refused </script><b>bold</b>", "severity": "error"},
        {"kind": "unread", "where": "frist", "message": "Did you mean first?", "severity": "warning"},
    ]
    return found


def many(number: int) -> dict[str, Any]:
    """A snapshot with ``number`` targets of 20 features in 10 packages, each tenth with a conflict."""
    found = take(first=True, second=True)
    pattern = next(t for t in found["targets"] if t["target"] == FORWARD)
    targets = []
    for i in range(number):
        function = f"vendor.feature{i % 20}.replace_{i}"
        entry = json.loads(json.dumps(pattern))
        entry |= {"target": f"package{i % 10}.module{i % 50}.Class{i}.method", "replacement": function}
        entry["provider"] = entry["parties"]["winner"]["provider"] = f"Feature{i % 20}"
        entry["parties"]["winner"]["function"] = function
        if i % 10:
            entry |= {"suppressed": [], "rule": None, "reason": None}
        targets.append(entry)
    found["targets"] = sorted(targets, key=lambda t: str(t["target"]))
    found["fingerprint"] = fingerprint(found["targets"], found["versions"])
    return found


def shown(browser: Any) -> list[str]:
    """The targets that are listed now."""
    script = "return [...document.querySelectorAll('details:not([hidden])')].map((d) => d.dataset.target)"
    found: list[str] = browser.execute_script(script)
    return found


def keys(browser: Any, *names: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    for name in names:
        ActionChains(browser).send_keys(getattr(Keys, name, name)).perform()


def choose(browser: Any, name: str, value: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(browser.find_element("id", name)).select_by_value(value)


def text(browser: Any, name: str) -> str:
    found: str = browser.find_element("id", name).text
    return found


# ---- one snapshot --------------------------------------------------------------------------------


def test_search_and_filters_narrow_the_list_together(visit: Open, small: dict[str, Any]) -> None:
    browser = visit(small)
    both = [t["target"] for t in small["targets"]]
    assert shown(browser) == both
    assert text(browser, "count") == "2 of 2"
    search = browser.find_element("id", "search")
    search.send_keys("SECOND_forward")  # in the suppressed function, whatever the case
    assert shown(browser) == [FORWARD]
    search.send_keys(" nothing")
    assert shown(browser) == []
    assert browser.find_element("id", "none").is_displayed()
    browser.find_element("id", "clear-too").click()
    assert shown(browser) == both
    choose(browser, "feature", "TimingFeature")
    assert shown(browser) == [FORWARD]
    choose(browser, "feature", "ClassFeature")
    assert shown(browser) == ["pk_plan.model.Attention"]
    browser.find_element("id", "conflicted").click()
    assert shown(browser) == []
    browser.find_element("id", "clear").click()
    browser.find_element("id", "conflicted").click()
    assert shown(browser) == [FORWARD]
    choose(browser, "state", "applied")
    choose(browser, "package", "pk_plan")
    assert text(browser, "count") == "1 of 2"


def test_a_target_opens_to_its_chain_with_file_and_line(visit: Open, small: dict[str, Any]) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser = visit(small)
    row = browser.find_element("css selector", f"details[data-target='{FORWARD}']")
    assert row.find_elements("class name", "inside") == []  # made when it is opened
    row.find_element("tag name", "summary").click()
    WebDriverWait(browser, 60).until(lambda _: row.find_elements("class name", "inside"))
    steps = [item.text for item in row.find_elements("css selector", "ol.chain > li")]
    assert [step.partition(" ")[0].lower() for step in steps] == ["original", "replacement", "wrapper", "suppressed"]
    assert "preview_features.first_forward" in steps[1]
    assert re.search(r"defined .*preview_features\.py:\d+\nregistered .*preview_features\.py:\d+", steps[1])
    assert "SecondFeature" in steps[3]
    assert "first-registered" in steps[3]
    assert "no rule or priority names this pair" in steps[3]


def test_findings_and_conflicts_are_told_and_text_is_never_markup(visit: Open, small: dict[str, Any]) -> None:
    browser = visit(small)
    assert text(browser, "findings-count") == "1 error, 1 warning"
    assert "refused </script><b>bold</b>" in text(browser, "findings-list")
    assert "Did you mean first?" in text(browser, "findings-list")
    conflicts = text(browser, "conflicts-list")
    assert re.search(r"Attention\.forward\nFirstFeature over SecondFeature\nRULE first-registered", conflicts)
    assert not browser.find_element("id", "compare").is_displayed()
    assert small["fingerprint"] in text(browser, "facts")


def test_everything_can_be_reached_with_the_keyboard(visit: Open, small: dict[str, Any]) -> None:
    browser = visit(small)
    keys(browser, "/")
    assert browser.switch_to.active_element.get_attribute("id") == "search"
    keys(browser, *"attention")
    assert len(shown(browser)) == 2
    keys(browser, "ARROW_DOWN", "ARROW_DOWN", "ENTER")
    row = browser.find_element("css selector", f"details[data-target='{FORWARD}']")
    assert row.get_attribute("open") is not None
    keys(browser, "ARROW_UP", "ARROW_UP")
    assert browser.switch_to.active_element.get_attribute("id") == "search"
    keys(browser, "ESCAPE")
    assert browser.find_element("id", "search").get_attribute("value") == ""
    # By tab alone, from the top: the link past the head, the theme, the tools, the first target.
    browser.refresh()
    reached = []
    for _ in range(9):
        keys(browser, "TAB")
        element = browser.switch_to.active_element
        reached.append(element.get_attribute("id") or element.tag_name)
    assert reached[1:] == ["theme", "search", "feature", "state", "package", "conflicted", "clear", "summary"]


def test_two_thousand_targets_are_searched_and_filtered(visit: Open) -> None:
    browser = visit(many(TARGETS))
    assert text(browser, "count") == f"{TARGETS} of {TARGETS}"
    browser.find_element("id", "search").send_keys("class1999.")
    assert shown(browser) == ["package9.module49.Class1999.method"]
    keys(browser, "ESCAPE")
    choose(browser, "feature", "Feature3")
    assert len(shown(browser)) == TARGETS // 20
    choose(browser, "package", "package3")
    assert len(shown(browser)) == TARGETS // 20  # every feature is in one package here
    choose(browser, "feature", "")
    assert len(shown(browser)) == TARGETS // 10
    choose(browser, "package", "")
    browser.find_element("id", "conflicted").click()
    assert len(shown(browser)) == TARGETS // 10
    assert text(browser, "conflicts-count") == str(TARGETS // 10)


# ---- two snapshots -------------------------------------------------------------------------------


def test_two_snapshots_side_by_side(visit: Open, small: dict[str, Any]) -> None:
    other = take(second=True, use_class=True)
    browser = visit(small, other)
    assert [text(browser, "name-a"), text(browser, "name-b")] == ["first.json", "second.json"]
    assert text(browser, "compare-count") == "1 of 2 targets differ"
    rows = [r for r in browser.find_elements("css selector", "#rows tr") if r.is_displayed()]
    assert len(rows) == 1
    head, first, second = (cell.text for cell in rows[0].find_elements("css selector", "th, td"))
    assert head.startswith(FORWARD)
    for aspect in ("replacement", "provider", "wrappers", "suppressed"):
        assert aspect in head
    assert "preview_features.first_forward \u2039 preview_features.timing_wrapper" in first
    assert "FirstFeature" in first
    assert "preview_features.second_forward" in second
    browser.find_element("id", "all").click()
    assert len([r for r in browser.find_elements("css selector", "#rows tr") if r.is_displayed()]) == 2
    browser.find_element("id", "search").send_keys("ClassFeature")
    assert len([r for r in browser.find_elements("css selector", "#rows tr") if r.is_displayed()]) == 1


def test_a_target_that_only_one_snapshot_has_and_versions_are_told(visit: Open, small: dict[str, Any]) -> None:
    other = take(first=True)
    small = {**small, "versions": {}, "fingerprint": None}
    other["versions"] = {"mindspeed": "0.16.0"}
    other["fingerprint"] = None
    browser = visit(small, other)
    rows = text(browser, "rows")
    assert re.search(r"VERSION ?mindspeed none 0\.16\.0", rows)
    assert "removed" in rows
    assert "not patched" in rows
    assert "and 1 more thing" in text(browser, "compare-count")
    assert "different" in text(browser, "facts")


def test_a_snapshot_beside_itself_has_no_difference(visit: Open, small: dict[str, Any]) -> None:
    browser = visit(small, small)
    assert text(browser, "compare-count") == "no difference"
    assert "the same" in text(browser, "facts")


# ---- how it looks --------------------------------------------------------------------------------


def colours(browser: Any) -> list[float]:
    """Brightness of page and text, from 0 to 255."""
    script = (
        "const style = getComputedStyle(document.body);"
        "return [style.backgroundColor, style.color].map((c) => c.match(/[0-9.]+/g).slice(0, 3).map(Number))"
    )
    return [sum(c) / 3 for c in browser.execute_script(script)]


def test_light_and_dark_by_the_system_and_by_the_button(visit: Open, small: dict[str, Any]) -> None:
    page_colour, ink = colours(visit(small))
    assert page_colour > 200
    assert ink < 60
    browser = visit(small, scheme="dark")
    page_colour, ink = colours(browser)
    assert page_colour < 60
    assert ink > 200
    browser.find_element("id", "theme").click()
    assert colours(browser)[0] > 200
    browser.find_element("id", "theme").click()
    assert colours(browser)[0] < 60


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_page_is_wider_than_its_window(visit: Open, small: dict[str, Any], width: int) -> None:
    other = take(second=True)
    browser = visit(small, other, width=width, height=800)
    for summary in browser.find_elements("tag name", "summary"):
        browser.execute_script("arguments[0].click()", summary)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    if width < 500:
        small_targets = browser.execute_script(
            "return [...document.querySelectorAll('button, select, input[type=search], summary')]"
            ".filter((e) => e.offsetParent && e.offsetHeight < 36).map((e) => e.outerHTML.slice(0, 80))"
        )
        assert small_targets == []  # large enough for a thumb


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_writes_one_file_that_needs_no_other(visit: Open, small: dict[str, Any], tmp_path: Path) -> None:
    one, other, out = tmp_path / "one.json", tmp_path / "other.json", tmp_path / "out" / "r.html"
    one.write_text(json.dumps(small), encoding="utf-8")
    other.write_text(json.dumps(take(second=True)), encoding="utf-8")
    out.parent.mkdir()
    args = ["report", "-s", str(one), "--compare", str(other), "--html", str(out)]
    done = CliRunner().invoke(main, args)
    assert (done.exit_code, done.output) == (0, "")
    assert [p.name for p in out.parent.iterdir()] == ["r.html"]
    source = out.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(""", source)
    browser = visit(path=out)
    assert text(browser, "title") == "one.json \u2194 other.json"
    assert text(browser, "count") == "2 of 2"
