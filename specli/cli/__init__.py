"""The command line: Typer commands, each shared option declared once, one error boundary."""
