"""Environment variables and an address → this process's place in the world, and a store that only this run can write.

Others use ``environment``, ``store`` and ``sealed_store``.
"""
