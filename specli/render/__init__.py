"""Events to a person: the answer to stdout, everything else to stderr. ``choose`` picks plain text or a live screen."""
