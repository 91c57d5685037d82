"""The page written from a run folder: its numbers, its safety, its size, its errors."""

import json
import math
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from moex.observe.heatmap import load_by_expert
from moex.observe.metrics import read_jsonl
from moex.observe.report import main, write_report
from moex.observe.run import read_run
from moex.observe.series import bin_steps
from moex.observe.tiles import key_numbers, short


def tiles(folder) -> dict[str, tuple[str, str]]:
    return {tile.label: (tile.value, tile.note) for tile in key_numbers(read_run(folder))}


def edit(folder, name, change):
    """Rewrites one file of the folder, line by line."""
    lines = [change(json.loads(line)) for line in (folder / name).read_text().splitlines()]
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))


def test_the_tiles_hold_the_numbers_of_the_log(write_run, tmp_path):
    write_run(tmp_path)
    records = read_jsonl(tmp_path / "metrics.jsonl")
    shown = tiles(tmp_path)
    eval_loss = records[59]["eval_loss"]
    assert shown["Final loss"][0] == f"{records[-1]['loss']:.3f}"
    assert shown["Held-out loss"][0] == f"{eval_loss:.3f}"
    assert shown["Bits per byte"] == (f"{eval_loss / math.log(2):.3f}", "held-out")
    assert shown["Below unigram entropy"][0] == f"{3.1 - eval_loss:.3f}"
    assert shown["Tokens a second"][0] == f"{np.median([r['tokens_per_s'] for r in records]):,.0f}"
    assert shown["Tokens seen"] == ("983K", "in 60 steps; 0.98 times the corpus")
    assert shown["Parameters"] == ("12.3M", "2.35M active a token")
    assert shown["Wall time"] == ("9s", "8s of it in steps")
    ratios = [[max(row) / np.mean(row) for row in r["expert_counts"]] for r in records[-6:]]
    assert shown["Worst expert load"][0] == f"{np.mean(ratios, 0).max():.2f}"
    assert "MFU" not in shown
    assert "Lost" not in shown
    html = write_report(tmp_path).read_text("utf-8")
    for value, note in shown.values():
        assert value in html
        assert note in html


def test_losses_are_told_when_something_was_lost(write_run, tmp_path):
    def lose(record):
        record |= {"skipped": record["step"] == 3, "overflow": record["step"] in (3, 4), "dropped": 5, "mfu": 0.4}

    write_run(tmp_path, change=lose)
    shown = tiles(tmp_path)
    assert shown["Lost"] == ("1 skipped step", "2 overflows, 300 dropped rows")
    assert shown["MFU"][0] == "40.0 %"


def test_bits_per_byte_are_for_byte_vocabularies_only(write_run, tmp_path):
    write_run(tmp_path)
    (tmp_path / "config.json").write_text('{"model": {"vocab_size": 32000}}')
    assert "Bits per byte" not in tiles(tmp_path)
    (tmp_path / "config.json").write_text('{"data": {"tokenizer": "bytes"}}')
    assert "Bits per byte" in tiles(tmp_path)


def test_the_page_has_every_part_and_says_the_state(write_run, tmp_path):
    page = write_report(write_run(tmp_path / "a")).read_text("utf-8")
    assert "finished at step 59" in page
    assert "The loss falls" in page
    titles = ["Loss", "Parts of the loss", "Learning rate", "Gradient norm", "Throughput", "Expert load by layer"]
    for title in [*titles, "Expert load by expert", "Samples"]:
        assert f"<h2>{title}</h2>" in page
    assert page.count("<svg") == 7
    assert page.count("<figcaption>") == 7
    assert "No data" not in page
    for text in ("model.vocab_size", "optim.betas", "[0.9, 0.95]", "tiny-moe", "cpu:0", "1 line of steps", "a.txt"):
        assert text in page
    stopped = write_report(write_run(tmp_path / "b", finish=False)).read_text("utf-8")
    assert "stopped at step 59 of 60" in stopped


def test_a_run_resumed_after_its_finish_is_not_finished(write_run, tmp_path):
    write_run(tmp_path)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"kind": "resume", "time": 1.9e9, "step": 60}\n')
    assert not read_run(tmp_path).finished


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)


def test_nothing_from_the_run_becomes_markup_and_nothing_is_fetched(write_run, tmp_path):
    evil = "\"'><script>alert(1)</script><img src=http://x/y>"
    write_run(tmp_path)
    edit(
        tmp_path, "events.jsonl", lambda event: event | {"kind": event["kind"] if "step" in event else evil, evil: evil}
    )
    (tmp_path / "config.json").write_text(json.dumps({"name": evil, evil: {evil: evil}}))
    (tmp_path / "env.json").write_text(json.dumps({evil: [evil]}))
    page = write_report(tmp_path).read_text("utf-8")
    parser = Tags()
    parser.feed(page)
    assert "script" not in parser.tags
    assert "img" not in parser.tags
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &lt;b&gt;bold␛[0m" in page
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in parser.links)
    assert "url(http" not in page
    assert "@import" not in page
    assert len(parser.ids) == len(set(parser.ids))


