"""What the documents leave out → arguments, data, models and a place for gradients, the same in every program.

The names here fill the documents' `...`; nothing of torchopt or torchopt_dist is used.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn

RANK = int(os.environ.get("RANK", "0"))
CPU = torch.device("cpu")


def use_cpu_where_there_is_no_gpu() -> None:
    """The documents ask for `cuda:{local_rank}`; where workers outnumber GPUs, moving to a GPU stays on the CPU.

    Nothing but `Tensor.to` (and so `Module.to`) and `torch.cuda.set_device` is changed.
    """
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return
    move = torch.Tensor.to

    def to(tensor, *where, **how):
        gpu = [isinstance(argument, torch.device) and argument.type == "cuda" for argument in where]
        return move(tensor, *(CPU if is_gpu else it for it, is_gpu in zip(where, gpu, strict=True)), **how)

    torch.Tensor.to = to
    torch.cuda.set_device = lambda device: None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--out", type=Path, default=None, help="directory that gets the gradients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--inner_steps", type=int, default=2)
    parser.add_argument("--log_interval", type=int, default=1)
    parser.add_argument("--save_interval", type=int, default=2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return begin(parser.parse_args())


def begin(args: argparse.Namespace) -> argparse.Namespace:
    torch.set_default_dtype(getattr(torch, args.dtype))
    torch.manual_seed(args.seed)
    return args


def build_model() -> nn.Module:
    """The same one each time; torch's own generator is not used, since other threads may use it."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 2)
    return model


def data(*shape: int, seed: int = 3) -> torch.Tensor:
    """Samples whose last number is the target."""
    numbers = torch.randn(*shape, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return numbers.to(torch.get_default_dtype())


def loss_of(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    return (model(samples[..., :4]) - samples[..., 4:]).square().mean()


def save(args: argparse.Namespace, program: str, **values) -> None:
    """Print what a program found, and keep it for the test: gradients as nested lists of float64."""
    plain = {name: _plain(value) for name, value in values.items()}
    print(f"{program} {args.dtype} rank {RANK}: {', '.join(plain)}")
    if args.out is not None:
        path = args.out / f"{program}-{args.dtype}-{RANK}.json"
        path.write_text(json.dumps(plain))


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().double().tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


use_cpu_where_there_is_no_gpu()
