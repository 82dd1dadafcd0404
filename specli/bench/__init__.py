"""``specli bench``: what speculation does to these models, these prompts, this machine.

``workloads`` has the prompts, ``harness`` decides what is run and when (over an abstract function that decodes a prompt
with a setting), ``runner`` is that function over a session, ``report`` and ``statistics`` turn runs into figures,
``advice`` into words, ``document`` and ``compare`` into files, ``plot`` into a picture; ``measure`` joins them.
"""
