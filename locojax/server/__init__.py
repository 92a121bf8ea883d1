"""The Tinker API over HTTP: requests -> typed operations -> an engine process. Imports no jax."""
