"""Programs and tables of these pages → the pictures in ``docs/_pictures``, made when the pages are built; and README's.

Those of README are in ``docs/images`` and committed, since a code host shows them, too: ``make pictures`` draws them
anew. Each ends with a digest of what it was drawn from, which ``tests/docs/test_site.py`` compares.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import torchopt_dist as todist
from torchopt_dist.visual import make_dot

DOCS = Path(__file__).resolve().parent
FOLDER, COMMITTED = DOCS / "_pictures", DOCS / "images"
OURS, OTHERS = "#3776c8", "#b9bec6"
LOOP = "width 128, 4 layers, 12 steps"
"""The loop whose memory README shows."""


# --- Graphs -------------------------------------------------------------------------------------------------


@todist.parallelize(todist.tasks, todist.mean_reducer)
def task_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One task: a step of SGD on one half of its points, the loss on the other half."""
    model = todist.module_clone(model)
    inner = todist.MetaSGD(model, lr=0.05)
    inner.step(F.mse_loss(model(x[:5]), y[:5]))
    return F.mse_loss(model(x[5:]), y[5:])


@todist.rank_zero_only
def graph_of_a_call() -> str:
    """The graph that rank 0 holds of a loss that two workers have computed."""
    model = nn.Linear(1, 1)
    loss = task_loss(model, torch.rand(2, 10, 1), torch.rand(2, 10, 1))
    return make_dot(loss, params=[dict(model.named_parameters()), {"loss": loss}]).source


@todist.rank_zero_only
def timeline_of_a_step(path: Path) -> None:
    """What two workers do for a step of MAML with eight tasks, forward and backward."""
    model = nn.Sequential(nn.Linear(1, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    x, y = torch.rand(8, 256, 1), torch.rand(8, 256, 1)
    task_loss(model, x, y).backward()  # the first call imports and compiles
    with todist.profile() as profile:
        task_loss(model, x, y).backward()
    profile.plot(path)


def timeline(path: Path) -> None:
    """On each of two workers: draw it."""
    torch.set_num_threads(1)
    timeline_of_a_step(path)


def graph_of_two_steps() -> str:
    """Two inner steps that a learning rate is learned through."""
    net = nn.Linear(2, 1, bias=False)
    lr = torch.tensor(0.1, requires_grad=True)
    optimizer = todist.MetaSGD(net, lr=lr)
    x = torch.ones(3, 2)
    steps = [todist.extract_state_dict(net, enable_visual=True, visual_prefix="step0.")]
    for step in (1, 2):
        optimizer.step(net(x).pow(2).sum())
        steps.append(todist.extract_state_dict(net, enable_visual=True, visual_prefix=f"step{step}."))
    loss = net(x).pow(2).sum()
    return make_dot(loss, params=[*steps, {"lr": lr, "loss": loss}]).source


def draw_graph(source: str, path: Path, direction: str = "TB") -> None:
    """Graphviz's text → an SVG, drawn downwards or to the right (``"LR"``); pygraphviz's wheel has graphviz."""
    import pygraphviz

    graph = pygraphviz.AGraph(string=source)
    graph.graph_attr.update(
        bgcolor="transparent", rankdir=direction, size="", nodesep="0.25", ranksep="0.35", pad="0.15"
    )
    graph.node_attr.update(fontname="sans-serif", fontsize="11")
    graph.draw(path, format="svg", prog="dot")


# --- Figures that were measured -------------------------------------------------------------------------------


def table(page: str, heading: str) -> dict[str, list[str]]:
    """The first table below a heading of a page: first cell → the other cells."""
    text = (DOCS / page).read_text("utf-8")
    below = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"^\|.*\n\|[-| ]+\n((?:\|.*\n)+)", below, re.MULTILINE)
    if found is None:
        raise ValueError(f"docs/{page} has no table below '## {heading}', of which a picture is drawn")
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in found[1].splitlines()]
    return {cells[0].replace("`", ""): cells[1:] for cells in rows}


