"""`tailrace quantize`: calibrated checkpoints."""
