"""A request ``Message`` → the reply's: the function runs here, or its graph is differentiated.

Others use ``handler.handle_request``, ``execute`` and ``device``.
"""
