"""Configurations, and other servers, offered the same traffic in turn."""
