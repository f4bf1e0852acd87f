"""Modules that are not transformers': a small decoder with its own position embeddings, and torch's encoder."""

import torch
from torch import nn
from torch.nn import functional

VOCAB_SIZE = 61
WIDTH = 32
NUM_BLOCKS = 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = hidden.shape
        parts = self.qkv(hidden).view(rows, tokens, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        projected: torch.Tensor = self.out_proj(mixed.transpose(1, 2).reshape(rows, tokens, WIDTH))
        return projected


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        widened: torch.Tensor = self.fc2(functional.gelu(self.fc1(hidden)))
        return widened


class Block(nn.Module):
    """``scale`` is a parameter that no submodule of its own holds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = Mlp()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.scale * self.attn(self.norm(hidden))
        return hidden + self.mlp(hidden)


class Decoder(nn.Module):
    """Positions lie in the model itself, and the head is the embedding, used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.positions = nn.Parameter(torch.zeros(64, WIDTH))
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        hidden = self.dropout(self.embed(ids) + self.positions[: ids.shape[1]] + self.shift)
        for index, block in enumerate(self.blocks):
            hidden = hidden if index == skip else block(hidden)
        return functional.linear(self.norm(hidden), self.embed.weight)


def tiny_decoder(seed: int = 0) -> Decoder:
    """Loud, as checkpoints of tests are."""
    model = Decoder().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


def tiny_encoder(seed: int = 0) -> nn.TransformerEncoder:
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, NUM_BLOCKS, norm=nn.LayerNorm(WIDTH)).eval()
