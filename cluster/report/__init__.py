"""Figures and reports of replays: JSON, CSV and one self-contained page."""
