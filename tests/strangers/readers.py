"""Every reader of a file that a user can hand in: a whole file to begin with, and how it is read.

A reader takes bytes and a folder to put them in. It ends, or raises one of HALOC's errors; anything else is a crash.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.strangers import documents, kept, outside
from tests.strangers.common import PLAN, Reader, as_json, layers
from tests.strangers.mutate import bytes_mutated, json_mutated, lines_mutated, toml_mutated


def _one(seed: Callable[[], bytes]) -> Callable[[], list[bytes]]:
    return lambda: [seed()]


READERS = {
    reader.name: reader
    for reader in (
        Reader("plan", lambda: [as_json(PLAN.to_dict())], documents.read_plan, json_mutated, 20_000),
        Reader("layers", lambda: [as_json(layers().to_dict())], documents.read_layers, json_mutated, 15_000),
        Reader("table", lambda: [as_json(documents.table().to_dict())], documents.read_table, json_mutated, 12_000),
        Reader("timings", _one(documents.timings), documents.read_timings, json_mutated, 12_000),
        Reader("search", documents.evidence, documents.read_evidence, json_mutated, 3_000),
        Reader(
            "space",
            lambda: [as_json(json.loads(documents.evidence()[0])["space"])],
            documents.read_space,
            json_mutated,
            4_000,
        ),
        Reader("recipe", documents.recipes, documents.read_recipe, toml_mutated, 4_000),
        Reader("stages", _one(documents.stages), documents.read_stages, json_mutated, 10_000),
        Reader("report", _one(documents.report), documents.read_report, json_mutated, 400),
        Reader("card", kept.artefact("model.json"), kept.read_artefact("model.json"), json_mutated, 500),
        Reader("artefact-plan", kept.artefact("plan.json"), kept.read_artefact("plan.json"), json_mutated, 500),
        Reader(
            "artefact-weights",
            kept.artefact("weights.safetensors"),
            kept.read_artefact("weights.safetensors"),
            bytes_mutated,
            500,
        ),
        Reader(
            "checkpoint-facts", kept.checkpoint("state.json"), kept.read_checkpoint("state.json"), json_mutated, 3_000
        ),
        Reader(
            "checkpoint-tensors",
            kept.checkpoint("state.safetensors"),
            kept.read_checkpoint("state.safetensors"),
            bytes_mutated,
            3_000,
        ),
        Reader("resume", kept.resume, kept.read_resume, json_mutated, 300),
        Reader("journal", _one(kept.journal), kept.read_journal, lines_mutated, 8_000),
        Reader("blocks", _one(kept.blocks), kept.read_blocks, lines_mutated, 1_500),
        Reader("samples", _one(kept.samples), kept.read_samples, lines_mutated, 8_000),
        Reader("prices", _one(kept.prices), kept.read_prices, lines_mutated, 2_000),
        Reader("description", _one(kept.description), kept.read_description, bytes_mutated, 200),
        Reader(
            "safetensors", _one(outside.safetensors), outside.read_weights("weights.safetensors"), bytes_mutated, 12_000
        ),
        Reader("torch-file", outside.torch_files, outside.read_weights("weights.pth"), bytes_mutated, 3_000),
        Reader("picture", outside.pictures, outside.read_picture, bytes_mutated, 3_000),
        Reader("cifar10-archive", outside.archives, outside.read_archive, bytes_mutated, 1_500),
        Reader(
            "cifar10-batch", lambda: [outside.cifar_files()["test_batch"]], outside.read_batch, bytes_mutated, 3_000
        ),
        Reader("cifar10-cache", _one(outside.kept_data), outside.read_kept_data, bytes_mutated, 1_500),
        Reader("onnx", _one(outside.onnx), outside.read_onnx, bytes_mutated, 1_000),
    )
}
