"""Wrong arguments and names → errors that say what was meant."""
