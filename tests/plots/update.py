"""Write the baselines of the figures anew, and the figures themselves as PNG into a folder to look at."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent

if __name__ == "__main__":
    from roofline.plots import describe, save

    spec = importlib.util.spec_from_file_location("figures", HERE / "test_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (HERE / "baselines").mkdir(exist_ok=True)
    for name, draw in module.FIGURES.items():
        figure = draw()
        text = json.dumps(describe(figure), indent=0, sort_keys=True)
        (HERE / "baselines" / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        if len(sys.argv) > 1:
            print(save(figure, Path(sys.argv[1], f"{name}.png")))
