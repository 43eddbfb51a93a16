"""scikit-learn's digits → tasks of few-shot classification, a network for them; nothing of torchopt is used."""

import functools

import torch
from sklearn.datasets import load_digits
from torch import nn

WAYS, SHOTS, QUERIES = 3, 2, 5


@functools.cache
def images_by_digit():
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16), torch.tensor(digits.target)
    return [images[labels == digit] for digit in range(10)]


def task(number):
    """The images and labels to adapt to, and those to be judged by, of the task with this number."""
    generator = torch.Generator().manual_seed(number)
    dtype = torch.get_default_dtype()
    parts = []
    for digit in torch.randperm(10, generator=generator)[:WAYS].tolist():
        images = images_by_digit()[digit].to(dtype)
        parts.append(images[torch.randperm(len(images), generator=generator)[: SHOTS + QUERIES]])
    support, query = torch.stack(parts).split([SHOTS, QUERIES], dim=1)
    labels = [torch.arange(WAYS).repeat_interleave(count) for count in (SHOTS, QUERIES)]
    return support.flatten(0, 1), labels[0], query.flatten(0, 1), labels[1]


def batch(numbers):
    """The tasks, stacked."""
    return [torch.stack(parts) for parts in zip(*map(task, numbers), strict=True)]


def build_net():
    generator = torch.Generator().manual_seed(5)
    net = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, WAYS)).to(torch.get_default_dtype())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 4)
    return net
