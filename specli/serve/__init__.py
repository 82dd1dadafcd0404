"""``specli serve``: the decode loop over many requests, behind an OpenAI-compatible interface.

    protocol    what clients may ask, checked
    prompts     their token ids
    replies     what they get, as OpenAI and llama-server name it
    job         one answer that somebody waits for, from the engine's thread to the client's
    pace        pure: how much prompt to evaluate between two rounds, whom to let in
    scheduler   the engine's thread: slots, queue, rounds
    metrics     Prometheus
    guard       keys, and how much is read
    app         routes, and what becomes of errors
    server      uvicorn around it, and patience with connections

Only this room knows FastAPI, Pydantic, uvicorn and prometheus-client.
"""
