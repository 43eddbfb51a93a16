"""Payloads → futures of values, connected for backward: to each worker or down a tree, and again where one is lost.

Others use ``spread``, ``own_share``, ``gather``, ``awaited`` and ``siblings``.
"""
