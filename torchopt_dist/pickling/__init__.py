"""Functions and exceptions → bytes that another process makes them of."""
