from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import Action, Costs, Placement, Span, Timeline, build, draw_png, draw_text, simulate
from hf_gpipe.schedule.draw import figure

COSTS = Costs(forward_seconds=0.01, backward_seconds=0.02, update_seconds=0.003, transfer_seconds=0.001)


def test_text_is_figure_2c() -> None:
    assert draw_text(simulate(build("gpipe", 4, 4, recompute="none"), Costs(1, 1))) == (
        "stage 0  F0 F1 F2 F3 .. .. .. .. .. .. B3 B2 B1 B0\n"
        "stage 1  .. F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0 ..\n"
        "stage 2  .. .. F0 F1 F2 F3 .. .. B3 B2 B1 B0 .. ..\n"
        "stage 3  .. .. .. F0 F1 F2 F3 B3 B2 B1 B0 .. .. ..\n"
        "total 14 s, bubble 42.9%"
    )


def test_floats_do_not_move_the_columns() -> None:
    seconds = draw_text(simulate(build("gpipe", 3, 5), Costs(0.1, 0.2))).splitlines()
    whole = draw_text(simulate(build("gpipe", 3, 5), Costs(1, 2))).splitlines()
    assert seconds[:-1] == whole[:-1]
    assert seconds[-1] == "total 2.6 s, bubble 23.1%"


def test_text_without_room_shows_kinds() -> None:
    timeline = simulate(build("gpipe", 2, 2), Costs(1, 2))
    assert draw_text(timeline, width=30) == (
        "stage 0  FFR...BBRBB\n"
        "stage 1  .FFRBBRBB..\n"
        "total 11 s, bubble 27.3%"
    )  # fmt: skip
    crowded = draw_text(simulate(build("gpipe", 8, 32), COSTS), width=80).splitlines()
    assert max(map(len, crowded)) == 80
    assert [len(line) <= 80 for line in crowded] == [True] * 9


def test_waiting_is_drawn_as_idle() -> None:
    waited = [Span(0, Action.parse("0F0"), 5.0, 6.0), Span(1, Action.parse("1F0"), 5.0, 8.0, waiting=2.0)]
    text = draw_text(Timeline.from_spans(build("forward_only", 2, 1), waited))
    assert text.splitlines() == ["stage 0  F0 .. ..", "stage 1  .. .. F0", "total 3 s, bubble 66.7%"]


def test_an_empty_timeline_draws() -> None:
    empty = Timeline(build("gpipe", 2, 2), ())
    assert draw_text(empty).splitlines() == ["stage 0", "stage 1", "total 0 s, bubble 0.0%"]
    figure([empty], ["empty"])


def drawn_texts(picture: Figure) -> list[Text]:
    """Texts that are on the page: matplotlib also keeps labels of ticks beyond the end of an axis."""
    beyond = {
        tick.label1
        for panel in picture.axes
        for tick in panel.xaxis.get_major_ticks()
        if not panel.get_xlim()[0] <= tick.get_loc() <= panel.get_xlim()[1]
    }
    texts = [text for text in picture.findobj(Text) if isinstance(text, Text)]
    return [text for text in texts if text.get_text() and text.get_visible() and text not in beyond]


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 1), (2, 8), (8, 32)])
def test_no_text_of_a_picture_overlaps_another(num_stages: int, num_micro_batches: int) -> None:
    predicted = simulate(build("gpipe", num_stages, num_micro_batches), COSTS)
    slower = [span._replace(start=span.start * 1.3, end=span.end * 1.3) for span in predicted.spans]
    picture = figure([predicted, Timeline.from_spans(predicted.schedule, slower)], ["predicted", "measured"])
    picture.draw_without_rendering()
    canvas = picture.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in drawn_texts(picture)]
    assert {"predicted", "measured"} <= {text.split(":")[0] for text, _ in boxes}
    page = picture.bbox
    for index, (text, box) in enumerate(boxes):
        assert page.x0 <= box.x0, text
        assert box.x1 <= page.x1 + 1, text
        for other, other_box in boxes[index + 1 :]:
            shared = min(box.x1, other_box.x1) - max(box.x0, other_box.x0)
            shared_height = min(box.y1, other_box.y1) - max(box.y0, other_box.y0)
            assert min(shared, shared_height) < 0.5, f"{text!r} overlaps {other!r}"


def test_a_picture_says_what_it_shows() -> None:
    timeline = simulate(build("gpipe", 2, 4), Costs(0.25, 0.5))
    picture = figure([timeline], ["predicted"])
    texts = {text.get_text() for text in picture.findobj(Text) if isinstance(text, Text)}
    assert "predicted: total 4.75 s, bubble 15.8%" in texts
    assert {"seconds", "stage 0", "stage 1", "forward", "recompute", "backward", "idle", "0", "1", "2", "3"} <= texts
    assert not {"update", "reduce"} & texts, "the legend has what cannot be seen"
    shared = figure([simulate(build("gpipe", 2, 1, Placement.spread(2, 1)), Costs(1, 2))], ["one"])
    texts = {text.get_text() for text in shared.findobj(Text) if isinstance(text, Text)}
    assert {"stage 1 (process 0)", "process at another stage"} <= texts


def test_png_and_svg_files(tmp_path: Path) -> None:
    timeline = simulate(build("gpipe", 2, 2), COSTS)
    draw_png(tmp_path / "one.png", timeline)
    pixels = imread(tmp_path / "one.png")
    assert pixels.shape[1] > 1000
    assert pixels[..., :3].std() > 0.05
    draw_png(str(tmp_path / "two.svg"), timeline, timeline, titles=("predicted", "measured"))
    assert ElementTree.parse(tmp_path / "two.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("name", "count", "titles", "message"),
    [
        ("a.gif", 1, None, "suffix '.gif' is not one of .png, .svg"),
        ("a", 1, None, "suffix ''"),
        ("a.png", 2, ["one"], "2 timelines with 1 titles"),
        ("a.png", 0, None, "0 timelines"),
    ],
)
def test_pictures_that_cannot_be_drawn(
    tmp_path: Path, name: str, count: int, titles: list[str] | None, message: str
) -> None:
    timeline = simulate(build("gpipe", 1, 1), COSTS)
    with pytest.raises(ScheduleError, match=message):
        draw_png(tmp_path / name, *[timeline] * count, titles=titles)
    assert not (tmp_path / name).exists()


def test_schedules_need_neither_torch_nor_matplotlib_until_they_draw(tmp_path: Path) -> None:
    program = f"""
import sys
from hf_gpipe.schedule import *
import hf_gpipe.partition
timeline = simulate(build("gpipe", 2, 2), Costs(1, 2))
draw_text(timeline)
assert not {{"torch", "matplotlib", "numpy"}} & set(sys.modules)
draw_png({str(tmp_path / "a.png")!r}, timeline)
assert "torch" not in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
