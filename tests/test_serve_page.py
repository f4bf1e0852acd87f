"""The server's page in a browser, Debian's chromium."""

import io
import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from guide_blocks import ROOT
from jobs_support import CHAT_TEMPLATE, letters_model
from serve_support import KEY, Server, serving

from zinfer import LLM

CHROMIUM = shutil.which("chromium")
PAGE = ROOT / "zinfer" / "serve" / "page"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters", chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("server"), "--files", "kept") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra browser: pip install '.[browser]'")
    if CHROMIUM is None:
        pytest.skip("there is no chromium here")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Any, server: Server, **options: Any) -> tuple[Any, list[str]]:
    """The page in a tab of its own, and what goes wrong in it: errors, and requests to other hosts."""
    page, wrong = browser.new_context(**options).new_page(), []
    page.set_default_timeout(20_000)
    host = urlsplit(server.url).netloc

    def note_request(request: Any) -> None:
        if not request.url.startswith("data:") and urlsplit(request.url).netloc != host:
            wrong.append(request.url)

    page.on("request", note_request)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    # 401 before the key is given, 400 of a prompt that is refused
    page.on(
        "console",
        lambda said: wrong.append(said.text) if said.type == "error" and not re.search("40[01]", said.text) else None,
    )
    page.goto(server.url)
    return page, wrong


def enter(page: Any, key: str = KEY) -> None:
    page.fill("#key", key)
    page.click("#entry button")


def has_text(page: Any, selector: str, pattern: str) -> None:
    page.wait_for_function(
        "([where, pattern]) => new RegExp(pattern).test(document.querySelector(where).textContent)",
        arg=[selector, pattern],
    )


@pytest.mark.slow
def test_the_page_asks_for_a_key_and_shows_what_the_server_does(browser: Any, server: Server, model: Path) -> None:
    page, wrong = opened(browser, server)
    has_text(page, "#state", "an API key is needed")
    assert not page.is_visible("main")
    enter(page, "wrong")
    has_text(page, "#state", "the key is wrong")
    enter(page)
    has_text(page, "#model", "^letters$")
    has_text(page, "#state", "^ready$")
    has_text(page, "#tiers tr:first-child", r"device[1-9]\d*\d[.\d]* [kMG]B")
    has_text(page, "#replicas", "^0ready")
    page.fill("#prompt", "hello")
    page.fill("#temperature", "0")
    page.fill("#most", "20")
    page.click("#send")
    has_text(page, "#timing", r"^20 tokens in .* s, the first after .* m?s$|^\d+ tokens in .* ms, the first after")
    with LLM(str(model), device="cpu") as llm:
        (chat,) = llm.generate([{"role": "user", "content": "hello"}], max_new_tokens=20)
        (text,) = llm.generate("hello", max_new_tokens=20)
    assert page.text_content("#answer") == chat.text
    page.select_option("#kind", "text")
    page.click("#send")
    has_text(page, "#timing", "tokens in")
    assert page.text_content("#answer") == text.text
    has_text(page, "#generated", "[1-9]|0")
    page.fill("#most", "100000")
    page.click("#send")
    has_text(page, "#answer", "128")
    assert page.get_attribute("#answer", "class") == "bad"
    assert wrong == []


@pytest.mark.slow
def test_a_chat_has_several_turns_and_a_system_message(browser: Any, model: Path, tmp_path: Path) -> None:
    """On a server without files, whose page asks for nothing that is not there."""
    with serving(model, tmp_path) as server, LLM(str(model), device="cpu") as llm:
        page, wrong = opened(browser, server)
        enter(page)
        has_text(page, "#state", "^ready$")
        page.fill("#temperature", "0")
        page.fill("#most", "9")
        page.fill("#system", "ab")
        messages = [{"role": "system", "content": "ab"}]
        for question in ("hello", "more"):
            page.fill("#prompt", question)
            page.press("#prompt", "Control+Enter")
            has_text(page, "#timing", "tokens in")
            messages.append({"role": "user", "content": question})
            (answer,) = llm.generate([messages], max_new_tokens=9)
            assert page.text_content("#answer") == answer.text
            messages.append({"role": "assistant", "content": answer.text})
        assert page.locator("#turns li").all_text_contents() == [each["content"] for each in messages[1:3]]
        page.click("#anew")
        assert page.locator("#turns li").count() == 0
        page.goto(f"{server.url}/docs")
        has_text(page, "#routes", "POST /v1/chat/completions.*messagesrequiredlist of object")
        assert wrong == []


@pytest.mark.slow
def test_an_answer_can_be_stopped_and_batches_show_their_progress(browser: Any, server: Server) -> None:
    page, wrong = opened(browser, server)
    enter(page)
    rows = [
        {"custom_id": f"row-{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "ab", "max_tokens": 9}}
        for n in range(12)
    ]
    client = server.client()
    data = io.BytesIO("".join(json.dumps(row) + "\n" for row in rows).encode())
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    has_text(page, "#batches", f"{batch.id}completed100 %12 of 12")
    has_text(page, "#generated", "^[0-9.,]+$")
    assert re.fullmatch(r"M[\d.]+ [\d.]+( L[\d.]+ [\d.]+)*", page.get_attribute("#generated-line", "d"))
    page.evaluate("document.getElementById('most').value = '100'")
    page.route("**/v1/chat/completions", lambda route: None)  # the server never answers
    page.fill("#prompt", "a")
    page.click("#send")
    assert page.is_disabled("#send")
    page.click("#stop")
    has_text(page, "#timing", "^stopped after")
    assert page.is_enabled("#send")
    assert wrong == []


@pytest.mark.slow
def test_the_page_is_light_or_dark_and_fits_a_phone(browser: Any, server: Server) -> None:
    grounds = set()
    for scheme in ("light", "dark"):
        page, wrong = opened(browser, server, color_scheme=scheme, viewport={"width": 360, "height": 640})
        enter(page)
        has_text(page, "#state", "^ready$")
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert wrong == []
    assert grounds == {"rgb(255, 255, 255)", "rgb(13, 17, 23)"}


def test_the_page_is_in_the_package_and_names_no_other_host() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["zinfer"]
    assert "serve/page/*" in package
    files = {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir()}
    assert {"index.html", "page.css", "page.js"} <= set(files)
    assert [name for name, text in files.items() if "://" in text] == []
    asked = set(re.findall(r'at\("([\w-]+)"\)|(?:show|fill)\("([\w-]+)"', files["page.js"]))
    ids = set(re.findall(r'id="([\w-]+)"', files["index.html"]))
    assert {one or other for one, other in asked} <= ids
