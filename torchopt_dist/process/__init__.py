"""What a process has of its machine: threads, memory, signals, addresses, and who started it."""
