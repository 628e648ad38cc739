"""Pictures: drawn from the JSON that the command line prints, and of patterns."""

import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import ringattn
from conftest import HANGS
from ringattn import _style, plot

import reference

pytest.importorskip("matplotlib", reason="matplotlib is not installed").use("Agg")
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def closed_figures():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


def bench(ring_size, gflops=10.0):
    one = {
        "ms": 100 / ring_size,
        "ms_min": 90 / ring_size,
        "gflops": gflops,
        "bytes_sent": 1,
        "bytes_sent_total": 2,
        "wait_ms": 0.1,
    }
    return {
        "schema": 1,
        "command": "bench",
        "kernel": "neon",
        "dtype": "f32",
        "ring_size": ring_size,
        "layout": "zigzag",
        "fwd": one,
        "bwd": one,
    }


MEMORY = {
    "schema": 1,
    "command": "memory",
    "rows": [
        {
            "seq": seq,
            "ring_size": p,
            "peak_bytes": seq * 64 // p + 1024,
            "planned_bytes": seq * 64 // p,
            "bytes_per_token": 1,
            "reduction": 1 - 1 / p,
        }
        for seq in (4096, 8192)
        for p in (1, 2, 4)
    ],
}
PLAN = {
    "schema": 1,
    "command": "plan",
    "layout": "contiguous",
    "balance": 0.57,
    "ranks": [
        {"rank": r, "rows": 4, "pairs": 10 * r + 1, "bytes_sent": 100, "hops": 1, "memory_bytes": 1000} for r in range(4)
    ],
}
PEERS = {
    "schema": 1,
    "rows": [
        {"case": "dense", "pass": "fwd", "ringattn_gflops": 9.0, "torch_gflops": 6.0},
        {"case": "dilated", "pass": "fwd", "ringattn_gflops": 8.0, "torch_gflops": 2.0},
    ],
}


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_each_kind_of_result_has_its_panel():
    figure = plot.figure([bench(1), bench(2), bench(4), MEMORY, PLAN, PEERS])
    assert titles(figure) == [
        "Speed of useful work",
        "Memory of a rank over ring size",
        "Work of each rank",
        "Against other libraries",
        "Time over ring size",
        "Bytes sent and memory of each rank",
    ]


