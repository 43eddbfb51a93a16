"""A tensor with a history → a picture of that history, for graphviz.

Values flow downwards: parameters are at the top, outputs at the bottom. Boxes of tensors lie on the edges
between the operations, so that a meta-graph shows the parameters after each inner step by name.

==========  ==========================================================================
blue        a leaf that requires grad: a parameter, a learned hyper-parameter
yellow      a named tensor on the way, such as a parameter after an inner step
green       an output
orange      a tensor that an operation has saved for backward (``show_saved``)
grey        an operation, by the name of its backward
purple      one of the two ends of a call to another worker, where the graph goes on
==========  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import optree
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from torchopt_dist.core.graphs import make_freeable
from torchopt_dist.core.types import TensorTree
from torchopt_dist.nn.module_state import ModuleState

if TYPE_CHECKING:
    from graphviz import Digraph

__all__ = ["NamedTensors", "make_dot", "resize_graph"]

NamedTensors: TypeAlias = Mapping[str, Tensor] | ModuleState | Iterable[tuple[str, Tensor]]
"""Tensors and their names: a mapping, a snapshot taken with ``enable_visual=True``, or pairs, such as
``module.named_parameters()``."""

LEAF, ON_THE_WAY, OUTPUT, SAVED = "lightblue", "lightyellow", "palegreen", "orange"
OPERATION, REMOTE = "lightgrey", "plum"


def make_dot(
    var: TensorTree,
    params: NamedTensors | Iterable[NamedTensors] | None = None,
    show_attrs: bool = False,
    show_saved: bool = False,
    max_attr_chars: int = 50,
) -> Digraph:
    """Draw the graph that a backward pass would go through.

    Equal graphs give equal text. Nothing is rendered here, so graphviz's programs need not be installed.

    Args:
        var: the output, or a tree of outputs; at least one of them has a history (a ``grad_fn``).
        params: names for tensors: a mapping, a :class:`~torchopt_dist.nn.ModuleState` taken with
            ``enable_visual=True``, pairs such as ``module.named_parameters()``, or an iterable of these. A
            tensor may have several names (tied weights) and is one box. Names of tensors that are not in
            the graph are left out.
        show_attrs: list the attributes of each operation, such as a dimension.
        show_saved: draw the tensors that operations have saved for backward, on dashed edges.
        max_attr_chars: with ``show_attrs``, the number of characters after which a value is cut off.

    Returns:
        The picture: its text is ``.source``, and ``.render("name", format="svg")`` makes a file of it.

    Raises:
        ImportError: the package ``graphviz`` is not installed.
        TypeError: ``var`` or ``params`` holds something else than tensors.
        ValueError: no tensor of ``var`` has a history, a snapshot was taken without ``enable_visual=True``,
            or ``max_attr_chars`` is below 1.

    Example:
        >>> import torch
        >>> w = torch.ones(2, requires_grad=True)
        >>> print(make_dot(w.exp().sum(), {"w": w}).source.count("->"))
        4
    """
    if max_attr_chars < 1:
        raise ValueError(f"`max_attr_chars` must be at least 1, got {max_attr_chars}")
    outputs = _outputs(var)
    picture = _Picture(_empty(), show_attrs, show_saved, max_attr_chars)
    if params is not None:
        for name, tensor in _named(params):
            picture.know(tensor).names.append(name)
    for path, tensor in outputs:
        known = picture.know(tensor)
        known.colour = OUTPUT
        known.names = known.names or [" ".join(("output", *map(str, path)))]
    for _, tensor in outputs:
        picture.box(tensor)
    picture.draw_all()
    make_freeable(picture.operations)
    resize_graph(picture.dot)
    return picture.dot


def resize_graph(dot: Digraph, size_per_element: float = 0.5, min_size: float = 12.0) -> None:
    """Limit the width and height of a picture in proportion to its numbers of nodes and edges.

    Args:
        dot: the picture; changed in place.
        size_per_element: the inches that each node and each edge adds.
        min_size: the least width and height, in inches.

    Raises:
        ValueError: one of the sizes is negative or not a number.
    """
    for name, value in (("size_per_element", size_per_element), ("min_size", min_size)):
        if not value >= 0:
            raise ValueError(f"`{name}` must be at least 0, got {value}")
    size = max(min_size, len(dot.body) * size_per_element)
    dot.graph_attr["size"] = f"{size:g},{size:g}"


@dataclass
class _Known:
    """A tensor that is drawn as a box of its own."""

    tensor: Tensor  # kept, so that its identity is not used again
    names: list[str] = field(default_factory=list)
    colour: str = ""


class _Picture:
    """The picture so far: an operation or tensor that has an id is drawn, or will be."""

    def __init__(self, dot: Digraph, show_attrs: bool, show_saved: bool, max_attr_chars: int) -> None:
        self.dot = dot
        self.show_attrs = show_attrs
        self.show_saved = show_saved
        self.max_attr_chars = max_attr_chars
        self.known: dict[Hashable, _Known] = {}
        self.ids: dict[Hashable, str] = {}
        self.operations: list[Node] = []
        self.todo: list[Node] = []

    def know(self, tensor: Tensor) -> _Known:
        return self.known.setdefault(_identity(tensor), _Known(tensor))

    def draw_all(self) -> None:
        while self.todo:
            self.draw(self.todo.pop())

    def draw(self, node: Node) -> None:
        """Draw an operation and the edges that lead to it."""
        here, lines, colour = self.operation(node), [node.name().rpartition("::")[2]], OPERATION
        worker = getattr(getattr(node, "graph", None), "worker_name", None)
        if isinstance(worker, str):
            lines.insert(0, f"remote call to {worker}")
            colour = REMOTE
        saved = list(_saved(node)) if self.show_attrs or self.show_saved else []
        if self.show_attrs:
            lines += [f"{name}: {_shortened(_text(value), self.max_attr_chars)}" for name, value in saved]
        self.dot.node(here, _label(lines), fillcolor=colour)
        if node.name() == "torch::autograd::AccumulateGrad":
            self.dot.edge(self.box(node.variable), here)  # type: ignore[attr-defined]
        for source, number in node.next_functions:
            if source is not None:
                self.dot.edge(self.source(source, number), here)
        if self.show_saved:
            for name, value in saved:
                for tensor in _tensors(value):
                    self.dot.edge(self.saved_box(tensor), here, name, style="dashed", dir="none")

    def operation(self, node: Node) -> str:
        """The id of an operation, which is drawn later."""
        if node not in self.ids:
            self.operations.append(node)
            self.todo.append(node)
        return self.id(node)

    def source(self, node: Node, number: int) -> str:
        """The id of what an operation's result of that number is drawn as: its box, if it has one."""
        known = self.known.get((node, number))
        if known is None or known.tensor.is_leaf:
            return self.operation(node)
        return self.box(known.tensor)

    def box(self, tensor: Tensor) -> str:
        """The id of a tensor, which is drawn now, below the operation that made it."""
        key = "tensor", _identity(tensor)
        if key not in self.ids:
            known = self.know(tensor)
            label = _label([*dict.fromkeys(known.names), str(tuple(tensor.shape))])
            self.dot.node(self.id(key), label, fillcolor=known.colour or _colour(tensor))
            if tensor.grad_fn is not None:
                self.dot.edge(self.operation(tensor.grad_fn), self.id(key))
        return self.id(key)

    def saved_box(self, tensor: Tensor) -> str:
        """The id of a saved tensor: its own box, if it has one, or else one that stands beside the graph."""
        if tensor.grad_fn is None or _identity(tensor) in self.known:
            return self.box(tensor)
        key = "saved", _identity(tensor)
        if key not in self.ids:
            self.dot.node(self.id(key), _label([str(tuple(tensor.shape))]), fillcolor=SAVED)
        return self.id(key)

    def id(self, key: Hashable) -> str:
        return self.ids.setdefault(key, f"node{len(self.ids)}")


