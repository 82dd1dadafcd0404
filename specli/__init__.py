"""specli: faster local language models that say exactly what they said before."""

__version__ = "0.1.0"
