"""The Mixtral network as it is trained: the same arithmetic as transformers, arranged for two cores."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}


# An expert's tokens are padded to a multiple of this: the matrix library compiles a kernel for
# every new shape, which costs more than the padding.
BLOCK = 128


class Spread(torch.autograd.Function):
    """Copies each token row to its `copies` places, one in the block of each chosen expert.

    The gradient of indexing is a scatter with additions, which is slow on a CPU; as every
    place is known here, it becomes a gather.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, places: Tensor, size: int, copies: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.copies = copies
        source = torch.zeros(size, dtype=torch.long)
        source[places] = torch.arange(len(places)) // copies
        return rows[source]

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (places,) = ctx.saved_tensors
        rows = gradient[places]
        return rows.view(-1, ctx.copies, rows.shape[-1]).sum(1), None, None, None


class Collect(torch.autograd.Function):
    """The rows at `places`, which are all different; what pads a block gets no gradient."""

    @staticmethod
    def forward(ctx, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = len(rows)
        return rows[places]

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (places,) = ctx.saved_tensors
        rows = gradient.new_zeros(ctx.size, gradient.shape[-1])
        return rows.index_copy_(0, places, gradient), None


class Experts(nn.Module):
    def __init__(self, hidden: int, width: int, experts: int, chosen: int):
        super().__init__()
        self.experts, self.chosen = experts, chosen
        self.gate = nn.Parameter(torch.empty(experts, hidden))
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output, load-balancing loss (1 at perfect balance), tokens per expert."""
        flat = x.reshape(-1, x.shape[-1])
        # Ties and near-ties between experts must fall as in a float32 reference.
        with torch.autocast("cpu", enabled=False):
            probabilities = F.linear(flat.float(), self.gate).softmax(-1)
        weights, choice = probabilities.topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)

        # Each expert sees its tokens as one contiguous block, so it is two matrix products.
        order = choice.flatten().argsort(stable=True)
        counts = torch.bincount(choice.flatten(), minlength=self.experts)
        sizes = (counts + BLOCK - 1) // BLOCK * BLOCK
        padding = (sizes - counts).cumsum(0) - (sizes - counts)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order)) + padding.repeat_interleave(counts)
        sizes = sizes.tolist()
        blocks = Spread.apply(flat, places, sum(sizes), self.chosen).split(sizes)
        out = []
        for block, gate_up, down in zip(blocks, self.gate_up, self.down, strict=True):
            gate, up = F.linear(block, gate_up).chunk(2, dim=-1)
            out.append(F.linear(F.silu(gate) * up, down))
        out = Collect.apply(torch.cat(out), places).view(-1, self.chosen, x.shape[-1])
        mixed = torch.bmm(weights.unsqueeze(1).to(out.dtype), out).view_as(x)

        share = counts / choice.numel()
        balance = self.experts * (share * probabilities.mean(0)).sum()
        return mixed, balance, counts


class Layer(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        hidden, self.head = config["hidden_size"], config["head_dim"]
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.eps = config["rms_norm_eps"]
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.expert_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Parameter(torch.empty((self.heads + 2 * self.groups) * self.head, hidden))
        self.out = nn.Parameter(torch.empty(hidden, self.heads * self.head))
        self.experts = Experts(
            hidden, config["intermediate_size"], config["num_local_experts"], config["num_experts_per_tok"]
        )

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = F.linear(x, self.qkv).view(batch, length, -1, self.head).transpose(1, 2)
        turned, value = qkv.split([self.heads + self.groups, self.groups], dim=1)
        left, right = turned.chunk(2, dim=-1)
        turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(value.dtype)
        query, key = turned.split([self.heads, self.groups], dim=1)
        key, value = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (key, value))
        query, key, value = (t.reshape(-1, length, self.head) for t in (query, key, value))
        # Queries in blocks, each with only the keys it may see: at these lengths twice as fast
        # as the fused kernel.
        mixed = []
        for start in range(0, length, BLOCK):
            end = min(start + BLOCK, length)
            mask = torch.full((end - start, end), float("-inf"), dtype=query.dtype).triu(start + 1)
            scores = torch.baddbmm(
                mask, query[:, start:end], key[:, :end].transpose(1, 2), alpha=self.head**-0.5
            )
            mixed.append(torch.bmm(scores.softmax(-1).to(value.dtype), value[:, :end]))
        mixed = torch.cat(mixed, dim=1).view(batch, self.heads, length, self.head)
        return F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), self.out)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
        x = x + self.attention(F.rms_norm(x, x.shape[-1:], self.input_norm, self.eps), cos, sin)
        mixed, balance, counts = self.experts(F.rms_norm(x, x.shape[-1:], self.expert_norm, self.eps))
        return x + mixed, balance, counts


class Network(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config["vocab_size"], config["hidden_size"]))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.Parameter(torch.ones(config["hidden_size"]))
        for name, parameter in self.named_parameters():
            # What writes into the residual stream starts smaller, the more layers do so.
            writes = name.endswith((".out", ".down"))
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / (2 * len(self.layers)) ** 0.5 if writes else 0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, mean load-balancing loss, tokens per (layer, expert)."""
        half = self.config["head_dim"] // 2
        frequency = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angle = torch.arange(tokens.shape[1])[:, None] * frequency
        # Kept in float32: in bfloat16 neighbouring positions would share an angle.
        cos, sin = angle.cos(), angle.sin()
        x = F.embedding(tokens, self.embedding)
        balances, counts = [], []
        for layer in self.layers:
            x, balance, count = layer(x, cos, sin)
            balances.append(balance)
            counts.append(count)
        x = F.rms_norm(x, x.shape[-1:], self.norm, self.config["rms_norm_eps"])
        return F.linear(x, self.embedding), torch.stack(balances).mean(), torch.stack(counts)

    def hub_tensors(self) -> dict[str, Tensor]:
        """The weights under the names that Mixtral checkpoints use."""
        tensors = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        for number, layer in enumerate(self.layers):
            prefix = f"model.layers.{number}."
            tensors[prefix + "input_layernorm.weight"] = layer.input_norm
            tensors[prefix + "post_attention_layernorm.weight"] = layer.expert_norm
            sizes = [count * layer.head for count in (layer.heads, layer.groups, layer.groups)]
            for name, part in zip("qkv", layer.qkv.split(sizes), strict=True):
                tensors[prefix + f"self_attn.{name}_proj.weight"] = part
            tensors[prefix + "self_attn.o_proj.weight"] = layer.out
            experts = layer.experts
            tensors[prefix + "block_sparse_moe.gate.weight"] = experts.gate
            for expert, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
                gate, up = gate_up.chunk(2)
                for name, part in [("w1", gate), ("w2", down), ("w3", up)]:
                    tensors[prefix + f"block_sparse_moe.experts.{expert}.{name}.weight"] = part
        return {name: tensor.detach().to(torch.bfloat16).clone() for name, tensor in tensors.items()}