def test_the_memory_panel_shows_the_numbers_and_the_one_over_p_line():
    (axes,) = plot.figure([MEMORY]).axes
    measured = axes.lines[0]
    assert list(measured.get_xdata()) == [1, 2, 4]
    assert np.allclose(measured.get_ydata(), [(8192 * 64 // p + 1024) / 2**20 for p in (1, 2, 4)])
    ideal = axes.lines[1]
    assert np.allclose(ideal.get_ydata(), measured.get_ydata()[0] / np.array([1, 2, 4]))


def test_each_dtype_has_a_memory_panel_with_its_limit():
    def rows(limit):
        return [{**row, "limit": 0 if row["ring_size"] == 1 else limit} for row in MEMORY["rows"]]

    results = [{**MEMORY, "dtype": dtype, "rows": rows(limit)} for dtype, limit in (("f16", 0.25), ("f32", 0.5))]
    figure = plot.figure(results)
    assert titles(figure) == [f"Memory of a rank over ring size, {dtype}" for dtype in ("f16", "f32")]
    for axes, limit in zip(figure.axes, (0.25, 0.5)):
        measured, least = axes.lines[:2]
        assert np.allclose(least.get_ydata(), measured.get_ydata()[0] * np.array([1, 1 - limit, 1 - limit]))
        assert "limit" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_scaling_panel_shows_times_over_ring_sizes():
    axes = plot.figure([bench(4), bench(1)]).axes[1]
    assert list(axes.lines[0].get_xdata()) == [1, 4] and np.allclose(axes.lines[0].get_ydata(), [100, 25])


def test_each_length_has_a_line_of_its_own_and_bars_name_it():
    results = [{**bench(p), "seq": seq} for seq in (4096, 65536) for p in (1, 2)]
    speed, scaling = plot.figure(results).axes
    lines = {line.get_label(): line for line in scaling.lines if line.get_label().startswith("forward")}
    assert list(lines) == ["forward, n=4,096", "forward, n=65,536"]
    assert all(list(line.get_xdata()) == [1, 2] for line in lines.values())
    names = [label.get_text() for label in (*speed.get_xticklabels(), *speed.get_yticklabels())]
    assert sum("n=4,096" in name for name in names) == sum("n=65,536" in name for name in names) == 2


def test_peers_are_grouped_by_case():
    (axes,) = plot.figure([PEERS]).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["dense fwd", "dilated fwd"]
    assert [bar.get_height() for bar in axes.patches] == [9.0, 8.0, 6.0, 2.0]
    nested = {"cases": [{"case": "dense", "ringattn": {"gflops": 3.0, "ms": 1.0}, "torch": {"gflops": 2.0, "ms": 2.0}}]}
    (axes,) = plot.figure([nested]).axes
    assert [bar.get_height() for bar in axes.patches] == [3.0, 2.0]


def test_the_cpu_benches_against_pytorch_are_drawn():
    row = {"case": "dense", "dtype": "f32", "seq": 4096, "heads": 1, "dim": 64, "threads": 1, "direction": "forward"}
    result = {"machine": "a machine", "date": "2026-11-15", "rows": [{**row, "ringattn": 21.0, "peer": 14.0, "ratio": 1.5}]}
    (axes,) = plot.figure([result]).axes
    assert [bar.get_height() for bar in axes.patches] == [21.0, 14.0] and axes.get_ylabel() == "GFLOP/s"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["dense f32 n=4096 d=64 threads=1 forward"]


def test_the_gpu_benches_have_a_panel_for_each_group_of_cases():
    def row(group, case):
        return {"group": group, "case": case, "ms": {"ringattn": 1.0, "FA2": 2.0}, "tflops": {"ringattn": 4.0, "FA2": 2.0}}

    figure = plot.figure([{"machine": {"gpu": "a GPU"}, "rows": [row("dense", "n=2048"), row("dilated", "n=4096")]}])
    assert titles(figure) == ["Against other libraries: dense", "Against other libraries: dilated"]
    assert [bar.get_height() for bar in figure.axes[0].patches] == [4.0, 2.0] and figure.axes[0].get_ylabel() == "TFLOP/s"


def test_many_cases_lie_and_all_are_named():
    rows = [{"case": f"a case of some length {n}", "ringattn_gflops": 2.0 + n, "torch_gflops": 1.0} for n in range(12)]
    (axes,) = plot.figure([{"rows": rows}]).axes
    assert [bar.get_width() for bar in axes.patches[:12]] == [2.0 + n for n in range(12)]
    assert [label.get_text() for label in axes.get_yticklabels()] == [row["case"] for row in rows]


@pytest.mark.parametrize("path", ["results/h200.json", "results/h200-backward.json", "notes/cpu-grid.json"])
def test_what_the_benches_against_other_libraries_write_can_be_drawn(path):
    assert plot.figure(plot.read(ROOT / "bench" / path)).axes


def test_the_command_draws_files_and_says_where(tmp_path):
    source = tmp_path / "results.json"
    source.write_text("".join(json.dumps(bench(p)) + "\n" for p in (1, 2)) + json.dumps([MEMORY, PLAN]))
    done = subprocess.run([sys.executable, "-m", "ringattn.plot", str(source)], capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0 and done.stdout.strip() == str(tmp_path / "results.png"), done.stderr
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    assert plot.main([str(source), "-o", str(tmp_path / "picture.svg")]) == 0
    assert "<svg" in (tmp_path / "picture.svg").read_text()


@pytest.mark.parametrize(
    "text, match",
    [("{", "delimiter|Expecting"), ("[1]", "int"), ('{"schema": 2}', "schema 2"), ('{"a": 1}', "fields a"), ("", "no results")],
)
def test_a_file_that_is_no_result_is_named(tmp_path, capsys, text, match):
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert plot.main([str(path)]) == 3
    assert re.search(match, capsys.readouterr().err)
    assert plot.main([str(tmp_path / "absent.json")]) == 3


@pytest.mark.filterwarnings("ignore::ringattn.HolesWarning")
def test_draw_shows_exactly_the_pairs_of_the_pattern(tmp_path):
    from ringattn._draw import attended

    options = {"segment_lengths": [6, 12], "dilation_rates": [1, 3], "combine": "mix", "is_causal": True}
    tables = reference.pairs(20, 20, 2, 1, **options)
    assert np.array_equal(attended(20, 2, 1, **options), sum(tables))
    figure = ringattn.draw(20, heads=2, kv_heads=1, path=tmp_path / "pattern.png", ring_size=4, **options)
    picture = figure.axes[0].images[0].get_array()
    assert np.array_equal(~np.ma.getmaskarray(picture), sum(tables)[0] > 0)
    assert ringattn.draw(8, heads=1, ring_size=4, is_causal=True).axes[0].images[0].get_array()[7, 0] == 3
    assert (tmp_path / "pattern.png").exists()
    assert len(ringattn.draw(8, heads=3, head=1).axes) == 1


def test_draw_colours_by_the_hops_of_the_librarys_plan():
    def hops(**options):
        return ringattn.draw(16, heads=1, ring_size=4, is_causal=True, **options).axes[0].images[0].get_array()

    ranks = np.repeat(np.arange(4), 4)
    everything = hops()
    assert np.array_equal(everything[np.tri(16, dtype=bool)], (ranks[:, None] - ranks)[np.tri(16, dtype=bool)])
    two_segments = hops(segment_lengths=[8], dilation_rates=[1])  # each is a ring of two ranks
    assert two_segments.max() == 1 and two_segments[15, 8] == 1 and two_segments.mask[15, 7]
    assert hops(layout="striped")[1, 0] == 1 and everything[1, 0] == 0


def test_draw_handles_more_keys_than_head_dims():
    from ringattn._draw import attended

    assert np.array_equal(attended(300, 1, is_causal=True)[0], np.tri(300))


def test_the_guide_shows_pictures_made_by_its_own_commands(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "cli.md").read_text()
    for name in ("pattern", "memory"):
        assert f"(images/{name}.png)" in page and (ROOT / "docs" / "images" / f"{name}.png").exists()
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ringattn.draw(" in code]
    monkeypatch.chdir(tmp_path)
    pathlib.Path("docs/images").mkdir(parents=True)
    exec(block, {"ringattn": ringattn})
    assert pathlib.Path("docs/images/pattern.png").read_bytes().startswith(b"\x89PNG")


def test_hops_have_the_colours_that_the_command_line_draws_them_in():
    source = (ROOT / "cli" / "draw.c").read_text()
    tones = re.findall(r"#[0-9a-f]{6}", source[source.index("svg_colours[PALETTE] =") :].split(";")[0])
    assert tuple(tones) == _style.HOPS and len(set(tones)) == len(tones)
    assert [_style.hop_colour(hop, 3) for hop in range(4)] == list(_style.HOPS[:4])
    assert _style.hop_colour(0, 100) == _style.HOPS[0] and _style.hop_colour(100, 100) == _style.HOPS[-1]
