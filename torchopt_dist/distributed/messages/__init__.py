"""A call, a backward, the end of a graph → what workers say of it: requests, replies, and what these are made of.

Others use ``requests``, ``payload``, ``message``, ``caller_state`` and ``timeout``.
"""
