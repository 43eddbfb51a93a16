"""A loop whose steps were not recorded → its gradient: snapshots, and a backward pass of one step at a time."""
