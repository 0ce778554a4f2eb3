"""The operator's page in a real browser: what a person does with it, and that nothing of it breaks its own policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kubernetes import client
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tests.observability.conftest import JOB, NAMESPACE, PIPELINES, PLACE, STAGES, Browser, World, await_true

from perseus_core import keys
from perseus_operator.controller.view import JobView, PoolView
from perseus_operator.objects.values import JobRef, User
from perseus_operator.servers.web.access import Access
from perseus_operator.servers.web.server import Pages, WebServer


@pytest.fixture
def slow_pipeline(world: World) -> Iterator[None]:
    """Somebody says that a pipeline is slow."""

    def tell(text: str | None) -> None:
        patch = {"metadata": {"annotations": {keys.ANNOTATION_STRAGGLER: text}}}
        api = client.CustomObjectsApi(world.cluster.api)
        api.patch_namespaced_custom_object(*PLACE, JOB, patch, _content_type="application/merge-patch+json")

    tell("1:0:1.12")
    await_true("the straggler is taken in", lambda: world.status().get("stragglers"))
    yield
    tell(None)
    await_true("the straggler is forgotten", lambda: not world.status().get("stragglers"))


def test_the_list_leads_to_the_job(browser: Browser) -> None:
    browser.open()
    await_true("the list is drawn", lambda: browser.count("#training tbody tr") == 1)
    # Plans are made again once clock changes are measured, and the job is not ready then.
    ready = f"{NAMESPACE}/{JOB} yes MinEnergy"
    await_true("the job is ready", lambda: ready in browser.text("#training tbody tr"))
    row = browser.text("#training tbody tr")
    assert "%" in row
    browser.picture("jobs")
    browser.driver.find_element(By.CSS_SELECTOR, "#training tbody a").click()
    await_true("the job is drawn", lambda: browser.count("#pipeline .instruction") > 0)
    assert browser.text("#where") == f"{NAMESPACE}/{JOB}"


def test_the_slider_says_what_a_deadline_costs_and_saves(browser: Browser, world: World) -> None:
    browser.open(f"{NAMESPACE}/{JOB}")
    slider = await_true("the slider is there", lambda: browser.driver.find_elements(By.ID, "point"))[0]
    await_true(
        "the plan in force is chosen", lambda: slider.get_attribute("value") == str(world.status()["plan"]["point"])
    )
    await_true("its pipeline is drawn", lambda: browser.count("#pipeline .instruction") == STAGES * 12)
    browser.picture("plan-in-force")
    seen, shades = {}, {}
    for key in (Keys.HOME, Keys.END):
        slider.send_keys(key)
        point = slider.get_attribute("value")
        await_true(
            "the plan is drawn",
            lambda p=point: browser.driver.find_element(By.ID, "pipeline").get_dom_attribute("data-point") == p,
        )
        figures = browser.text("#answer").splitlines()
        seen[key] = dict(zip(figures[::2], figures[1::2], strict=True))
        # At once: the page may draw them anew in between.
        drawn = "return [...document.querySelectorAll('.instruction')].map((box) => box.getAttribute('fill'))"
        shades[key] = set(browser.driver.execute_script(drawn))
        widths = "return [...document.querySelectorAll('#pipeline .wait')].map((box) => box.getAttribute('width'))"
        assert {round(float(width)) for width in browser.driver.execute_script(widths)} == {1100 - 60 - 10}, (
            "the axis ends where the plan does, however long the slowest takes"
        )
        browser.picture("fastest" if key == Keys.HOME else "slowest")
    assert len(shades[Keys.HOME]) > 1, "slack is filled even where nothing may be slower"
    assert shades[Keys.HOME] != shades[Keys.END]
    fastest, slowest = seen[Keys.HOME], seen[Keys.END]
    assert fastest["slower than T_min"] == "0.00%"
    assert float(slowest["slower than T_min"].rstrip("%")) > 3
    assert float(slowest["energy saved"].rstrip("%")) > float(fastest["energy saved"].rstrip("%")) > 0
    assert browser.driver.current_url.endswith(f"#{NAMESPACE}/{JOB}/{slider.get_attribute('value')}")


def test_an_address_brings_back_the_same_view(browser: Browser) -> None:
    browser.open(f"{NAMESPACE}/{JOB}/3")
    await_true(
        "the point is chosen",
        lambda: browser.driver.find_element(By.ID, "pipeline").get_dom_attribute("data-point") == "3",
    )
    browser.driver.find_element(By.ID, "current").click()
    await_true("the plan in force is chosen", lambda: not browser.driver.current_url.endswith("/3"))


def test_the_pictures_are_there_as_tables_by_keyboard_alone(browser: Browser) -> None:
    browser.open(f"{NAMESPACE}/{JOB}")
    await_true("the pipeline is drawn", lambda: browser.count("#pipeline .instruction") == STAGES * 12)
    assert browser.count("#points tbody tr, #instructions tbody tr") == 0, "filled when somebody opens them"
    for table in ("points", "instructions"):
        summary = browser.driver.find_element(By.XPATH, f"//table[@id='{table}']/../summary")
        summary.send_keys(Keys.ENTER)
    await_true(
        "both tables are filled", lambda: browser.count("#points tbody tr") and browser.count("#instructions td")
    )
    assert browser.count("#points tbody tr") == browser.count("#frontier circle:not(#chosen)")
    assert browser.count("#instructions tbody tr") == STAGES * 12
    first = browser.text("#instructions tbody tr")
    assert first.startswith("0 forward of microbatch 0 0.0000 ")
    slowest = browser.driver.find_element(By.ID, "point")
    slowest.send_keys(Keys.END)
    await_true("the table follows the slider", lambda: browser.text("#instructions tbody tr") != first)
    browser.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    assert browser.driver.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
    browser.picture("tables-dark")
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


class OneUser:
    """An API server that knows one token."""

    def user_of(self, token: str) -> User | None:
        return User("ann") if token == "ann's" else None

    def may_get(self, user: User, plural: str, namespace: str) -> bool:
        return namespace == "team-a"


def test_a_page_with_a_login_asks_for_a_token_and_shows_the_jobs_of_its_user(browser: Browser) -> None:
    views = [JobView(JobRef(namespace, "gpt3", namespace), None, {}, None) for namespace in ("team-a", "team-b")]
    server = WebServer("127.0.0.1:0", Pages(lambda: views), Access(OneUser()))
    page = Browser(browser.driver, f"http://{server.address}")
    try:
        page.open()
        token = page.driver.find_element(By.ID, "token")
        await_true("a token is asked for", token.is_displayed)
        assert not page.driver.find_element(By.ID, "jobs").is_displayed()
        token.send_keys("made up", Keys.ENTER)
        await_true("it is refused", lambda: "does not accept this token" in page.text("#error"))
        page.picture("login")
        token.send_keys("ann's", Keys.ENTER)
        await_true("the jobs are shown", lambda: "team-a/gpt3" in page.text("#jobs"))
        assert "team-b" not in page.driver.page_source
        assert not token.is_displayed()
        page.open("team-a/gpt3")
        await_true("one job is shown", lambda: "There is no frontier yet" in page.text("#waiting"))
        refused = [line for line in page.complaints() if "401" not in line]
        assert refused == []
    finally:
        server.close()


PHONE = {"width": 480, "height": 900, "deviceScaleFactor": 1, "mobile": True}
POOL = {
    "metadata": {"namespace": "team-a", "name": "llama"},
    "spec": {"mode": "Canary"},
    "status": {
        "replicaCount": 2,
        "replicas": [{"pod": "<b>llama-0</b>", "clockMegahertz": 1200, "limitedBy": "Boost"}],
        "proposedLimits": {"timePerOutputToken": "31ms"},
        "conditions": [
            {"type": "ClocksApplied", "status": "False", "reason": "NoLimits", "message": "There is no limit."},
            {"type": "Ready", "status": "True", "reason": "Ready", "message": "The pool is observed."},
        ],
    },
}


def test_the_list_leads_to_a_pool_which_says_what_to_do(browser: Browser) -> None:
    views = [PoolView(JobRef("team-a", "llama", "uid", keys.POOL_KIND), POOL)]
    server = WebServer("127.0.0.1:0", Pages(lambda: views))
    page = Browser(browser.driver, f"http://{server.address}")
    try:
        page.open()
        await_true("the pool is listed", lambda: "proposed: 31ms" in page.text("#pools tbody tr"))
        assert not page.driver.find_element(By.ID, "training").is_displayed(), "there is no job"
        assert "not measured\nThere is no limit." in page.text("#pools tbody tr td:last-child"), "why not stands beside"
        page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
        overhang = page.driver.execute_script("return document.documentElement.scrollWidth - innerWidth")
        assert overhang == 0, "a wide table scrolls by itself"
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.driver.find_element(By.CSS_SELECTOR, "#pools tbody a").click()
        await_true("the pool is drawn", lambda: "team-a/llama" in page.text("#where"))
        await_true("its replica is shown", lambda: "<b>llama-0</b> 1,200 MHz" in page.text("#replicas tbody tr"))
        assert "1 more" in page.text("#more")
        assert page.text("#pool-state .note") == "Savings are not measured: There is no limit."
        assert page.text("#command").startswith("kubectl patch servingpool llama -n team-a")
        assert "There is no limit." in page.text("#conditions")
        assert not page.driver.find_element(By.ID, "job").is_displayed()
        page.picture("pool")
        assert page.complaints() == []
    finally:
        server.close()


@pytest.mark.usefixtures("slow_pipeline")
def test_a_straggler_is_said(browser: Browser) -> None:
    browser.open(f"{NAMESPACE}/{JOB}")
    expected = f"Pipeline {PIPELINES - 1} is 12.00% slower (declared)"
    await_true("the straggler is shown", lambda: expected in browser.text("#stragglers"))
    await_true("the pipeline is drawn", lambda: browser.count("#pipeline .instruction") > 0)
    await_true("savings are measured again", lambda: "not measured" not in browser.text("#state"))
    browser.picture("straggler")


def test_a_job_that_waits_says_for_what(browser: Browser, world: World) -> None:
    name = "hostile"
    world.apply_job(name, profile={"configMapRef": {"name": "absent"}, "blockingPowerMilliwatts": 1})
    try:
        await_true("it is refused", lambda: "conditions" in world.status(name))
        browser.open(f"{NAMESPACE}/{name}")
        await_true("the reason is shown", lambda: "ConfigMapNotFound" in browser.text("#conditions"))
        assert "The conditions below give the reason" in browser.text("#waiting")
        assert not browser.driver.find_element(By.ID, "solved").is_displayed()
    finally:
        world.custom.delete_namespaced_custom_object(*PLACE, name)


def test_an_unknown_job_and_hostile_addresses_are_only_text(browser: Browser) -> None:
    for fragment in ("default/none", "<img src=x onerror=alert(1)>/<b>x</b>"):
        browser.open(fragment)
        await_true("the error is shown", lambda: "The page could not be updated" in browser.text("#error"))
        assert browser.count("#where img, #where b, #error img") == 0
    assert all("404" in line for line in browser.complaints() if "/api/jobs/" in line)


def test_the_page_breaks_no_policy_of_its_own(browser: Browser) -> None:
    browser.complaints()
    browser.open(f"{NAMESPACE}/{JOB}")
    await_true("the pipeline is drawn", lambda: browser.count("#pipeline .instruction") > 0)
    assert browser.complaints() == []
