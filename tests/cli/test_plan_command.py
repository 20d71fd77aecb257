from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
from cli_place import run_json, run_text
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_store.cli.main import main
from hicache_store.cli.plan import document, plan_page
from hicache_store.cli.plan_svg import draw_svg
from hicache_store.cli.plan_text import draw_text
from hicache_store.testing.strategies import pools, topologies

GQA = ["--layers", "60", "--kv-heads", "8", "--head-dim", "128", "--dtype", "bfloat16", "--page-size", "64"]
KIB = 1024
LAYER = 32 * KIB
"""Bytes of one layer of one head of GQA: 64 tokens of 256 bf16 elements."""


def plan_json(capsys, *argv: str) -> dict:
    return run_json(capsys, "plan", *argv)


def test_the_example_is_the_golden_one(capsys):
    golden = json.loads(Path(__file__).with_name("golden_plan.json").read_text())
    assert plan_json(capsys, *GQA, "--writer", "tp4pp2", "--reader", "tp2pp1") == golden


def test_tp4pp2_writes_eight_objects_of_which_each_tp2pp1_rank_reads_four(capsys):
    plan = plan_json(capsys, *GQA, "--writer", "tp4pp2", "--reader", "tp2pp1")
    assert [one["payload_bytes"] for one in plan["objects"]] == [1_966_080] * 8
    assert {(tuple(one["heads"]), tuple(one["layers"])) for one in plan["objects"]} == {
        ((head, head + 2), layers) for head in (0, 2, 4, 6) for layers in ((0, 30), (30, 60))
    }
    for rank, first_head in (("tp0pp0", 0), ("tp1pp0", 4)):
        reads = [read for read in plan["reads"] if read["rank"] == rank]
        assert [read["object"] for read in reads] == [
            f"kv.H{head:03d}-{head + 2:03d}.L{layers}"
            for head in (first_head, first_head + 2)
            for layers in ("000-030", "030-060")
        ]
        for read in reads:
            assert (read["offset"], read["bytes"], read["over_read_bytes"]) == (0, 1_966_080, 0)
            assert read["trailer_bytes"] == 4096
            assert len(read["fetches"]) == 1
            assert "ranges" not in read
    (one,) = (one for one in plan["objects"] if one["heads"] == [4, 6] and one["layers"] == [30, 60])
    assert one["name"] == "kv.H004-006.L030-060"
    assert one["writers"] == ["tp2pp1"]


def test_a_reader_of_more_tp_takes_one_head_range_of_each_object(capsys):
    """Heads are outermost, so half the heads are half the bytes, in one range."""
    plan = plan_json(capsys, *GQA, "--writer", "tp4pp2", "--reader", "tp8pp2")
    assert len(plan["objects"]) == 8
    second = next(read for read in plan["reads"] if read["rank"] == "tp1pp0")
    assert (second["object"], second["offset"], second["bytes"]) == (
        "kv.H000-002.L000-030",
        30 * LAYER,
        30 * LAYER,
    )
    assert "ranges" not in second
    assert second["over_read_bytes"] == 0
    # The first head ends 960 KiB before the trailer: two requests.
    first = next(read for read in plan["reads"] if read["rank"] == "tp0pp0")
    assert first["fetches"] == [[0, 30 * LAYER], [60 * LAYER, 60 * LAYER + 4096]]


def test_a_layer_sub_range_is_a_range_a_head_widened_to_whole_cells(capsys):
    """Cells of a 30-layer object are 5 layers (160 KiB); layers 7-22 lie in cells of layers 5-24."""
    plan = plan_json(
        capsys, *GQA, "--writer", "tp4pp2", "--reader", "tp4pp4", "--reader-stages", "7,23,30",
        "--request-cost", "0",
    )  # fmt: skip
    read = next(read for read in plan["reads"] if read["rank"] == "tp0pp1")
    assert read["object"] == "kv.H000-002.L000-030"
    assert read["offset"] == 7 * LAYER
    assert read["bytes"] == 2 * 16 * LAYER
    assert read["ranges"] == [[7 * LAYER, 23 * LAYER], [37 * LAYER, 53 * LAYER]]
    assert read["fetches"] == [
        [5 * LAYER, 25 * LAYER], [35 * LAYER, 55 * LAYER], [60 * LAYER, 60 * LAYER + 4096],
    ]  # fmt: skip
    assert read["over_read_bytes"] == 2 * 4 * LAYER
    # A dearer request joins the two heads over the cells between them, and reads through to the trailer.
    joined = plan_json(
        capsys, *GQA, "--writer", "tp4pp2", "--reader", "tp4pp4", "--reader-stages", "7,23,30",
        "--request-cost", "1MiB",
    )  # fmt: skip
    read = next(read for read in joined["reads"] if read["rank"] == "tp0pp1")
    assert read["fetches"] == [[5 * LAYER, 60 * LAYER + 4096]]
    assert read["over_read_bytes"] == 55 * LAYER - 2 * 16 * LAYER


