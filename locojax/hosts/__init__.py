"""How hosts work together: the loops, the run folder, and what a person sees of a run."""
