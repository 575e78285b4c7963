"""Whole runs of the quickstart's task, told by what is learned. All are long; run by hand: pytest -m long tests/learning"""
