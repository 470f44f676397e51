"""`report.html` in a real browser: drawn without an error or a request, at any width, in light and dark mode."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright

from megatron_fp8.report.html import write_report
from megatron_fp8.report.run_reader import read_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")

DRAWN = "document.documentElement.dataset.drawn === 'yes'"
# Number of marks of each figure that lie inside it and are not of zero size.
MARKS = """[...document.querySelectorAll('.plot')].map((plot) => {
    const box = plot.getBoundingClientRect();
    return [...plot.querySelectorAll('.scatterlayer path, .heatmaplayer image')].filter((mark) => {
        const it = mark.getBoundingClientRect();
        return it.width + it.height > 3 && it.left >= box.left - 5 && it.right <= box.right + 5;
    }).length;
})"""
# What sticks out of the page, texts of the figures included. What scrolls in a box of its own may.
OUTSIDE = """[...document.querySelectorAll('body *')].filter((element) => {
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.right > innerWidth + 1 && !element.closest('.scroll') && !element.closest('.hidden');
}).map((element) => element.outerHTML.slice(0, 80))"""
# Contrast by WCAG 2 of each text with its own colour, against the ground behind it.
CONTRASTS = """(() => {
    const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (colour) => {
        const [r, g, b] = colour.slice(0, 3).map((c) => c / 255).map((c) =>
            c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        const colour = rgb(getComputedStyle(element).backgroundColor);
        return colour[3] === 0 && element.parentElement ? ground(element.parentElement) : colour;
    };
    return [...document.querySelectorAll('body *')].filter((element) => element.getClientRects().length
        && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())
        && !['SCRIPT', 'STYLE', 'OPTION'].includes(element.tagName)).map((element) => {
        const style = getComputedStyle(element);
        const text = element.closest('svg') ? style.fill : style.color;
        const [a, b] = [light(rgb(text)), light(ground(element))].sort((x, y) => y - x);
        return [(a + 0.05) / (b + 0.05), element.tagName + ' ' + element.textContent.slice(0, 30)];
    }).filter(([ratio]) => ratio < 4.5);
})()"""


def write_run(directory: Path, offset: float, num_steps: int = 30) -> Path:
    directory.mkdir()
    records: list[dict[str, Any]] = [
        {
            "event": "start",
            "device": "8 GPUs",
            "precision chart": [
                {"size": 1.0, **dict.fromkeys(("section_label", "label", "per_label", "format_label"), "e4m3")}
            ],
        }
    ]
    for at in range(1, num_steps + 1):
        loss = 2 + offset + 3 / math.sqrt(at)
        speed = {"tokens-per-second": 1e5 + 10 * at, "iteration-time": 0.5, "data-wait-share": 0.1}
        records.append({"event": "train", "iteration": at, "lm loss": loss, "grad-norm": 1 / at, **speed})
        if at % 10 == 0:
            sets = {f"lm loss validation/a-data-set-with-a-rather-long-name-{number}": loss for number in (1, 2)}
            records.append({"event": "validation", "iteration": at, "lm loss validation": loss, **sets})
        amaxes = {f"fp8/layers.{layer}/self_attention.layernorm_qkv/input/amax": layer + at for layer in range(4)}
        records.append({"event": "fp8", "iteration": at, **amaxes, "fp8/layers.0/mlp/weight/scale": 2.0 * at})
    saved = {"path": "x" * 200, "bytes": 1, "hold-up-seconds": 0.1, "seconds": 1.0, "removed": []}
    records.append({"event": "checkpoint", "iteration": num_steps, **saved})
    text = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics.jsonl").write_text(text, encoding="utf-8")
    (directory / "config.yaml").write_text(f"optimizer: {{lr: {offset}, schedule: {'long-' * 40}}}\n", encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        # Containers lack what its sandbox and shared memory need; the page is our own.
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield browser.new_page()
        browser.close()


def problems_of(page: Page) -> list[str]:
    """Console errors and warnings, exceptions, and requests other than for the file itself, from now on."""
    found: list[str] = []
    page.on("console", lambda said: found.append(said.text) if said.type in ("error", "warning", "assert") else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    own = ("file:", "data:", "blob:", "about:")
    page.on("request", lambda request: None if request.url.startswith(own) else found.append(request.url))
    return found


def wait(page: Page, condition: str) -> None:
    """Until a JavaScript expression is true, for a minute at most. The page forbids to evaluate text later on, as
    Playwright's own waiting does."""
    page.evaluate(
        f"""new Promise((done, late) => {{
            const end = performance.now() + 60000;
            const look = () => {condition} ? done()
                : performance.now() > end ? late("never " + {json.dumps(condition)}) : setTimeout(look, 20);
            look();
        }})"""
    )


def check_view(page: Page, num_figures: int) -> None:
    marks = page.evaluate(MARKS)
    assert len(marks) == num_figures
    assert all(marks), f"figures without visible marks: {marks}"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), page.evaluate(OUTSIDE)
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(CONTRASTS) == []


@pytest.mark.parametrize("num_runs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_report_is_readable_on_a_telephone_and_a_large_screen_by_day_and_by_night(
    num_runs: int, page: Page, tmp_path: Path
) -> None:
    runs = [read_run(write_run(tmp_path / f"run{number}", 0.1 * number)) for number in range(num_runs)]
    report = tmp_path / "report.html"
    write_report(runs, report)
    problems = problems_of(page)
    page.set_viewport_size({"width": 400, "height": 900})
    page.emulate_media(color_scheme="light")
    page.goto(report.resolve().as_uri())
    wait(page, DRAWN)
    assert page.evaluate("document.querySelectorAll('h1').length") == 1
    assert page.evaluate("[...document.querySelectorAll('[role=img]')].every((plot) => plot.ariaLabel.length > 20)")
    # Loss, gradient norm, throughput, time per step; heat maps of the first run's amax.
    num_figures = 4 + 1
    check_view(page, num_figures)
    page.set_viewport_size({"width": 1600, "height": 900})
    wait(page, "document.querySelector('.plot .main-svg').getBoundingClientRect().width > 1000")
    check_view(page, num_figures)
    texts = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    by_day = page.evaluate(texts)
    page.emulate_media(color_scheme="dark")
    wait(page, f"{texts} !== {json.dumps(by_day)}")
    check_view(page, num_figures)
    # Legend and choice do what they say.
    page.locator(".legend button").first.click()
    wait(page, f"document.querySelectorAll('#figure-0 .scatterlayer .trace').length === {4 * num_runs - 1}")
    page.locator("#quantity").select_option("1")
    wait(page, "document.querySelector('#heat h3')?.textContent === 'mlp/weight'")
    assert problems == []
