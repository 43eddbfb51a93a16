"""A worker, a ``Message`` → a future of the reply: by RPC or by ZeroMQ, and at another worker if that one is lost.

Others use ``base``, ``choice`` and ``retries``.
"""
