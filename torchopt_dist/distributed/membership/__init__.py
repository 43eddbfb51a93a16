"""A connection from every worker to rank 0 → who is there, who has failed, who is lost, who is new.

Others use ``membership.Membership`` and ``members``.
"""
