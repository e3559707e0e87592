"""What a tenant or key may take a minute, and at once."""
