"""Groups of processes that compute together: who is in one, and whether it is still whole."""
