"""What a process has of its machine, who started it, and what it prints: threads, memory, signals, tables."""
