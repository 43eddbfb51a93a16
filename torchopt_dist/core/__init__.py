"""What all other floors compose: functions that run later than they were given."""
