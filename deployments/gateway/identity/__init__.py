"""Who asks: API keys, the tenants they belong to, and what those may do."""
