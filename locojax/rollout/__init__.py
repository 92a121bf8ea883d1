"""One host's generation engine: request -> schedule -> run -> finish."""
