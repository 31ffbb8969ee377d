"""Files that the command line reads, written for a test."""

from __future__ import annotations

MODEL = """
import argparse
from collections import OrderedDict
import torch
from torch import nn

print("a line of the model file's own")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()

def build():
    return Net(), torch.zeros(2, 4096)

def with_sgd():
    return Net(), (torch.zeros(2, 4096),), lambda ps: torch.optim.SGD(ps, lr=0.1)

def with_two():
    return Net(), (torch.zeros(2, 4096),), lambda ps: [torch.optim.SGD(ps[:2], lr=0.1), torch.optim.SGD(ps[2:], lr=0.1)]

def with_no_optimizers():
    return Net(), (torch.zeros(2, 4096),), lambda ps: [torch.optim.SGD(ps[:2], lr=0.1), 7]

def in_groups():
    def factory(ps):
        return torch.optim.SGD([{"params": ps[:1], "momentum": 0.0}, {"params": ps[1:3], "momentum": 0.9}], lr=0.1)
    return Net(), torch.zeros(2, 4096), factory

def warning():
    import warnings
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.warn("of a loader")
    return Net(), torch.zeros(2, 4096)

def with_adafactor():
    return Net(), torch.zeros(2, 4096), lambda ps: torch.optim.Adafactor(ps)

def with_muon():
    def factory(ps):
        return [torch.optim.Muon([p for p in ps if p.dim() == 2]), torch.optim.SGD([p for p in ps if p.dim() < 2])]
    return Net(), torch.zeros(2, 4096), factory

def of_numbers():
    return Net(), torch.zeros(2, 4096), [rate.item() for rate in torch.linspace(0, 0.1, 3)]

class Asking(torch.optim.SGD):
    def step(self, closure=None):
        assert self.param_groups[0]["params"][0].sum().item() != 0.5

def of_values():
    return Net(), torch.zeros(2, 4096), lambda ps: Asking(ps)

def in_halves():
    return Net().bfloat16(), torch.zeros(2, 4096, dtype=torch.bfloat16)

def fails():
    raise KeyError("hello")

def has_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4096)
    return Net(), torch.zeros(2, parser.parse_args().width)

def exits():
    raise SystemExit("no data")

def nothing():
    return 3

def empty():
    return nn.ReLU(), torch.zeros(2)

def no_optimizer():
    def factory(parameters):
        raise ValueError("no rate")
    return Net(), torch.zeros(2, 4096), factory

def lazy():
    return nn.Sequential(nn.Linear(4, 8), nn.LazyLinear(8)), torch.zeros(2, 4)

def lacks():
    Net.forward = lambda this, x, y=None: this.layers[1](this.layers[0](x) + this.nothing)
    return Net(), torch.zeros(2, 4096)

def of_others():
    return nn.Linear(5, 8), torch.zeros(2, 4)

def breaks():
    Net.forward = lambda self, x: self.layers[0](x).sum() if x.sum().item() > 3 else x
    return Net(), torch.zeros(2, 4096)

def stepped():
    net = Net()
    return net, torch.zeros(2, 4096), torch.optim.SGD(net.parameters())

def frozen():
    return Net().requires_grad_(False), torch.zeros(2, 4096)

def in_brackets():
    return nn.Sequential(OrderedDict(by=nn.Sequential(OrderedDict({"[/INST]": nn.Linear(8, 8)})))), torch.ones(2, 8)

def misfit():
    return Net(), torch.zeros(2, 7)

def recurrent():
    return nn.LSTM(8, 8), torch.zeros(3, 2, 8)

def scripted():
    return nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8))), torch.zeros(2, 8)
def recurrent_inside():
    return nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8)), torch.zeros(3, 2, 8)
"""


CONFIGS = {
    "llama": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 64},
    "vit": {"model_type": "vit"},
    "bart": {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]},
    "unlike": {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 5},
    "quantized": {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
    "broken": {"model_type": "llama", "hidden_size": "many"},
}  # fmt: skip