def test_tp16_over_8_heads_writes_each_box_once(capsys):
    plan = plan_json(capsys, *GQA, "--writer", "tp16pp1", "--reader", "tp16pp1")
    assert [one["heads"] for one in plan["objects"]] == [[head, head + 1] for head in range(8)]
    assert plan["objects"][3]["writers"] == ["tp6pp0", "tp7pp0"]
    # Both replicas read the same bytes.
    reads = {read["rank"]: (read["object"], read["bytes"]) for read in plan["reads"]}
    assert len(reads) == 16
    assert reads["tp6pp0"] == reads["tp7pp0"] == ("kv.H003-004.L000-060", 60 * LAYER)


def test_mla_keeps_one_latent_head(capsys):
    argv = ["--layers", "61", "--mla-latent", "512", "--mla-rope", "64", "--page-size", "64"]
    plan = plan_json(capsys, *argv, "--writer", "tp8pp2", "--reader", "tp4pp1")
    layer = 64 * 576 * 2
    assert plan["page"]["parts"] == {"latent": 576}
    assert [one["layers"] for one in plan["objects"]] == [[0, 31], [31, 61]]
    assert [one["payload_bytes"] for one in plan["objects"]] == [31 * layer, 30 * layer]
    assert plan["objects"][0]["writers"] == [f"tp{tp}pp0" for tp in range(8)]
    assert [read["bytes"] for read in plan["reads"]] == [31 * layer, 30 * layer] * 4


def test_large_shards_are_halved_by_layers(capsys):
    plan = plan_json(capsys, *GQA, "--writer", "tp1pp1", "--reader", "tp1pp1")
    assert [one["layers"] for one in plan["objects"]] == [[0, 30], [30, 60]]
    assert max(one["payload_bytes"] for one in plan["objects"]) <= 8 * KIB * KIB


def test_a_fixed_grid_cuts_at_its_multiples(capsys):
    plan = plan_json(capsys, *GQA, "--writer", "tp2pp2", "--reader", "tp1pp1", "--grid", "2x20")
    assert [one["layers"] for one in plan["objects"]] == [[0, 20], [20, 30], [30, 40], [40, 60]] * 4
    assert main(["plan", *GQA, "--writer", "tp8pp1", "--reader", "tp1", "--grid", "2x20"]) == 2
    assert "not a union of chunks" in capsys.readouterr().err


def test_context_parallel_ranks_read_alike(capsys):
    one = plan_json(capsys, *GQA, "--writer", "tp2pp2cp2", "--reader", "tp1pp1cp4")
    other = plan_json(capsys, *GQA, "--writer", "tp2pp2", "--reader", "tp1pp1")
    for key in ("objects", "reads", "ranks"):
        assert one[key] == other[key]
    text, _ = run_text(capsys, "plan", *GQA, "--writer", "tp2pp2cp2", "--reader", "tp1")
    assert "Each context-parallel rank moves the pages it owns" in text


def test_uneven_stages_of_the_writer(capsys):
    plan = plan_json(capsys, *GQA, "--writer", "tp1pp2", "--writer-stages", "20", "--reader", "tp1")
    assert {tuple(one["layers"]) for one in plan["objects"]} == {(0, 20), (20, 40), (40, 60)}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_rank_wants_its_box_and_the_sums_agree(data):
    pool = data.draw(pools())
    writer, reader = data.draw(topologies(pool)), data.draw(topologies(pool))
    plan = plan_page(pool, writer, reader, request_cost_bytes=data.draw(st.sampled_from((0, 64 * KIB))))
    assert sum(one.payload_bytes for one in plan.objects) == pool.payload_bytes(pool.page_box)
    for rank in plan.ranks:
        assert rank.wanted_bytes == pool.payload_bytes(rank.box)
        assert rank.fetched_bytes == rank.wanted_bytes + rank.over_read_bytes + rank.trailer_bytes
        for one in rank.reads:
            ranges = one.ranges
            assert sum(map(len, ranges)) == one.read.wanted_bytes
            assert ranges[0].start == one.read.first_byte
            assert all(a.stop < b.start for a, b in pairwise(ranges))
            for span in ranges:
                assert any(f.start <= span.start and span.stop <= f.stop for f in one.read.fetches)
    assert json.loads(json.dumps(document(plan)))["writer"] == writer.label
    for is_ascii in (True, False):
        drawn = draw_text(plan, width=120, is_ascii=is_ascii)
        assert drawn.isascii() or not is_ascii
        assert max(map(len, drawn.splitlines())) <= 120
    ET.fromstring(draw_svg(plan))


