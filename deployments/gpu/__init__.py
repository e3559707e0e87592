"""What the driver says of the GPUs that a replica owns: read through NVML, reported as metrics."""
