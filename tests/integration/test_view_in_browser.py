"""The page in a real Chromium, from the command that a person types: keyboard, search, filters, tokens, widths."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from heterorl.common.types.sample import rollout_json
from tests.support.browser import DESKTOP, PHONE, browser
from tests.support.limits import WAIT_S
from tests.support.samples import ASKED, make_sample, make_turns

ROOT = Path(__file__).parents[2]
EVIL = "<script>document.title = 'pwned'</script><img src=x onerror=\"document.title='pwned'\"></pre><b>bold"
NAME = "the-only-one"
COUNT = 120
CONTRAST = """() => {
    const shade = (text) => {
        const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (node) => {
        const own = getComputedStyle(node).backgroundColor;
        return own.startsWith('rgb(') || !node.parentElement ? own : ground(node.parentElement);
    };
    return [...document.querySelectorAll('main *, header *')].filter((node) => node.checkVisibility() && [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim())).map((node) => {
        const [a, b] = [shade(getComputedStyle(node).color), shade(ground(node))];
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.className || node.tagName, node.textContent.slice(0, 30)];
    }).filter(([ratio]) => ratio < 4.5);
}"""
"""Texts whose contrast with what is behind them is below 4.5 to 1, the least of WCAG's level AA."""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The URL that `heterorl view FILE` prints."""
    directory = tmp_path_factory.mktemp("export")
    samples = [make_sample(n, rollouts=8, steps=6) for n in range(1, COUNT + 1)]
    samples[-3] = make_sample(COUNT - 2, prompt=EVIL, completions=(EVIL, f"It is {NAME}, across tokens."))
    samples[-7] = make_turns(COUNT - 6)
    with (directory / "run.jsonl").open("w") as file:
        for sample in samples:
            file.writelines(
                json.dumps(rollout_json(sample, i, with_tokens=True)) + "\n" for i in range(len(sample.rollouts))
            )
    command = [sys.executable, "-m", "heterorl", "view", str(directory / "run.jsonl"), "--no-browser"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(directory)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield re.search(r"http://127\.0\.0\.1:\d+/\?key=\S+", process.stdout.readline()).group()
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        process.stdout.close()
    # What was read is deleted with the page.
    assert [path.name for path in directory.iterdir()] == ["run.jsonl"]


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@contextlib.contextmanager
def opened(chromium, url, *, size=DESKTOP, scheme="light", path="/", num_refused=0, **options):
    width, height = size
    context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
    # None of its own: the test's limit ends it.
    context.set_default_timeout(0)
    page = context.new_page()
    faults = []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "request", lambda request: None if request.url.startswith(url.split("?")[0]) else faults.append(request.url)
    )
    try:
        page.goto(url)
        # Not by a function of the page: the second look at it is an eval, which the page's policy forbids.
        page.locator("#state", has_text=f"{COUNT} samples").wait_for(state="attached")
        page.goto(url.split("/?")[0] + path)
        yield page
        # No error in the console, no script that the policy stopped, nothing asked of another host.
        assert len(faults) == num_refused, faults
    finally:
        context.close()


def ids(page):
    return [int(value) for value in page.eval_on_selector_all(".row", "rows => rows.map(row => row.dataset.id)")]


@pytest.mark.slow
def test_the_list_is_walked_by_keyboard(chromium, url):
    with opened(chromium, url) as page:
        shown = ids(page)
        assert shown == list(range(COUNT, COUNT - 50, -1))

        for key in ("j", "j", "ArrowDown", "k"):
            page.keyboard.press(key)
        assert page.locator(".row.chosen").get_attribute("data-id") == str(shown[1])
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/sample/{shown[1]}")
        page.keyboard.press("j")
        page.wait_for_url(f"**/sample/{shown[2]}")
        page.keyboard.press("k")
        page.wait_for_url(f"**/sample/{shown[1]}")
        page.keyboard.press("ArrowRight")
        page.wait_for_url(f"**/sample/{shown[2]}")
        page.keyboard.press("u")
        page.wait_for_url("**/?before=*")
        assert ids(page)[0] == shown[2]
        page.keyboard.press("ArrowRight")
        page.wait_for_url(lambda address: f"before={shown[2] - 49}" in address)


@pytest.mark.slow
def test_search_and_filters_narrow_the_list_and_its_samples(chromium, url):
    with opened(chromium, url) as page:
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.name") == "text"
        page.keyboard.type("CHECK the carry")
        page.keyboard.press("Enter")
        page.wait_for_url("**/?text=CHECK+the+carry")
        found = ids(page)
        assert 0 < len(found) <= 50
        assert set(page.locator("mark").all_text_contents()) == {"check the carry"}

        page.select_option("select[name=fate]", "dropped")
        page.wait_for_url("**/?text=CHECK+the+carry&fate=dropped")
        dropped = ids(page)
        assert dropped
        assert all(number % 7 == 0 for number in dropped)
        page.fill("input[name=reward_from]", "0.9")
        page.click("text=Show")
        page.wait_for_url("**reward_from=0.9")
        page.select_option("select[name=site]", "eu-1")
        page.wait_for_url("**site=eu-1**")
        assert all(number % 21 == 0 for number in ids(page))

        page.locator(".row").first.click()
        page.wait_for_url("**/sample/**")
        assert "fate=dropped" in page.url
        assert page.evaluate("CSS.highlights.get('found').size") > 0
        page.keyboard.press("/")
        page.wait_for_url("**#search")
        assert page.input_value("input[name=text]") == "CHECK the carry"


