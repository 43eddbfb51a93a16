"""A step of an inner loop → the same step as a few kernels that torch's compiler has made."""
