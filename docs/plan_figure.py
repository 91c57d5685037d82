"""Draws docs/plan.svg, one layer of a plan.

python -m moex.plan PRESET --folder-out F; python docs/plan_figure.py F/plan.json
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from moex.observe.svg import plot_style, standalone
from moex.plan import figures


def main(path: str) -> None:
    values = json.loads(Path(path).read_text())
    gpus = f"{values['gpus']['number']} {values['gpus']['kind'].upper()}s"
    about = f"one layer's forward pass of {values['config']['name']} on {gpus}"
    with plot_style(about):
        drawn = figures.layer(values, "forward")
    assert drawn, "the plan has a loop over layers"
    Path(__file__).with_name("plan.svg").write_text(standalone(drawn, about))


if __name__ == "__main__":
    main(sys.argv[1])
