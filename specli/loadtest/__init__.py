"""``specli bench --url``: a load test of any OpenAI-compatible server.

``lengths``, ``prompts`` and ``arrivals`` say what is asked and when, ``sse`` and ``client`` ask and take the time,
``window`` and ``run`` hold one load until it is measured, ``scrape`` reads acceptance, ``figures`` turns records into
figures, ``search`` finds the highest load inside the bounds, ``document`` and ``compare`` keep and compare, ``plot``
draws; ``measure`` joins them.
"""
