"""Draws the pictures of README and docs into docs/pictures.

    python tools/draw_pictures.py [architecture] [trace] [page]

`trace` runs the default model; `page` also needs chromium, chromedriver and selenium.
"""

from __future__ import annotations

import subprocess
import sys
import time
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
FONT = "font-family='system-ui, sans-serif'"
QUESTION = "Write a Python function that adds two numbers."
BOXES = [  # x, y, width, height, title, lines
    (20, 20, 200, 74, "front doors", ["LLM, AsyncLLM, hunch chat", "hunch serve, its page"]),
    (300, 20, 200, 74, "engine/", ["scheduler, blocks, outputs", "plans a step; no torch"]),
    (580, 20, 200, 74, "step/runner.py", ["one row state, one step,", "on a CPU and on a GPU"]),
    (20, 150, 180, 74, "target", ["one pass over all rows:", "last tokens and guesses"]),
    (213, 150, 180, 74, "sampling/", ["the target's own token at", "every node, keyed noise"]),
    (406, 150, 180, 74, "verify/exact.py", ["walks the draft while", "guesses agree; commits"]),
    (599, 150, 181, 74, "drafter", ["observes what was said,", "proposes the next draft"]),
]
ARROWS = [  # points, label, where it stands
    ([(220, 57), (300, 57)], "requests", (228, 49)),
    ([(500, 57), (580, 57)], "plan", (525, 49)),
    ([(580, 80), (500, 80)], "", (0, 0)),
    ([(300, 80), (220, 80)], "text", (246, 93)),
    ([(680, 94), (680, 122), (110, 122), (110, 150)], "each step, in this order", (300, 116)),
    ([(200, 187), (213, 187)], "", (0, 0)),
    ([(393, 187), (406, 187)], "", (0, 0)),
    ([(586, 187), (599, 187)], "", (0, 0)),
    ([(690, 224), (690, 252), (110, 252), (110, 224)], "a tree of guesses", (330, 246)),
]


def architecture() -> None:
    """What a step is made of, and who hands what to whom."""
    parts = [
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 800 270' width='800' height='270'>",
        "<defs><marker id='end' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
        "markerHeight='7' orient='auto'><path d='M0 0L8 4L0 8z' fill='#57606a'/></marker></defs>",
        "<rect width='800' height='270' rx='10' fill='#ffffff'/>",
    ]
    for points, label, (x, y) in ARROWS:
        path = " ".join(f"{px},{py}" for px, py in points)
        parts.append(
            f"<polyline points='{path}' fill='none' stroke='#57606a' stroke-width='1.5' "
            "marker-end='url(#end)'/>"
        )
        if label:
            parts.append(
                f"<text x='{x}' y='{y}' {FONT} font-size='12' fill='#57606a'>{label}</text>"
            )
    for x, y, width, height, title, lines in BOXES:
        parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='8' fill='#f3f6fb' "
            "stroke='#3267c7'/>"
            f"<text x='{x + 12}' y='{y + 24}' {FONT} font-size='14' font-weight='600' "
            f"fill='#1f2328'>{escape(title)}</text>"
        )
        for number, line in enumerate(lines):
            parts.append(
                f"<text x='{x + 12}' y='{y + 44 + 17 * number}' {FONT} font-size='12.5' "
                f"fill='#424a53'>{escape(line)}</text>"
            )
    _write("architecture.svg", "\n".join([*parts, "</svg>\n"]))


def trace() -> None:
    """What `hunch generate --trace` prints, of a real answer."""
    from rich.console import Console

    from hunch import LLM, SamplingParams, Speculation
    from hunch.cli.trace import show_trace

    params = SamplingParams(temperature=0, max_tokens=64, speculation=Speculation(trace=True))
    console = Console(record=True, width=72, force_terminal=True, file=StringIO())
    with LLM(max_num_seqs=1, max_model_len=512) as llm:
        (output,) = llm.chat([{"role": "user", "content": QUESTION}], params)
        show_trace(llm.tokenizer, output.outputs[0], console)
    _write("trace.svg", console.export_svg(title="hunch generate --chat --trace"))


def page() -> None:
    """The page of a server with the default model, after one answer."""
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    command = [sys.executable, "-m", "hunch", "serve", "--port", "8765"]
    server = subprocess.Popen(command)
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1120,720"):
        options.add_argument(flag)
    try:
        _wait_for("http://127.0.0.1:8765/health")
        driver: Any = webdriver.Chrome(options=options)
        driver.get("http://127.0.0.1:8765/")
        driver.find_element(By.ID, "prompt").send_keys(QUESTION)
        driver.find_element(By.ID, "send").click()
        done = "return document.querySelector('.answer .facts')?.textContent"
        WebDriverWait(driver, 120).until(lambda d: d.execute_script(done))
        driver.save_screenshot(str(FOLDER / "page.png"))
        driver.quit()
    finally:
        server.terminate()
        server.wait(30)


def _wait_for(address: str) -> None:
    for _ in range(300):
        try:
            urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"{address} does not answer")


def _write(name: str, text: str) -> None:
    (FOLDER / name).write_text(text, encoding="utf-8")
    print(FOLDER / name)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    drawers = {"architecture": architecture, "trace": trace, "page": page}
    for word in sys.argv[1:] or drawers:
        drawers[word]()
