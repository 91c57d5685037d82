"""The maths of one layer: functions on one device's arrays, and thin Flax modules that own their parameters."""
