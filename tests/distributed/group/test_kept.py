"""Graphs and values are kept under their keys until they are released or their owner is gone, and not after."""

from __future__ import annotations

from torchopt_dist.distributed.group.kept import GIVEN_UP, Kept, KeptGraph, graph_missing


def test_a_graph_that_is_there_after_its_caller_was_lost_is_not_kept():
    """The caller was a relay, and its request was still at work: nobody releases that graph."""
    gone = set()
    graphs = Kept(graph_missing, gone.__contains__)
    graphs.keep((1, 0), KeptGraph([], []))
    gone |= {(1, 0), (1, 1)}
    graphs.forget_owner(1)
    graphs.keep((1, 1), KeptGraph([], []))
    assert not len(graphs)
    graphs.keep((1, 2), KeptGraph([], []))  # of the rank's next process
    assert len(graphs) == 1


def test_graphs_that_never_come_are_not_remembered_for_ever():
    """A function that raises makes no graph, and its caller releases it all the same."""
    graphs = Kept(graph_missing)
    for number in range(3 * GIVEN_UP):
        graphs.release((0, number), coming=True)
    assert len(vars(graphs)["_given_up"]) == GIVEN_UP
    graphs.keep((0, 3 * GIVEN_UP - 1), KeptGraph([], []))
    assert not len(graphs)
