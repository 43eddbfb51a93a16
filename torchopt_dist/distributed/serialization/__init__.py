"""An object → a ``Message``, a pickle with its tensors beside → frames of bytes; and back.

Others use ``pickling`` (``pack``, ``unpack``, ``reply_of``); transports use ``wire`` and ``frames``;
``names`` tells what is found by its name.
"""
