"""Vision transformers (Dosovitskiy et al. 2021) of DeiT's sizes (Touvron et al. 2021), with timm's parameter names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from haloc.errors import SpecError
from haloc.zoo.mlp import Mlp

#: Published networks have this in their normalisations.
_EPS = 1e-6


class _Patches(nn.Module):
    """The image cut into squares, each of them a vector."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, images: Tensor) -> Tensor:
        """Returns (batch, squares, width)."""
        vectors: Tensor = self.proj(images)
        return vectors.flatten(2).transpose(1, 2)


class _Attention(nn.Module):
    """Every vector looks at all of them, by several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what each vector has found."""
        batch, count, width = x.shape
        query, key, value = self.qkv(x).view(batch, count, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value)
        found: Tensor = self.proj(seen.transpose(1, 2).reshape(batch, count, width))
        return found


class _Block(nn.Module):
    """Attention, then the layers of each vector alone; each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, _EPS)
        self.attn = _Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, _EPS)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output."""
        seen: Tensor = x + self.attn(self.norm1(x))
        out: Tensor = seen + self.mlp(self.norm2(seen))
        return out


class VisionTransformer(nn.Module):
    """Squares of the image and one more vector, blocks, and a linear layer on what became of that vector."""

    def __init__(self, size: int, patch: int, width: int, depth: int, heads: int, num_classes: int) -> None:
        super().__init__()
        if size % patch or width % heads:
            raise SpecError(
                f"the size must be a multiple of the patch and the width one of the heads, got {size} and {patch}, "
                f"{width} and {heads}"
            )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.patch_embed = _Patches(patch, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, _EPS)
        self.head = nn.Linear(width, num_classes)
        self.apply(_initialise)
        for tokens in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(tokens, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of a batch of images."""
        patches = self.patch_embed(x)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], 1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def deit_tiny(num_classes: int = 1000, size: int = 224, patch: int = 16) -> VisionTransformer:
    """Returns DeiT's smallest network, with random weights; timm's deit_tiny_patch16_224."""
    return VisionTransformer(size, patch, 192, 12, 3, num_classes)


def deit_small(num_classes: int = 1000, size: int = 224, patch: int = 16) -> VisionTransformer:
    """Returns DeiT's middle network, with random weights; timm's deit_small_patch16_224."""
    return VisionTransformer(size, patch, 384, 12, 6, num_classes)