def number(cell: str) -> float:
    """The number that a cell begins with."""
    return float(cell.replace(",", "").split()[0])


def costs() -> list[dict[Any, Any]]:
    """Milliseconds of a step, the cells on the bytes sent by tasks, and megabytes of a loop, from a page's tables."""
    rows = table("benchmarks.md", "A MAML step").items()
    step = {
        name: number(cells[0]) for name, cells in rows if not name.startswith("half the tasks")
    }  # the bounds
    sent = {number(n): cells for n, cells in table("benchmarks.md", "How many bytes travel").items()}
    # The first cell has seconds and megabytes, and the others parts of these.
    whole, *parts = table("benchmarks.md", "Memory of an inner loop")[LOOP]
    megabytes = number(re.fullmatch(r".+ s, (.+ MB)", whole)[1])
    ways = ("run again", "run again, from 4 snapshots", "run again, layer by layer")
    peaks = {"every step recorded": megabytes}
    peaks |= {way: megabytes * number(cell.split(", ")[1]) for way, cell in zip(ways, parts, strict=True)}
    return [step, sent, peaks]


def draw_costs(figures: list[dict[Any, Any]], path: Path) -> None:
    """Speed, bytes and memory against the peers."""
    step, sent, peaks = figures
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.05)
    speed, traffic, memory = figure.subplots(1, 3, width_ratios=[1, 0.8, 1])
    for axes, rows, title in (
        (speed, step, "A MAML step on two workers, ms"),
        (memory, peaks, "Memory of 12 steps, MB"),
    ):
        labels = [
            row.replace("ours", "torchopt_dist").replace(", vectorize=True", ", in one vmap") for row in rows
        ]
        ours = [row.startswith(("ours", "run again")) for row in rows]
        bars = axes.barh(labels, list(rows.values()), color=[OURS if own else OTHERS for own in ours])
        axes.bar_label(bars, fmt="{:,.0f}", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.16)
        axes.set_xticks([])
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    for column, label, colour in ((2, "TorchOpt", OTHERS), (0, "torchopt_dist", OURS)):
        if column >= len(next(iter(sent.values()))):
            continue  # was not installed
        traffic.plot(list(sent), [number(cells[column]) / 1e6 for cells in sent.values()], "o-", color=colour)
        last = number(list(sent.values())[-1][column]) / 1e6
        traffic.annotate(label, (list(sent)[-1], last), (-8, 4), textcoords="offset points", ha="right")
    traffic.set(xscale="log", yscale="log", xlabel="tasks")
    traffic.set_xticks(list(sent), [f"{tasks:g}" for tasks in sent], minor=False)
    traffic.minorticks_off()
    traffic.set_title("MB sent to two workers", fontsize=10, loc="left")
    traffic.margins(y=0.12)
    traffic.spines[["top", "right"]].set_visible(False)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None}, transparent=True)


