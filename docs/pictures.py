"""Draws docs/watch.svg and docs/report.png from a real run: `python docs/pictures.py` (some minutes, needs Chromium).

The run is the preset `tiny`, shortened, stopped once and continued, so that the pictures show a resume.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
STEPS, STOP = 240, 150
RUN = [
    "tiny", "--model.num-layers=3", "--train.seq-len=128", "--optimizer.warmup-steps=20", "--observe.eval-every=30",
    "--observe.eval-rows=32", "--checkpoint.every-steps=50", "--observe.sample-tokens=60",
    f"--optimizer.schedule-steps={STEPS}",
]  # fmt: skip
SIZE = "1280,2150"


def main() -> int:
    browser = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if browser is None:
        print("error: no Chromium on PATH, which takes the picture of the page", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "tiny"
        for steps in (STOP, STEPS):
            arguments = [*RUN, f"--train.steps={steps}", f"--folder={folder}"]
            subprocess.run([sys.executable, "train.py", *arguments], cwd=DOCS.parent, check=True)
        watch = [sys.executable, "-m", "moex.watch", str(folder), "--svg", str(DOCS / "watch.svg")]
        subprocess.run(watch, cwd=DOCS.parent, check=True)
        page = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={SIZE}"]
        page += [f"--screenshot={DOCS / 'report.png'}", f"file://{folder}/report.html"]
        subprocess.run([browser, *page], check=True, capture_output=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
