"""What this process holds for calls: its group, graphs and values that are kept, chunks that arrive, spans, logs.

Others use ``group`` (``current_group``, ``find_group``, ``Group``), and what hangs on it.
"""
