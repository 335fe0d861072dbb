"""Draws the pictures of docs/dashboard.md from a dashboard that shows a finished run.

rollbook demo --run-dir runs/demo
rollbook dashboard runs/demo --port 8686
python scripts/page_pictures.py http://127.0.0.1:8686 docs/dashboard
"""

import json
import shutil
import sys
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1280, 760


def main(url: str, folder: Path) -> None:
    with urlopen(f"{url}/api/groups?order=-tokens&solved=some&limit=1") as response:
        group = quote(json.load(response)["groups"][0]["group_id"], safe="")
    pages = {
        "overview": ("/", "light"),
        "rollouts": ("/rollouts?solved=some", "light"),
        "rollout": (f"/rollout/{group}/0?view=tokens&colour=logprob", "dark"),
        "step": ("/steps/40", "light"),
        "timeline": ("/timeline", "dark"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (path, scheme) in pages.items():
            page = browser.new_page(
                viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="dark" if scheme == "dark" else "light"
            )
            page.goto(url + path)
            page.locator("main h1").first.wait_for()
            page.locator(".loading").first.wait_for(state="detached")
            page.wait_for_timeout(1500)  # the charts are drawn after their data arrived
            page.screenshot(path=folder / f"{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
