"""The settings of ``auto_init_rpc`` → a running group → its end, in order or after a failure.

Others use ``running_group.RunningGroup``.
"""