@pytest.mark.slow
def test_what_is_searched_is_marked_across_tokens(chromium, url):
    with opened(chromium, url, path=f"/?text={NAME}") as page:
        assert ids(page) == [COUNT - 2]
        page.locator(".row").click()
        page.wait_for_selector("article")

        marked = page.evaluate("[...CSS.highlights.get('found')].map(range => range.toString())")

        assert marked == [NAME]


@pytest.mark.slow
def test_what_a_model_says_does_nothing(chromium, url):
    with opened(chromium, url, path=f"/sample/{COUNT - 2}") as page:
        assert page.title() == f"#{COUNT - 2} - heterorl view"
        assert page.locator("section.prompt pre").first.text_content() == EVIL
        assert page.locator("#completion-1 pre").text_content() == EVIL
        assert page.locator("main script, main img, main b:not(.reward)").count() == 0
        page.locator("#completion-1 pre span").first.hover()
        assert page.locator("#tip b").text_content() == '"<"'


@pytest.mark.slow
def test_a_token_says_its_numbers_and_the_colours_change(chromium, url):
    sample = make_sample(COUNT - 4, rollouts=8, steps=6)
    assert sample.summary.kept_because == "consumed"
    rollout = sample.rollouts[2]
    with opened(chromium, url, path=f"/sample/{COUNT - 4}") as page:
        token = page.locator("#completion-3 pre span").nth(5)
        token.hover()
        said = page.locator("#tip").inner_text()
        assert f"{rollout.sampler_logprobs[5]:.3f}" in said
        assert f"{rollout.log_ratios[5]:+.3f}" in said
        assert f"version {rollout.spans[0].version}" in said

        strong = page.locator("pre .n4, pre .p4").first
        before = strong.evaluate("token => getComputedStyle(token).backgroundColor")
        page.keyboard.press("c")
        assert strong.evaluate("token => getComputedStyle(token).backgroundColor") != before
        assert page.locator(".legend.probability").is_visible()
        assert not page.locator(".legend.ratio").is_visible()


@pytest.mark.slow
def test_given_tokens_are_shaded_and_say_who_gave_them(chromium, url):
    with opened(chromium, url, path="/?lost=yes") as page:
        assert ids(page) == [COUNT - 6]
        page.locator(".row").click()
        page.wait_for_selector("article")
        assert "Let me add." in (said := page.locator("#completion-2 pre").text_content())
        # Heads are not of the text, and stand above it.
        assert ASKED in said
        assert "environment" not in said
        head = page.locator("#completion-2 [data-writer=environment]").first
        assert head.evaluate("head => getComputedStyle(head, '::before').content") == '"environment"'

        given = page.locator("#completion-2 .given").first
        shade = given.evaluate("token => getComputedStyle(token).backgroundColor")
        given.hover()
        assert "by the environment" in page.locator("#tip").inner_text()
        assert "log-prob" not in page.locator("#tip").inner_text()
        page.keyboard.press("c")
        assert given.evaluate("token => getComputedStyle(token).backgroundColor") == shade != "rgba(0, 0, 0, 0)"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_pages_fit_their_width_and_can_be_read(chromium, url, size, scheme):
    touch = {"has_touch": True, "is_mobile": True} if size == PHONE else {}
    # A refusal is an error in the console of a browser, whatever its page looks like.
    for path, refused in (
        ("/", 0), ("/?text=carry&truncated=yes", 0), (f"/sample/{COUNT - 4}", 0), (f"/sample/{COUNT - 6}", 0),
        ("/sample/99999", 1), ("/?reward_from=x", 1),
    ):  # fmt: skip
        with opened(chromium, url, size=size, scheme=scheme, path=path, num_refused=refused, **touch) as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0], path
            assert page.evaluate(CONTRAST) == [], path


@pytest.mark.slow
def test_a_phone_has_its_filters_behind_a_button_and_shows_tokens_by_a_touch(chromium, url):
    with opened(chromium, url, size=PHONE, has_touch=True, is_mobile=True) as page:
        assert not page.locator("select[name=site]").is_visible()
        page.tap("label.more")
        page.select_option("select[name=truncated]", "yes")
        page.wait_for_url("**/?truncated=yes")
        page.locator(".row").first.tap()
        page.wait_for_selector("article")
        page.locator("#completion-1 pre span").nth(2).tap()
        assert "token id" in page.locator("#tip").inner_text()


@pytest.mark.slow
def test_without_scripts_everything_is_there_to_be_read(chromium, url):
    context = chromium.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        page.goto(url)
        # Nothing renews a page without scripts while the file is read.
        while page.locator(".row").count() < 50:
            page.reload()
        page.fill("input[name=text]", NAME)
        page.click("text=Show")
        page.locator(".row").click()
        assert NAME in page.locator("#completion-2 pre").text_content()
    finally:
        context.close()
