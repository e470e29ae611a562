"""Traces -> verdict, with numpy alone, so that judging works on any machine."""
