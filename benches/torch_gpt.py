"""A GPT in PyTorch, for the comparisons of `peers.py` and `gpu.py`: pre-norm blocks, tanh GELU, fused AdamW."""

from typing import NamedTuple


class Shape(NamedTuple):
    blocks: int
    width: int
    heads: int
    seq: int
    rows: int
    vocab: int


def training_step(shape, device, tied, autocast, compiled):
    """A training step of f32 parameters, as a function that returns the loss.

    `tied`: the output layer is the token embedding. `autocast`: products are computed in bf16.
    """
    import torch
    from torch import nn
    from torch.nn import functional as F

    blocks, width, heads, seq, rows, vocab = shape

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.fused, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            split = self.fused(self.norms[0](x)).view(rows, seq, 3, heads, width // heads)
            query, key, value = split.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(rows, seq, width))
            return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(seq, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
            if tied:
                self.head.weight = self.tokens.weight
            for weight in self.parameters():
                if weight.dim() == 2:
                    nn.init.normal_(weight, std=0.02)

        def forward(self, ids, targets):
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                logits = self.head(self.norm(self.blocks(self.tokens(ids) + self.places.weight)))
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    model = Gpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    loss_of = torch.compile(model) if compiled else model
    ids, targets = torch.randint(vocab, (2, rows, seq), device=device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(ids, targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