def draw_growth() -> None:
    """A MAML step against tasks, inner steps and parameters, from their table."""
    rows = table("benchmarks.md", "How the cost grows with tasks, steps and parameters")
    figure = Figure(figsize=(11, 3), layout="constrained")
    for axes, what in zip(figure.subplots(1, 3), ("tasks", "inner steps", "parameters"), strict=True):
        of_this = {
            number(name): cells for name, cells in rows.items() if name.endswith(what) and name[0].isdigit()
        }
        for column, label, colour in ((0, "one process", OTHERS), (1, "two workers", OURS)):
            milliseconds = [number(cells[column]) for cells in of_this.values()]
            axes.plot(list(of_this), milliseconds, "o-", color=colour, label=label)
        axes.set(xscale="log", yscale="log", xlabel=what)
        axes.set_xticks(list(of_this), [f"{count:,g}" for count in of_this])
        axes.set_xticks([], minor=True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("a step, ms")
    figure.axes[0].legend(frameon=False)
    figure.savefig(FOLDER / "growth.svg", metadata={"Date": None})


def draw_efficiency() -> None:
    """The part of a step that is work, over the work of a task; points are measured, lines are the model."""
    rows = table("scaling.md", "Efficiency over the work of a task")
    work = [number(cell) for cell in rows]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for place, (workers, marker) in enumerate(((2, "o"), (8, "s"), (32, "^"))):
        measured, model = (
            [float(cells[2 * place + which].rstrip("%")) for cells in rows.values()] for which in (0, 1)
        )
        (line,) = axes.plot(work, model, color=OURS, alpha=1 - 0.3 * place)
        axes.plot(
            work, measured, marker, color=line.get_color(), alpha=line.get_alpha(), label=f"{workers} workers"
        )
    axes.set(xscale="log", xlabel="work of a task, s", ylabel="of a step, %", ylim=(0, 104))
    axes.set_xticks(work, [f"{seconds:g}" for seconds in work], minor=False)
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FOLDER / "efficiency.svg", metadata={"Date": None})


# --- Data -----------------------------------------------------------------------------------------------------


def draw_letters() -> None:
    """A row of drawings for each of some classes: of the training scripts, and of those for tests."""
    split = todist.data.glyphs(rotations=False)
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    for axes, part, title in zip(
        figure.subplots(1, 2), (split.train, split.test), ("to train on", "for tests"), strict=True
    ):
        classes = range(len(part.names) // 12, len(part.names), len(part.names) // 7)
        shown = torch.stack([part[part.labels == number][0][:, 0] for number in classes])
        axes.imshow(shown.permute(0, 2, 1, 3).flatten(2).flatten(0, 1), cmap="gray_r")
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_axis_off()
    figure.savefig(FOLDER / "letters.svg", metadata={"Date": None})


# --- Pictures of README ---------------------------------------------------------------------------------------


def digest(drawn_from: object, *draw: Callable[..., None]) -> str:
    """Of a graph's text or a table's numbers, and of the functions that draw them."""
    text = repr(drawn_from) + "".join(map(inspect.getsource, draw))
    return hashlib.sha256(text.encode()).hexdigest()


def digests(call: str) -> dict[str, str]:
    """Name of a committed picture → the digest that it should end with; ``call``: what ``graph_of_a_call`` returns."""
    return {"call": digest(call, draw_graph, on_a_card), "costs": digest(costs(), draw_costs, on_a_card)}


def on_a_card(path: Path, ending: str) -> None:
    """Put a picture on white with round corners, as the page behind it may be dark, and a digest at its end."""
    svg = re.sub(r"^ +| +$", "", path.read_text("utf-8"), flags=re.MULTILINE)
    card = '<rect width="100%" height="100%" rx="8" fill="white"/>'
    svg = re.sub(r"<svg\b[^>]*>", lambda start: f"{start[0]}\n{card}", svg, count=1)
    path.write_text(svg.replace("</svg>", f"<!-- {ending} -->\n</svg>"), "utf-8")


def make_committed() -> None:
    """Make the pictures of README."""
    COMMITTED.mkdir(exist_ok=True)
    call = todist.launch(graph_of_a_call, nproc_per_host=2, rpc=True).rank(0)
    draw_graph(call, COMMITTED / "call.svg", "LR")
    draw_costs(costs(), COMMITTED / "costs.svg")
    for name, ending in digests(call).items():
        on_a_card(COMMITTED / f"{name}.svg", ending)


def make() -> None:
    """Make the pictures that are not committed."""
    FOLDER.mkdir(exist_ok=True)
    draw_growth()
    draw_efficiency()
    draw_letters()
    draw_graph(graph_of_two_steps(), FOLDER / "two_steps.svg")
    todist.launch(timeline, args=(FOLDER / "timeline.svg",), nproc_per_host=2, rpc=True)


if __name__ == "__main__":
    make_committed()