def _identity(tensor: Tensor) -> Hashable:
    """A key that is equal for all Python objects of this tensor: its place in the graph, if it is in one."""
    return tuple(get_gradient_edge(tensor))[:2] if tensor.requires_grad else id(tensor)


def _colour(tensor: Tensor) -> str:
    if tensor.grad_fn is not None:
        return ON_THE_WAY
    return LEAF if tensor.requires_grad else SAVED


def _outputs(var: TensorTree) -> list[tuple[tuple[Any, ...], Tensor]]:
    paths, tensors, _ = optree.tree_flatten_with_path(var)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"`var` must be a tensor or a tree of tensors, got {type(tensor).__name__}")
    if all(tensor.grad_fn is None for tensor in tensors):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(
            "`var` must have a history (a `grad_fn`), or a tensor in it must, got tensors of "
            f"shapes {shapes} without one"
        )
    return list(zip(paths, tensors, strict=True))


def _named(params: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(params, ModuleState):
        if params.visual_contents is None:
            raise ValueError(
                "`params` has a ModuleState without names: take it with "
                "`extract_state_dict(module, enable_visual=True)`"
            )
        params = params.visual_contents
    if isinstance(params, str | Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            "`params` must be a mapping, a ModuleState, pairs of a name and a tensor, or an iterable of "
            f"these, got {type(params).__name__}"
        )
    for entry in params.items() if isinstance(params, Mapping) else params:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            yield from _named(entry)
        elif isinstance(entry[1], Tensor):
            yield entry
        else:
            raise TypeError(f"`params[{entry[0]!r}]` must be a tensor, got {type(entry[1]).__name__}")


def _saved(node: Node) -> Iterator[tuple[str, Any]]:
    """The values that an operation has saved, by name; a function in Python has one name for all its tensors."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                value = getattr(node, name)
            except RuntimeError:  # a backward has used it up
                value = "freed"
            if not (isinstance(value, tuple) and not value):
                yield name.removeprefix("_saved_"), value


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, tuple | list) else [value]
    return [part for part in values if isinstance(part, Tensor)]


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, int) and value >= 2**63:
        value -= 2**64  # torch shows dimension -1 so
    return " ".join(str(value).split())


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _label(lines: list[str]) -> str:
    """Lines as graphviz wants them; nothing in them is markup."""
    from graphviz import nohtml

    return nohtml("\\n".join(line.replace("\\", "\\\\") for line in lines))


def _empty() -> Digraph:
    try:
        from graphviz import Digraph
    except ImportError as error:
        raise ImportError(
            "`make_dot` needs the Python package `graphviz`: pip install 'torchopt_dist[visual]'"
        ) from error
    style = {"shape": "box", "style": "filled", "fontname": "monospace", "fontsize": "10", "height": "0.2"}
    return Digraph(node_attr=style, edge_attr={"fontname": "monospace", "fontsize": "8"})
