from __future__ import annotations

import sys
from itertools import product

import pytest

from haloc.cost.table import Table
from haloc.errors import CostError, FileFormatError, MissingExtraError, SpecError
from haloc.forms import Dense, Spatial, Svd, Tucker2
from haloc.report.figures import latency_figure
from haloc.shapes import LinearShape
from tests.cost.latencies import made_up_table
from tests.test_shapes import conv

LAYER = conv(in_channels=64, out_channels=96, stride=(1, 1))
LINE = [Dense(), *(Tucker2(rank, rank) for rank in range(4, 65, 4))]
PLANE = [Dense(), *(Tucker2(*setting) for setting in product(range(16, 97, 16), range(16, 65, 16)))]


def table_of(shape, forms) -> Table:
    return made_up_table([(shape, form) for form in forms])


def svg(tmp_path, shape, forms) -> str:
    latency_figure(table_of(shape, forms), shape, tmp_path / "figure.svg")
    return (tmp_path / "figure.svg").read_text()


def texts(drawing: str) -> list[str]:
    """The texts of an SVG, which matplotlib leaves as comments beside their outlines."""
    return [line.strip()[5:-4] for line in drawing.splitlines() if line.strip().startswith("<!-- ")]


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".SVG", b"<?xml")])
def test_the_suffix_decides_the_format_and_nothing_else_is_left(tmp_path, suffix, magic):
    for forms in (LINE, PLANE):
        latency_figure(table_of(LAYER, forms), LAYER, tmp_path / f"figure{suffix}")
        assert (tmp_path / f"figure{suffix}").read_bytes().startswith(magic)
        assert len(list(tmp_path.iterdir())) == 1


def test_the_same_table_gives_the_same_bytes(tmp_path):
    assert svg(tmp_path, LAYER, LINE) == svg(tmp_path, LAYER, LINE)


def test_a_plane_of_ranks_is_a_heat_map(tmp_path):
    words = texts(svg(tmp_path, LAYER, PLANE))
    assert {"rank of the input, r(2)", "rank of the output, r(1)", "latency (ms)", "dense"} <= set(words)
    assert "3×3 convolution 64→96 of 56×56" in words
    assert f"{table_of(LAYER, PLANE).row(LAYER, Tucker2(16, 48)).latency_ms:.3g}" in words


def test_a_plane_of_many_ranks_has_no_numbers(tmp_path):
    forms = [Dense(), *(Tucker2(*setting) for setting in product(range(4, 97, 4), range(4, 65, 4)))]
    assert len(texts(svg(tmp_path, LAYER, forms))) < 80


def test_lines_of_ranks_are_curves(tmp_path):
    forms = [*LINE, *(Spatial(rank) for rank in range(8, 81, 8)), *(Tucker2(rank, 64) for rank in (16, 32, 48))]
    words = texts(svg(tmp_path, LAYER, forms))
    assert {"rank", "dense", "Tucker-2, equal ranks", "Tucker-2, output only", "spatial"} <= set(words)
    assert "Tucker-2, input only" not in words


def test_linear_layers_and_stray_settings(tmp_path):
    linear = LinearShape(512, 1000, positions=7)
    assert "SVD" in texts(svg(tmp_path, linear, [Dense(), Svd(32), Svd(64)]))
    assert "rank of the input, r(2)" in texts(svg(tmp_path, LAYER, [Dense(), Tucker2(8, 4), Tucker2(16, 12)]))


def test_a_layer_that_was_not_measured_is_refused(tmp_path):
    with pytest.raises(CostError, match="3×3 convolution 64→128 of 56×56, stride 2 needs rows .* has none at all"):
        latency_figure(table_of(LAYER, LINE), conv(), tmp_path / "figure.svg")
    with pytest.raises(CostError, match="has dense; measure"):
        latency_figure(table_of(LAYER, [Dense()]), LAYER, tmp_path / "figure.svg")
    assert not list(tmp_path.iterdir())


def test_other_formats_and_places_are_refused(tmp_path):
    with pytest.raises(SpecError, match="written as .svg, .png, .pdf, got 'figure.gif'"):
        latency_figure(table_of(LAYER, LINE), LAYER, tmp_path / "figure.gif")
    (tmp_path / "file").touch()
    with pytest.raises(FileFormatError, match="cannot write"):
        latency_figure(table_of(LAYER, LINE), LAYER, tmp_path / "file" / "figure.svg")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"haloc\[plot\]"):
        latency_figure(table_of(LAYER, LINE), LAYER, tmp_path / "figure.svg")
