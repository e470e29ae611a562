"""Verdict -> text and pictures, by pure functions."""
