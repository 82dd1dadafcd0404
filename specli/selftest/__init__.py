"""``specli selftest``: a user's own proof that speculation changes nothing here, with these files on this machine.

``laws`` enumerates the verifiers, ``rollback``, ``identity`` and ``continuations`` put engines and the decode loop to
the test, ``subject`` is what they are given, ``suite`` runs them.
"""
