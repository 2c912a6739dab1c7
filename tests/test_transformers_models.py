"""The benchmark over architectures of `transformers`, on tiny ones: the same checks, in seconds."""

import importlib.util
import sys
from pathlib import Path

import pytest
from torch import nn

import haloc

pytest.importorskip("transformers", reason="not part of the test extra: pip install 'haloc[bench]'")

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "transformers_models.py"


def load_benchmark():
    spec = importlib.util.spec_from_file_location("transformers_models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name while it runs.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


benchmark = load_benchmark()

VIT = benchmark.Case(
    "tiny ViT",
    "ViTForImageClassification",
    "ViTConfig",
    (3, 32, 32),
    {
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "num_labels": 20,
    },
)
RESNET = benchmark.Case(
    "tiny ResNet",
    "ResNetForImageClassification",
    "ResNetConfig",
    (3, 64, 64),
    {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 2], "num_labels": 20},
)
SEGFORMER = benchmark.Case(
    "tiny SegFormer",
    "SegformerForSemanticSegmentation",
    "SegformerConfig",
    (3, 64, 64),
    {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "decoder_hidden_size": 64, "num_labels": 20},
)


@pytest.mark.parametrize("case", [VIT, RESNET, SEGFORMER], ids=lambda case: case.name)
def test_every_check_passes(case):
    row = benchmark.examine(case)
    assert {name: check["status"] for name, check in row["checks"].items()} == dict.fromkeys(benchmark.CHECKS, "pass")
    assert row["factorised_layers"] > 0
    assert row["macs_remaining"] < 1
    assert row["output_change"] > benchmark.FULL_RANK_TOLERANCE, "the outputs do not depend on what was factorised"


def test_a_lost_bias_is_noticed(monkeypatch):
    subject = benchmark.Subject.of(VIT)
    layer = next(iter(subject.plan.changes()))
    apply_plan = haloc.apply_plan

    def forgetful(model, plan, **options):
        result = apply_plan(model, plan, **options)
        nn.init.zeros_(result.get_submodule(layer)[-1].bias)
        return result

    monkeypatch.setattr(haloc, "apply_plan", forgetful)
    assert "differ" in benchmark.outcome(benchmark.check_full_rank, subject)["note"]


def test_a_check_that_fails_is_reported_with_its_first_line():
    def check(subject):
        raise ValueError("first line\nsecond line")

    assert benchmark.outcome(check, None) == {"status": "fail", "note": "ValueError: first line"}


def test_a_limit_of_the_dense_model_is_no_failure():
    def depend_on_the_data(module, args, kwargs):
        if kwargs["pixel_values"].sum() > 0:
            kwargs["pixel_values"] = -kwargs["pixel_values"]
        return args, kwargs

    subject = benchmark.Subject.of(VIT)
    for model in (subject.dense, subject.small):
        model.register_forward_pre_hook(depend_on_the_data, with_kwargs=True)
    row = {"checks": {"export": benchmark.outcome(benchmark.check_export, subject)}}
    assert row["checks"]["export"]["note"].startswith("dense model does not export")
    assert benchmark.failures(row) == {}


def test_every_reason_in_the_results_is_explained_in_the_documentation():
    results = benchmark.read_json(benchmark.RESULTS)
    reasons = {reason for row in results["models"].values() for reason in row["left_alone"]}
    for reason in reasons:
        found = [entry for entry in benchmark.REASONS if benchmark.re.fullmatch(entry.pattern, reason)]
        assert len(found) == 1, reason


def test_the_documentation_is_up_to_date():
    assert benchmark.DOCS.read_text(encoding="utf-8") == benchmark.docs_page(benchmark.read_json(benchmark.RESULTS))
