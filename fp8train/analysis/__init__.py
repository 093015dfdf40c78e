"""Holding one run against another: reading runs, gates, the report and its picture."""
