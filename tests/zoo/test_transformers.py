"""DeiT and ConvNeXt: what others compute with the same weights, and low-rank linear layers in them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import haloc
from haloc.errors import SpecError
from haloc.zoo.convnext import ConvNeXt
from haloc.zoo.vit import VisionTransformer, _Attention


def small_vit() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(32, 8, 24, 2, 3, 5).eval()


def small_convnext() -> ConvNeXt:
    torch.manual_seed(0)
    model = ConvNeXt((1, 1, 2, 1), (8, 16, 24, 32), 5).eval()
    with torch.no_grad():  # as small as they begin, blocks would do nothing that can be seen
        for name, parameter in model.named_parameters():
            if name.endswith("gamma"):
                parameter.uniform_(0.5, 1.5)
    return model


def test_attention_is_torchs_own():
    torch.manual_seed(0)
    ours, theirs = _Attention(24, 3).eval(), nn.MultiheadAttention(24, 3, batch_first=True).eval()
    theirs.load_state_dict({
        "in_proj_weight": ours.qkv.weight, "in_proj_bias": ours.qkv.bias,
        "out_proj.weight": ours.proj.weight, "out_proj.bias": ours.proj.bias,
    })  # fmt: skip
    x = torch.randn(2, 7, 24)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0], rtol=1e-5, atol=1e-6)


def test_the_published_vit_computes_the_same():
    library = pytest.importorskip("transformers", reason="not part of the test extra: pip install 'haloc[bench]'")
    told = library.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, image_size=32, patch_size=8,
        num_labels=5, layer_norm_eps=1e-6, qkv_bias=True,
    )  # fmt: skip
    theirs, ours = library.ViTForImageClassification(told).eval(), small_vit()
    own, found = ours.state_dict(), {}
    for name, value in own.items():
        place, _, kind = name.rpartition(".")
        if name.startswith("blocks."):
            number, inside = place.split(".")[1], ".".join(place.split(".")[2:])
            found[number, inside, kind] = value
    state = theirs.state_dict()

    def put(name: str, value: torch.Tensor) -> None:
        (key,) = [each for each in state if each.endswith(name)]
        assert state[key].shape == value.shape
        state[key] = value

    for name, other in {
        "cls_token": "embeddings.cls_token", "pos_embed": "position_embeddings",
        "patch_embed.proj.weight": "patch_embeddings.projection.weight",
        "patch_embed.proj.bias": "patch_embeddings.projection.bias",
        "norm.weight": "vit.layernorm.weight", "norm.bias": "vit.layernorm.bias",
        "head.weight": "classifier.weight", "head.bias": "classifier.bias",
    }.items():  # fmt: skip
        put(other, own[name])
    places = _places_in(state)
    for (number, inside, kind), value in found.items():
        parts = value.chunk(3) if inside == "attn.qkv" else [value]
        for place, part in zip(places[inside], parts, strict=True):
            put(f"{number}.{place}.{kind}", part)
    theirs.load_state_dict(state)
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-4, atol=1e-5)


def _places_in(state: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Where the parts of a block are, in the order in which the first block lists them: the library renames them."""
    first = [name for name in state if ".0." in name and name.endswith(".weight") and "layer" in name]
    inside = [name.split(".0.", 1)[1].removesuffix(".weight") for name in first]

    def those(*words: str) -> list[str]:
        return [name for name in inside if any(word in name for word in words)]

    queries, linear = those("query", "key", "value", "q_proj", "k_proj", "v_proj"), those("fc", "intermediate")
    norms = those("layernorm", "layer_norm", "norm")
    rest = [name for name in inside if name not in (*queries, *linear, *norms)]
    output = [name for name in rest if "attention" in name or "o_proj" in name or "attn" in name]
    second = [name for name in rest if name not in output]
    linear = [*linear, *second]
    return {
        "attn.qkv": queries, "attn.proj": output, "mlp.fc1": linear[:1], "mlp.fc2": linear[1:],
        "norm1": norms[:1], "norm2": norms[1:],
    }  # fmt: skip


def test_the_published_convnext_computes_the_same():
    library = pytest.importorskip("transformers", reason="not part of the test extra: pip install 'haloc[bench]'")
    told = library.ConvNextConfig(depths=[1, 1, 2, 1], hidden_sizes=[8, 16, 24, 32], num_labels=5)
    theirs, ours = library.ConvNextForImageClassification(told).eval(), small_convnext()
    words = (
        ("stem.0.", "embeddings.patch_embeddings."), ("stem.1.", "embeddings.layernorm."),
        ("downsample.0.", "downsampling_layer.0."), ("downsample.1.", "downsampling_layer.1."),
        (".blocks.", ".layers."), (".conv_dw.", ".dwconv."), (".norm.", ".layernorm."), ("head.norm.", "layernorm."),
        (".mlp.fc1.", ".pwconv1."), (".mlp.fc2.", ".pwconv2."), (".gamma", ".layer_scale_parameter"),
        ("head.fc.", "classifier."),
    )  # fmt: skip
    state = theirs.state_dict()
    for name, value in ours.state_dict().items():
        wanted = name.replace("head.norm.", "convnext.layernorm.")
        for mine, others in words:
            wanted = wanted.replace(mine, others)
        (key,) = [each for each in state if each.endswith(wanted)]
        state[key] = value
    theirs.load_state_dict(state)
    x = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("make", "side"), [(small_vit, 32), (small_convnext, 64)])
def test_linear_layers_become_low_rank_ones_and_full_rank_is_the_network(make, side):
    model, inputs = make(), torch.randn(4, 3, side, side)
    layers = haloc.inspect(model, inputs)
    linear = [layer.name for layer in layers.layers if "mlp" in layer.name]
    assert len(linear) in (4, 10)
    full = {name: haloc.Svd(min(model.get_submodule(name).weight.shape)) for name in linear}
    with torch.inference_mode():
        torch.testing.assert_close(haloc.apply_plan(model, full)(inputs), model(inputs), rtol=1e-4, atol=1e-5)
    moments = haloc.calibrate(model, [inputs], linear)
    half = {name: haloc.Svd(form.rank // 2) for name, form in full.items()}
    small = haloc.apply_plan(model, half, moments=moments)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    with torch.inference_mode():
        assert small(inputs).shape == (4, 5)


def test_a_size_that_the_patches_do_not_fill_is_refused():
    with pytest.raises(SpecError, match="the size must be a multiple of the patch"):
        haloc.create("deit_tiny", size=60)
