"""What ``make_dot`` draws → its boxes, colours and edges, taken apart."""

from __future__ import annotations

import re
from collections import Counter

from torchopt_dist.visual import make_dot

NODE = re.compile(r'^\t(\w+) \[label=("(?:[^"\\]|\\.)*"|\w+) fillcolor=(\w+)\]$')
EDGE = re.compile(r"^\t(\w+) -> (\w+)(?: \[label=(\w+) dir=none style=dashed\])?$")


class Parsed:
    """A picture's text, taken apart; a line that is neither a node nor an edge is an error."""

    def __init__(self, dot):
        self.label, self.colour, self.edges, self.saved = {}, {}, [], []
        _, _, _, _, *lines, last = dot.source.rstrip().split("\n")
        assert last == "}"
        for line in lines:
            if node := NODE.match(line):
                name, label, colour = node.groups()
                assert name not in self.label, "a node is drawn twice"
                self.label[name] = label.strip('"').split("\\n")
                self.colour[name] = colour
            else:
                source, end, saved = EDGE.match(line).groups()
                (self.edges if saved is None else self.saved).append((source, end, saved))
        assert {end for edge in self.edges + self.saved for end in edge[:2]} <= self.label.keys()

    def said(self, edges):
        """Edges by the first lines of their ends' labels, counted."""
        return Counter((self.label[source][0], self.label[end][0]) for source, end, _ in edges)

    def having(self, colour):
        return sorted(self.label[name] for name in self.label if self.colour[name] == colour)


def parsed(*args, **kwargs):
    return Parsed(make_dot(*args, **kwargs))