DRAWING = """\
layer   0                                     30                                    60
head 0  +-------------------------------------+-------------------------------------+ +
        | 1 tp0pp0                            | 2 tp0pp1                            | | tp0
head 4  +-------------------------------------+-------------------------------------+ +
        | 3 tp1pp0                            | 4 tp1pp1                            | | tp1
head 8  +-------------------------------------+-------------------------------------+ +
reader  +----------------------------------- pp0 -----------------------------------+
"""


def test_the_page_is_drawn_in_ascii_in_a_pipe(capsys):
    text, _ = run_text(capsys, "plan", *GQA, "--writer", "tp2pp2", "--reader", "tp2")
    assert DRAWING in text
    assert text.isascii()
    rows = [line.split() for line in text.splitlines() if line.startswith("tp1pp0")]
    offsets = ["tp1pp0", "3", "kv.H004-008.L000-030", "0", "3,932,160", "1", "0", "4,096", "1"]
    assert offsets in rows


def test_a_page_too_fine_to_draw_says_so(capsys):
    text, _ = run_text(capsys, "plan", *GQA, "--writer", "tp1pp60", "--reader", "tp1")
    assert "use --svg FILE" in text


def test_the_svg_shows_every_object_and_rank(capsys, tmp_path):
    file = tmp_path / "page.svg"
    text, _ = run_text(capsys, "plan", *GQA, "--writer", "tp4pp2", "--reader", "tp2", "--svg", str(file))
    assert "objects of tp4pp2" in text
    root = ET.fromstring(file.read_text())
    titles = [one.text for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum("bytes, written by" in title for title in titles) == 8
    assert sum("objects, 7,880,704 bytes" in title for title in titles) == 2
    assert "http" not in file.read_text().replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--layers", "4", "--writer", "tp1", "--reader", "tp1"], "--kv-heads and --head-dim"),
        (["--layers", "4", "--mla-latent", "8", "--writer", "tp1", "--reader", "tp1"], "--mla-rope"),
        (
            ["--layers", "4", "--mla-latent", "8", "--mla-rope", "2", "--kv-heads", "2",
             "--writer", "tp1", "--reader", "tp1"],
            "more than one of --kv-heads",
        ),
        ([*GQA, "--writer", "tp3", "--reader", "tp1"], "8 KV heads cannot be split over"),
        ([*GQA, "--writer", "four", "--reader", "tp1"], "'four' is not a topology"),
        ([*GQA, "--writer", "tp1", "--reader", "pp61"], "use at most 60"),
        ([*GQA, "--writer", "tp1pp2", "--writer-stages", "10,20", "--reader", "tp1"], "stage_starts"),
        ([*GQA[:6], "--dtype", "fp8", "--writer", "tp1", "--reader", "tp1"], "float8_e4m3fn"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_one_line_and_code_2(capsys, argv, word):
    out, err = run_text(capsys, "plan", *argv, code=2)
    assert out == ""
    assert word in err
    assert err.count("\n") == 1


def test_planning_imports_neither_torch_nor_a_connector():
    program = (
        "import sys; from hicache_store.cli.main import main; "
        f"main(['plan', *{GQA!r}, '--writer', 'tp4pp2', '--reader', 'tp2', '--json']); "
        "bad = {'torch', 'cupy', 'rich', 'hicache_store.store', 'hicache_store.connectors.local'}; "
        "sys.exit(','.join(sorted(bad & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["objects"]) == 8


def test_a_drawing_that_cannot_be_written_says_where_it_could(capsys, tmp_path):
    file = tmp_path / "nothing" / "page.svg"
    out, err = run_text(
        capsys, "plan", *GQA, "--writer", "tp4", "--reader", "tp2", "--svg", str(file), code=2
    )
    assert out == ""
    assert f"cannot be written to {file}: No such file or directory; give --svg a file in a directory" in err
