"""Measuring runs and machines. It may import anything; of the other rooms, only the command line imports it."""