def test_samples_with_lone_surrogates_and_control_characters_are_written(write_run, tmp_path):
    write_run(tmp_path)
    edit(tmp_path, "events.jsonl", lambda event: event | ({"text": "\ud800\x00é"} if event["kind"] == "sample" else {}))
    assert "\\ud800␀é" in write_report(tmp_path).read_text("utf-8")


def test_light_and_dark_colours_come_from_the_page(write_run, tmp_path):
    page = write_report(write_run(tmp_path)).read_text("utf-8")
    assert "prefers-color-scheme: dark" in page
    plots = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", plots)) == set()
    for variable in set(re.findall(r"var\((--[a-z]+)\)", plots)):
        assert page.count(f"{variable}:") >= 1


def test_tick_labels_keep_small_numbers(write_run, tmp_path):
    page = write_report(write_run(tmp_path)).read_text("utf-8")
    assert ">0.0002</text>" in page
    assert ">0.001</text>" in page


def test_a_plot_without_data_says_so(write_run, tmp_path):
    def empty(record):
        for name in (
            "loss",
            "lm_loss",
            "aux_loss",
            "z_loss",
            "grad_norm",
            "lr",
            "tokens_per_s",
            "model_tflops",
            "time",
        ):
            record[name] = None
        record["expert_counts"] = []
        record.pop("eval_loss", None)

    write_run(tmp_path, num_steps=5, change=empty)
    (tmp_path / "events.jsonl").unlink()
    (tmp_path / "config.json").unlink()
    (tmp_path / "env.json").write_text("{")
    page = write_report(tmp_path).read_text("utf-8")
    assert page.count("<svg") == 0
    assert page.count("No data: ") == 12
    assert "config.json is missing" in page
    assert "env.json is broken" in page
    assert "No step has a finite loss" in page
    assert f"<h1>{tmp_path.name}</h1>" in page


@pytest.mark.parametrize(("num_steps", "layers", "experts"), [(1, 1, 4), (2, 3, 5), (45, 0, 0), (401, 5, 2)])
def test_runs_of_other_shapes(write_run, tmp_path, num_steps, layers, experts):
    page = write_report(write_run(tmp_path, num_steps, layers, experts)).read_text("utf-8")
    assert page.count("<svg") == (7 if layers else 5)


def test_a_step_logged_twice_counts_once(write_run, tmp_path):
    write_run(tmp_path, num_steps=4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 0.125}\n{"step": 9, "lo')
    run = read_run(tmp_path)
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert run["loss"][2] == 0.125
    assert np.isnan(run["lr"][2])


def test_5000_steps_of_16_layers_and_64_experts_stay_small_and_quick(write_run, tmp_path):
    write_run(tmp_path, 5000, 16, 64)
    began = time.process_time()
    path = write_report(tmp_path)
    assert time.process_time() - began < 12  # seconds of one core; about 3 are usual
    assert path.stat().st_size < 2_000_000
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "env.json",
        "events.jsonl",
        "metrics.jsonl",
        "report.html",
    ]


def test_the_heat_map_bins_tokens_not_ratios(write_run, tmp_path):
    def alternate(record):
        record["expert_counts"] = [[30, 10] if record["step"] % 2 else [0, 0]]

    write_run(tmp_path, 400, 1, 2, change=alternate)
    loads, steps, width = load_by_expert(read_run(tmp_path))
    assert width == 3
    assert loads.shape == (134, 1, 2)
    assert steps[0] == 1.0
    np.testing.assert_allclose(loads[:, 0], np.tile([1.5, 0.5], (134, 1)))


def test_bins_keep_mean_and_range_and_pass_over_missing_values():
    binned = bin_steps(np.arange(5), np.array([1.0, 3.0, np.nan, 5.0, np.inf]), 3)
    np.testing.assert_allclose(binned.steps, [0.5, 2.5, 4.0])
    np.testing.assert_allclose(binned.mean, [2, 5, np.nan])
    np.testing.assert_allclose(binned.low, [1, 5, np.nan])
    np.testing.assert_allclose(binned.high, [3, 5, np.nan])
    assert binned.width == 2


@pytest.mark.parametrize(
    ("number", "text"), [(12, "12"), (1234, "1.23K"), (98765, "98.8K"), (7e9, "7.00B"), (671e9, "671B")]
)
def test_short_numbers(number, text):
    assert short(number) == text


def test_the_command(write_run, tmp_path, capsys):
    write_run(tmp_path / "run")
    run = [sys.executable, "-W", "error", "-m", "moex.observe.report", str(tmp_path / "run")]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == str(tmp_path / "run" / "report.html")
    assert done.stderr == ""

    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
    assert "metrics.jsonl is missing" in capsys.readouterr().err
    (tmp_path / "empty" / "metrics.jsonl").write_text('{"step": 0, "lo')
    assert main([str(tmp_path / "empty")]) == 2
    assert "metrics.jsonl has no steps" in capsys.readouterr().err
    (tmp_path / "empty" / "metrics.jsonl").write_text('{"step": 0, "lo\n{"step": 1}\n')
    assert main([str(tmp_path / "empty")]) == 2
    assert "metrics.jsonl, line 1: broken" in capsys.readouterr().err
    assert not (tmp_path / "empty" / "report.html").exists()
